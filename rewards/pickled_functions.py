"""Reward functions that Python code has at hand: `keel.train(rewards=my_reward)`.

The worker processes that call them are fresh interpreters, so a function travels as a file, pickled
by value where it stands in a script or a notebook. The recipe names it `python.my_reward`.
"""

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
"""Before the function's own name in a recipe. No module of that name is looked for."""
FOLDER = "KEEL_PASSED_FUNCTIONS"
"""Environment variable: where the functions of this process lie."""


def named(function: Callable[..., Any]) -> str:
    """What a recipe calls it. Raises ValueError for one without a name of its own."""
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise ValueError(f"reward {name}: has no name to call it by in metrics; write it with def")
    return PREFIX + name


@contextmanager
def passing(functions: Sequence[Callable[..., Any]]) -> Generator[None]:
    """Worker processes that start inside find `functions`. One `passing` at a time.

    Raises ValueError naming a function that cannot be pickled, and for two of one name.
    """
    pickled: dict[str, bytes] = {}
    for function in functions:
        name = named(function)
        if name in pickled:
            raise ValueError(f"reward {name}: two functions of that name; call one another way")
        try:
            pickled[name] = cloudpickle.dumps(function)  # pyright: ignore[reportUnknownMemberType]
        except Exception as error:  # whatever it holds on to may refuse, in any way
            raise ValueError(
                f"reward {name}: cannot be sent to the processes that call it ({error}). Let it "
                "make what it needs when it is first called, and keep that in a global"
            ) from error
    with TemporaryDirectory() as folder:
        for name, data in pickled.items():
            Path(folder, f"{name}.pkl").write_bytes(data)
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


@cache
def _read(path: Path) -> Any:
    """Once a process and folder, so that what a function keeps in a global is still there when it
    is called again."""
    return pickle.loads(path.read_bytes())  # of our own process: `passing`


def passed(name: str) -> Any:
    """The function that a recipe calls `name`. Raises ValueError where this process was passed
    none, and for one that cannot be read here."""
    folder = os.environ.get(FOLDER)
    path = Path(folder or ".", f"{name}.pkl")
    plain = name.removeprefix(PREFIX).isidentifier()  # a recipe's: it may be any path
    if not folder or not plain or not path.is_file():
        raise ValueError(
            f"reward {name!r}: was passed to keel.train by Python code; run that again, or put the "
            "function into a module and name it here as module.function"
        )
    try:
        return _read(path)
    except Exception as error:  # its module may be gone, and raise anything
        raise ValueError(
            f"reward {name!r}: cannot be read in the processes that call it "
            f"({type(error).__name__}: {error})"
        ) from error
