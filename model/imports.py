"""Imports of the large libraries, without the garbage collector and what they drag along."""

from __future__ import annotations

import gc
import sys
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


@contextmanager
def not_found(*names: str) -> Iterator[None]:
    """Around the import of a library that takes others along where it finds them, and which nobody
    here needs from it: meanwhile these are not installed. One that is loaded already stays."""
    hidden = [name for name in names if name not in sys.modules]
    modules: dict[str, object] = vars(sys)["modules"]
    modules.update(dict.fromkeys(hidden))  # None: `import` raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
