"""What rewards fail of: each kind of error said once, and the run stopped where it is too much."""

from __future__ import annotations

import difflib
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

WINDOW = 200
"""The share of failures is taken over so many completions …"""
LEAST = 20
"""… and, while there are fewer, as if there were so many."""
MOST_SAID = 5
"""Errors of one function, or of one kind of verifier, that are said: each is of another place."""
MOST_NAMED = 12
"""Keys, or attributes, that a note of an error names."""

_OURS = str(Path(__file__).absolute().parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_DUMPED = re.compile(r'File "(.+)", line (\d+) in (.+)')


class RewardStopped(RuntimeError):
    """Too many completions could not be scored: the run has to stop."""


class Recent:
    """How many of the last completions failed. Not for several threads."""

    def __init__(self, share: float) -> None:
        """share: more than this of the last `WINDOW` (at the start: of `LEAST`) is too much. 0: one
        is; 1: none ever are."""
        self._share = share
        self._failed: deque[bool] = deque(maxlen=WINDOW)

    def add(self, failed: bool) -> str:
        """Why that is too much, or "": `5 of the last 5 completions`."""
        self._failed.append(failed)
        bad, seen = sum(self._failed), len(self._failed)
        if not failed or bad <= self._share * max(seen, LEAST):
            return ""
        return f"{bad} of the last {seen} completions"


class Failures:
    """Says and counts the errors of one run's rewards. For any number of threads."""

    def __init__(self, share: float, say: Callable[[str], None]) -> None:
        """share: of a function's completions, as in `Recent`; say: for people, a line at a time."""
        self._share = share
        self.say = say
        self._recent: dict[str, Recent] = {}
        self._said: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def note(self, name: str, prompt_id: str, errors: Sequence[tuple[str, str]]) -> None:
        """Of each completion of a prompt, what `name` failed of ("" if it did not), and where.

        Raises RewardStopped once a user's function failed on too many completions. A verifier that
        cannot read what the policy came up with is the policy's failure, and does not count.
        """
        lines: list[str] = []
        stop = ""
        with self._lock:
            said = self._said.setdefault(name, set())
            recent = self._recent.setdefault(name, Recent(self._share))
            for error, at in errors:
                place = at or error.partition(":")[0]
                if error and place not in said and len(said) < MOST_SAID:
                    said.add(place)
                    lines.append(
                        f"reward {name} failed on prompt {prompt_id}: {_told(error, at)}. Such "
                        "completions get 0 for it and count in reward/error; this is said once"
                    )
                if (much := recent.add(bool(error))) and is_function(name):
                    stop = stop or (
                        f"reward {name} failed on {much}, and rewards.max_failure_fraction = "
                        f"{self._share:g}; the last, of prompt {prompt_id}: {_told(error, at)}. "
                        "Fix the function, or raise rewards.max_failure_fraction"
                    )
        for line in lines:
            self.say(line)
        if stop:
            raise RewardStopped(stop)


def to_standard_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def is_function(part: str) -> bool:
    """Whether a reward part is a dotted name: a function of the user's."""
    return "." in part


def place(error: BaseException) -> str:
    """Where it was raised, as `my_rewards.py:12 in brief`: the innermost line that is neither a
    library's nor of this package, else the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    theirs = [frame for frame in frames if not _is_known(frame.filename)]
    found = (theirs or frames)[-1]
    return shown(found.filename, found.lineno or 0, found.name)


def place_in(dump: str) -> str:
    """As `place`, from what `faulthandler` wrote when the process ended: innermost line first."""
    frames = _DUMPED.findall(dump)
    if not frames:
        return ""
    theirs = [frame for frame in frames if not _is_known(frame[0])]
    file, line, name = (theirs or frames)[0]
    return shown(file, int(line), name)


def shown(file: str, line: int, name: str) -> str:
    """`my_rewards.py:12 in brief`, relative to the working directory if it is in there."""
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{line} in {name}"


def _is_known(file: str) -> bool:
    return file.startswith((_OURS + os.sep, "<frozen", *_LIBRARIES))


def _told(error: str, at: str) -> str:
    """For a terminal: a policy's text may be in there, and escape sequences in that."""
    text = f"{error} ({at})" if at else error
    return "".join(c if c.isprintable() else "�" for c in text.replace("\n", " "))


def explain(error: AttributeError | KeyError | TypeError, prompt: Any, given: Any) -> None:
    """Add to an error about `prompt` or `given`, a trajectory or a group of them, what these are
    for."""
    if isinstance(error, KeyError):
        if said := _keys(error, prompt, given):
            error.add_note(said)
        return
    several = isinstance(given, tuple)
    one = cast(tuple[Any, ...], given)[0] if several else given
    if isinstance(error, AttributeError):
        about: Any = error.obj
    else:  # `'TextTrajectory' object is not iterable`, `expected str, got 'Prompt'`
        names = re.findall(r"\w+", str(error))
        named = [it for it in (prompt, one) if type(it).__name__ in names]
        about = named[0] if named else None
    if about is prompt:
        said = f"a prompt has {_listed(_public(prompt))}"
        if isinstance(error, AttributeError):
            said += _elsewhere(prompt.reward, error.name, "prompt.reward")
        error.add_note(said)
    elif type(about) is type(one):
        error.add_note(f"a trajectory has {_listed(_public(one))}; its text is trajectory.answer")
    elif several and about is given:
        error.add_note(
            "trajectories are all of a group, a tuple; call the parameter `trajectory` to get one "
            "at a time"
        )


def _keys(error: KeyError, prompt: Any, given: Any) -> str:
    """What there is where a key was looked for, if the failing expression says where that was."""
    *_, frame = traceback.extract_tb(error.__traceback__) or [None]
    if frame is None or frame.lineno is None or frame.end_lineno != frame.lineno:
        return ""
    line = linecache.getline(frame.filename, frame.lineno).encode()
    looked = line[frame.colno : frame.end_colno].decode(errors="replace")
    key = error.args[0] if error.args else ""
    if ".reward[" in looked:
        place, there = "prompt.reward", cast(Mapping[str, Any], prompt.reward)
        for name, value in prompt.reward.items():
            inside = rf"""\.reward\[["']{re.escape(str(name))}["']\]\["""
            if isinstance(value, Mapping) and re.search(inside, looked):
                place, there = f"{place}[{name!r}]", cast(Mapping[str, Any], value)
        return f"{place} has {_listed(list(there))}{_elsewhere(there, key, place)}"
    if ".messages[" in looked:
        one = cast(tuple[Any, ...], given)[0] if isinstance(given, tuple) else given
        names = dict.fromkeys(name for each in (*prompt.messages, *one.messages) for name in each)
        return f"messages have {_listed(list(names))}"
    return ""


def _public(of: Any) -> list[str]:
    return [name for name in dir(of) if not name.startswith("_") and name not in ("dumps", "loads")]


def _elsewhere(inside: Mapping[str, Any], key: Any, place: str) -> str:
    """Where what was asked for is, or what is nearly called so."""
    if key in inside:
        return f"; write {place}[{key!r}]"
    for outer, value in inside.items():
        if isinstance(value, Mapping) and key in value:
            return f"; write {place}[{outer!r}][{key!r}]"
    near = difflib.get_close_matches(str(key), [str(one) for one in inside], n=1)
    return f"; did you mean {place}[{near[0]!r}]?" if near else ""


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (", ".join(map(str, names[:MOST_NAMED])) or "no keys") + more
