"""Processes that are forked from one that has imported their libraries."""

from __future__ import annotations

from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from typing import Any

_LOADED: list[str] = []


def forked_from(*modules: str) -> ForkServerContext:
    """Python keeps one such process, which has the environment of its start. The first of its
    `modules` says whose it is: that of another is ended here."""
    context = get_context("forkserver")
    if _LOADED and _LOADED[0] != modules[0]:
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        server._stop()  # as Python's own tests do
    _LOADED[:] = modules
    context.set_forkserver_preload(_LOADED)
    return context
