"""What the environment's own code raised, in words."""

from __future__ import annotations

import os
import traceback

MOST_SAID = 2000
"""Characters of an exception's text."""
_OURS = os.path.dirname(os.path.abspath(__file__))
_PYTHONS = ("<frozen", os.path.dirname(os.__file__))


class InvalidEnvironment(Exception):
    """What was named cannot be an environment. Says why, and the cure."""


class EnvironmentGone(Exception):
    """The episode's end, and no failure of a call: what the environment lives on is gone, or it
    does not say whether it is over."""


def error_location(error: BaseException) -> str:
    """Where it was raised, as `my_env.py:12 in buy`: the innermost line of the environment's."""
    ours = (_OURS, "<frozen importlib")
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if not one.filename.startswith(ours)
    ]
    theirs = [one for one in frames if not one.filename.startswith(_PYTHONS)]
    if not frames:
        return ""
    found = (theirs or frames)[-1]
    return f"{found.filename}:{found.lineno} in {found.name}"


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_SAID]
