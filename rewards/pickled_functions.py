"""Passes reward functions given to `keel.train` to the worker processes by pickling them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

PREFIX = "python."
"""Starts the name that such a function has in a recipe."""
FOLDER = "KEEL_PASSED_FUNCTIONS"
"""Environment variable with the folder that holds this process's pickled functions."""


def named(function: Callable[..., Any]) -> str:
    """Return a function's name for use in recipes. Raises ValueError for a lambda or a partial."""
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise ValueError(f"reward {name}: the function has no name; define it with def")
    return PREFIX + name


@contextmanager
def passing(functions: Sequence[Callable[..., Any]]) -> Generator[None]:
    """Make `functions` available to worker processes that are started inside the block.

    Blocks cannot be nested. Raises ValueError for duplicate names, and for a function that cannot
    be pickled.
    """
    pickles: dict[str, bytes] = {}
    for function in functions:
        name = named(function)
        if name in pickles:
            raise ValueError(f"reward {name}: two functions have this name; rename one")
        try:
            pickles[name] = cloudpickle.dumps(function)  # pyright: ignore[reportUnknownMemberType]
        except Exception as error:  # captured objects may raise anything when pickled
            raise ValueError(
                f"reward {name}: the function cannot be pickled ({error}). Create such objects "
                "at the first call and keep them in a global"
            ) from error
    with TemporaryDirectory() as folder:
        for name, data in pickles.items():
            Path(folder, f"{name}.pkl").write_bytes(data)
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


@cache
def _load(path: Path) -> Any:
    """Load a function once in each process, so that it keeps its globals between calls."""
    return pickle.loads(path.read_bytes())  # written by `passing` in our own process


def passed(name: str) -> Any:
    """Load the function that a recipe calls `name`. Raises ValueError if it is not available."""
    folder = os.environ.get(FOLDER)
    path = Path(folder or ".", f"{name}.pkl")
    is_plain = name.removeprefix(PREFIX).isidentifier()  # a recipe may hold any path
    if not folder or not is_plain or not path.is_file():
        raise ValueError(
            f"reward {name!r} was passed to keel.train from Python; run that script again, or move "
            "the function into a module and name it as module.function"
        )
    try:
        return _load(path)
    except Exception as error:  # unpickling imports modules, which may raise anything
        raise ValueError(
            f"reward {name!r} cannot be unpickled: {type(error).__name__}: {error}"
        ) from error
