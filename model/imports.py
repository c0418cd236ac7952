"""Makes imports of large libraries faster."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Turn off the garbage collector during imports, and afterwards exempt the new objects from it.

    torch, transformers and vLLM create half a million permanent objects. Searching them for garbage
    takes a fifth of the import time, and later most of the time of each full collection.
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
    """Make optional dependencies appear missing while a library is imported. Modules that are
    already loaded stay available."""
    hidden = [name for name in names if name not in sys.modules]
    modules: dict[str, object] = vars(sys)["modules"]
    modules.update(dict.fromkeys(hidden))  # None: `import` raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


def missing_bytecode(library: ModuleType) -> str:
    """Return a warning if Python could not cache the bytecode for an imported library, or ""."""
    spec = library.__spec__
    if spec is None or spec.cached is None or Path(spec.cached).exists():
        return ""
    # The import would have written it if possible.
    forbidden, packages = sys.dont_write_bytecode, Path(str(spec.origin)).parents[1]
    reason = "PYTHONDONTWRITEBYTECODE is set" if forbidden else "it cannot be written"
    command = shlex.join([sys.executable, "-m", "compileall", "-q", "-j", "0", str(packages)])
    fix = f"Run once: {command}"
    if not os.access(packages, os.W_OK):
        unset = "unset PYTHONDONTWRITEBYTECODE, and " if forbidden else ""
        fix = f"To cache it elsewhere, {unset}set PYTHONPYCACHEPREFIX to a writable folder"
    return (
        f"the bytecode of {library.__name__} is not cached ({reason}), so every process spends "
        f"seconds to compile it. {fix}"
    )
