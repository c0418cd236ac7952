"""Processes forked from a server that has preloaded their libraries."""

from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from typing import Any

_LOADED: list[str] = []


def forked_from(*modules: str) -> ForkServerContext:
    """Return a forkserver context that preloads `modules`. Python runs a single such server, so a
    server with another first module is stopped."""
    context = get_context("forkserver")
    if _LOADED and _LOADED[0] != modules[0]:
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        server._stop()  # as Python's own tests do
    _LOADED[:] = modules
    context.set_forkserver_preload(_LOADED)
    return context
