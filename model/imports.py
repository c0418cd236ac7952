"""Imports of the large libraries, without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Around imports at the start of a process.

    torch, transformers and vLLM make half a million objects while they are imported, and all of
    them stay: looking for garbage among them is a fifth of that time, and most of that of every
    full collection to come, so that none looks at them again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
