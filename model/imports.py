"""Imports of the large libraries, without the garbage collector and what they drag along."""

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


def compiled_anew(library: ModuleType) -> str:
    """What to say of a library that has just been imported, and whose bytecode Python has not
    kept: it compiles the source again in every process. "" where it has."""
    spec = library.__spec__
    if spec is None or spec.cached is None or Path(spec.cached).exists():
        return ""
    # It would be there now if Python could have kept it.
    forbidden, packages = sys.dont_write_bytecode, Path(str(spec.origin)).parents[1]
    why = "PYTHONDONTWRITEBYTECODE is set" if forbidden else "it cannot be written"
    command = shlex.join([sys.executable, "-m", "compileall", "-q", "-j", "0", str(packages)])
    cure = f"Once: {command}"
    if not os.access(packages, os.W_OK):
        unset = "unset PYTHONDONTWRITEBYTECODE, and " if forbidden else ""
        cure = f"To keep it elsewhere, {unset}set PYTHONPYCACHEPREFIX to a folder of your own"
    return (
        f"the bytecode of {library.__name__} is not kept ({why}): every process compiles it again, "
        f"seconds of each start. {cure}"
    )
