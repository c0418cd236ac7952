"""Speed up the import of large libraries."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Turn off garbage collection during imports, and exempt the imported objects from later
    collections. torch, transformers and vLLM create half a million permanent objects. Scanning them
    accounts for a fifth of the import time and most of the time of each full collection."""
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
    """Hide the named modules while importing a library, unless they are already loaded."""
    hidden = [name for name in names if name not in sys.modules]
    modules: dict[str, object] = vars(sys)["modules"]
    modules.update(dict.fromkeys(hidden))  # None: `import` raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
