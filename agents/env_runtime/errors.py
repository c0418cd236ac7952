"""Errors that environments raise, and functions that describe them."""

from __future__ import annotations

import os
import traceback

_MAX_CHARACTERS = 2000
_OURS = os.path.dirname(os.path.abspath(__file__))
_STANDARD_LIBRARY = ("<frozen", os.path.dirname(os.__file__))


class InvalidEnvironment(Exception):
    """Raised if the target cannot be used as an environment. The message says how to fix it."""


class EnvironmentGone(Exception):
    """Raised if the environment's backend is gone or its attribute `done` is invalid."""


def error_location(error: BaseException) -> str:
    """Return the location in the environment's code where an error was raised, such as
    `my_env.py:12 in buy`."""
    ours = (_OURS, "<frozen importlib")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours)
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(_STANDARD_LIBRARY)]
    if not frames:
        return ""
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]
