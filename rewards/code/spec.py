"""Reads what a prompt says about its programs (`rewards.code` shows how), and finds the program in
a completion."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from keel.rewards.code.languages import LANGUAGES, Language
from keel.rewards.sandbox.watch import Limits
from keel.rl.strict_json import allow_long_integers

allow_long_integers()  # in tests, and in what programs return


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A test of a program's output, or, with `call`, of what a function returns."""

    stdin: bytes = b""
    stdout: str = ""
    call: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    returns: Any = None
    sample: bool = False
    """Whether the task shows it."""
    subtask: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A spec that has been read."""

    language: Language
    tests: tuple[Case, ...]
    partial: bool
    """Whether the score is the share of tests passed; else it is all or nothing, and the tests
    after the first failure are not run."""
    subtasks: Mapping[str, float]
    """Share of the score that each is worth, all of its tests passed; they sum to 1. Empty: there
    are none."""
    reference: str | None
    tolerance: float | None
    limits: Mapping[str, Any]

    def within(self, limits: Limits) -> Limits:
        return replace(limits, **self.limits)


def code_block(text: str) -> str | None:
    """The content of the last fenced code block; None without one, or if it is cut off."""
    blocks = code_blocks(text)
    return blocks[-1] if blocks else None


def code_blocks(text: str) -> list[str]:
    """The contents of the fenced code blocks; none of them if the last is cut off."""
    blocks: list[str] = []
    fence: re.Match[str] | None = None
    inside: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line)
        if fence is None:
            if match is not None:
                fence, inside = match, []
        elif match and match[2].startswith(fence[2]) and not match[3].strip():
            blocks.append("\n".join(inside) + "\n")
            fence = None
        else:
            # A block in a list is indented as its fence is.
            inside.append(line.removeprefix(fence[1]))
    return blocks if fence is None else []


_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")


_KEYS = [
    "kind",
    "language",
    "tests",
    "subtasks",
    "reference",
    "partial",
    "time_limit_s",
    "memory_mib",
    "tolerance",
    "environment",
    "columns",
]  # of a spec
_OF_ANY = ("sample", "subtask")
_STDIN_KEYS, _CALL_KEYS = ("stdin", "stdout"), ("call", "args", "kwargs", "returns")


def read_task(spec: Mapping[str, Any]) -> Task:
    """Raises ValueError naming what cannot be read, and the test it is in."""
    _no_others(spec, _KEYS, "code reward")
    name = spec.get("language", "python")
    if not isinstance(name, str) or name not in LANGUAGES:
        raise ValueError(f"code reward: language {name!r}; there are {', '.join(LANGUAGES)}")
    language = LANGUAGES[name]
    tests = spec.get("tests")
    if not isinstance(tests, list) or not tests:
        raise ValueError("code reward: tests must be a list of at least one test")
    read = tuple(
        _read_test(test, f"code reward: tests[{index}]", language)
        for index, test in enumerate(cast(list[Any], tests))
    )
    subtasks = _subtasks(spec, read)
    partial, reference = spec.get("partial", False), spec.get("reference")
    if not isinstance(partial, bool):
        raise ValueError(f"code reward: partial = {partial!r} must be true or false")
    if reference is not None and not isinstance(reference, str):
        raise ValueError("code reward: reference must be the source of a program")
    if partial and subtasks:
        raise ValueError("code reward: has `partial` and `subtasks`; keep one")
    limits: dict[str, Any] = {}
    for key, knob in (("time_limit_s", "time_s"), ("memory_mib", "memory_mib")):
        if spec.get(key) is not None:
            limits[knob] = _positive(spec[key], key, int if key == "memory_mib" else float)
    if limits:
        try:
            Limits(**limits)
        except ValueError as error:
            raise ValueError(f"code reward: {error}") from error
    tolerance = spec.get("tolerance")
    if tolerance is not None and _positive(tolerance, "tolerance", float) >= 1:
        raise ValueError(f"code reward: tolerance = {tolerance!r} must be below 1")
    return Task(
        language=language,
        tests=read,
        partial=partial,
        subtasks=subtasks,
        reference=reference,
        tolerance=tolerance,
        limits=limits,
    )


def _read_test(test: Any, where: str, language: Language) -> Case:
    if not isinstance(test, dict):
        raise ValueError(f"{where} must be an object")
    fields = cast(dict[str, Any], test)
    sample, subtask = fields.get("sample", False), fields.get("subtask", "")
    if not isinstance(sample, bool) or not isinstance(subtask, str):
        raise ValueError(f"{where}: sample must be true or false, and subtask the name of one")
    if "call" not in fields:
        _no_others(fields, (*_STDIN_KEYS, *_OF_ANY), where)
        stdin, stdout = fields.get("stdin", ""), fields.get("stdout")
        if not isinstance(stdin, str) or not isinstance(stdout, str):
            raise ValueError(f"{where}: stdin and stdout must be texts, or name a function to call")
        return Case(stdin=stdin.encode(), stdout=stdout, sample=sample, subtask=subtask)
    _no_others(fields, (*_CALL_KEYS, *_OF_ANY), where)
    call, args, kwargs = fields["call"], fields.get("args", []), fields.get("kwargs", {})
    if not isinstance(call, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)?", call):
        raise ValueError(
            f"{where}: call = {call!r} must name a function, or a class and its method"
        )
    if not isinstance(args, list) or not isinstance(kwargs, dict) or "returns" not in fields:
        raise ValueError(f"{where}: needs args (a list), kwargs (an object) and returns")
    if not language.calls:
        raise ValueError(f"{where}: functions can be called in Python only; use stdin and stdout")
    return Case(
        call=call,
        args=cast(list[Any], args),
        kwargs=cast(dict[str, Any], kwargs),
        returns=fields["returns"],
        sample=sample,
        subtask=subtask,
    )


def _subtasks(spec: Mapping[str, Any], tests: Sequence[Case]) -> dict[str, float]:
    """`Task.subtasks`, from the points of each. Raises ValueError."""
    given, named = spec.get("subtasks"), {test.subtask for test in tests} - {""}
    if given is None:
        if named:
            raise ValueError(
                f"code reward: a test is of subtask {min(named)!r}; say in `subtasks` how many "
                "points each is worth"
            )
        return {}
    if not isinstance(given, dict) or not given:
        raise ValueError("code reward: subtasks must be an object: the points of each by its name")
    points: dict[str, float] = {
        str(name): _positive(value, f"subtasks[{name}]", float)
        for name, value in cast(dict[Any, Any], given).items()
    }
    for name in (*sorted(named - points.keys()), *(points.keys() - named)):
        where = "a test names it, and `subtasks` does not" if name in named else "has no test"
        raise ValueError(f"code reward: subtask {name!r}: {where}")
    for index, test in enumerate(tests):
        if not test.subtask and not test.sample:
            raise ValueError(f"code reward: tests[{index}] needs a `subtask`, or `sample: true`")
    return {name: value / sum(points.values()) for name, value in points.items()}


def _no_others(fields: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"{where}: no field {key!r}; {hint}")


def _positive(value: Any, key: str, kind: type) -> Any:
    fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not fits or not 0 < value < math.inf:
        raise ValueError(f"code reward: {key} = {value!r} must be a positive {kind.__name__}")
    return value
