"""Parses the reward spec of a programming task, and extracts the program from a completion. See
`keel.rewards.code.verifier` for a description of the spec."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from keel.rewards.sandbox.sandbox import Limits
from keel.rl.strict_json import allow_long_integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """The commands to compile and run programs in a language. They are run with `Sandbox.run`."""

    source: str
    """Name of the source file in `{box}`."""
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    """Command that compiles the source to the file `program`, which is then put in `{box}`."""
    extra: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Other files that are put in `{box}`, with their contents."""
    calls: tuple[str, ...] = ()
    """Command that calls functions (`keel.rewards.code.call_driver`). Empty if this is not
    supported."""


_LAUNCH = b"""
import builtins, sys
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)  # the time limit bounds what it reads and prints
builtins.exit = builtins.quit = sys.exit
source = compile(open(sys.argv.pop(), encoding="utf-8").read(), "solution.py", "exec")
del builtins, sys  # a program must import them itself
exec(globals().pop("source"))
"""
_DRIVER = Path(__file__).with_name("call_driver.py")

_LANGUAGES: dict[str, Language] = {
    # Without `site`, which doubles the start-up time.
    "python": Language(
        source="solution.py",
        run=("{python}", "-S", "{box}/launch.py", "{box}/solution.py"),
        extra={"launch.py": _LAUNCH, "driver.py": _DRIVER.read_bytes()},
        calls=("{python}", "-S", "{box}/driver.py", "{box}/solution.py"),
    ),
    "c++": Language(
        source="solution.cpp",
        compile=("g++", "-O2", "-std=c++17", "-o", "program", "{box}/solution.cpp"),
        run=("{box}/program",),
    ),
    "c": Language(
        source="solution.c",
        compile=("gcc", "-O2", "-std=c17", "-o", "program", "{box}/solution.c", "-lm"),
        run=("{box}/program",),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """A test of a program's output or, if `call` is set, of a function's return value."""

    stdin: bytes = b""
    stdout: str = ""
    call: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    returns: Any = None
    sample: bool = False
    """True if the task shows this test to the policy as an example."""
    subtask: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask:
    """A programming task, parsed from its reward spec."""

    language: Language
    tests: tuple[CodeTest, ...]
    partial: bool
    """If True, the score is the fraction of tests that pass. Otherwise, all tests must pass."""
    subtasks: Mapping[str, float]
    """The share of the score for each subtask, which is earned by passing all of its tests. The
    shares sum to 1."""
    reference: str | None
    tolerance: float | None
    limits: Mapping[str, Any]

    def within(self, limits: Limits) -> Limits:
        return replace(limits, **self.limits)


def code_block(text: str) -> str | None:
    """Return the last fenced code block, or None if there is none or it is cut off."""
    blocks = code_blocks(text)
    return blocks[-1] if blocks else None


def code_blocks(text: str) -> list[str]:
    """Return all fenced code blocks, or an empty list if the last one is cut off."""
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
            # A block in a list item is indented like its fence.
            inside.append(line.removeprefix(fence[1]))
    return blocks if fence is None else []


_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")


_KEYS = (
    *("kind", "language", "tests", "subtasks", "reference", "partial", "time_limit_s"),
    *("memory_mib", "tolerance", "environment", "columns"),
)
_OF_ANY = ("sample", "subtask")


def read_task(spec: Mapping[str, Any]) -> CodeTask:
    """Parse a reward spec into a task. Raises ValueError with the name of the invalid key or
    test."""
    _check_keys(spec, _KEYS, "code reward")
    name, tests = spec.get("language", "python"), spec.get("tests")
    if not isinstance(name, str) or name not in _LANGUAGES:
        raise ValueError(f"code reward: language {name!r}; use one of {', '.join(_LANGUAGES)}")
    language = _LANGUAGES[name]
    if not isinstance(tests, list) or not tests:
        raise ValueError("code reward: tests must be a list of at least one test")
    allow_long_integers()  # in tests and in return values
    cases = tuple(
        _read_test(test, f"code reward: tests[{index}]", language)
        for index, test in enumerate(cast(list[Any], tests))
    )
    subtasks = _subtasks(spec, cases)
    partial, reference = spec.get("partial", False), spec.get("reference")
    if not isinstance(partial, bool):
        raise ValueError(f"code reward: partial = {partial!r} must be true or false")
    if reference is not None and not isinstance(reference, str):
        raise ValueError("code reward: reference must be the source of a program")
    if partial and subtasks:
        raise ValueError("code reward: `partial` and `subtasks` exclude each other; remove one")
    limits: dict[str, Any] = {}
    for key, knob, kind in (("time_limit_s", "time_s", float), ("memory_mib", "memory_mib", int)):
        if spec.get(key) is not None:
            limits[knob] = _positive(spec[key], key, kind)
    try:
        Limits(**limits)
    except ValueError as error:
        raise ValueError(f"code reward: {error}") from error
    tolerance = spec.get("tolerance")
    if tolerance is not None and _positive(tolerance, "tolerance", float) >= 1:
        raise ValueError(f"code reward: tolerance = {tolerance!r} must be below 1")
    return CodeTask(
        language=language,
        tests=cases,
        partial=partial,
        subtasks=subtasks,
        reference=reference,
        tolerance=tolerance,
        limits=limits,
    )


def _read_test(test: Any, where: str, language: Language) -> CodeTest:
    if not isinstance(test, dict):
        raise ValueError(f"{where} must be an object")
    fields = cast(dict[str, Any], test)
    common = {key: fields[key] for key in _OF_ANY if key in fields}
    if type(common.get("sample", False)) is not bool or type(common.get("subtask", "")) is not str:
        raise ValueError(f"{where}: sample must be true or false, and subtask a name")
    if "call" not in fields:
        _check_keys(fields, ("stdin", "stdout", *_OF_ANY), where)
        stdin, stdout = fields.get("stdin", ""), fields.get("stdout")
        if not isinstance(stdin, str) or not isinstance(stdout, str):
            raise ValueError(f"{where}: stdin and stdout must be texts, or set `call`")
        return CodeTest(stdin=stdin.encode(), stdout=stdout, **common)
    _check_keys(fields, ("call", "args", "kwargs", "returns", *_OF_ANY), where)
    call: Any = fields["call"]
    args: Any = fields.get("args", [])
    kwargs: Any = fields.get("kwargs", {})
    if not isinstance(call, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)?", call):
        raise ValueError(f"{where}: call = {call!r} must be a function, or a class and its method")
    if not isinstance(args, list) or not isinstance(kwargs, dict) or "returns" not in fields:
        raise ValueError(f"{where}: needs args (a list), kwargs (an object) and returns")
    if not language.calls:
        raise ValueError(f"{where}: only Python functions can be called; use stdin and stdout")
    values: dict[str, Any] = {"args": args, "kwargs": kwargs, "returns": fields["returns"]}
    return CodeTest(call=call, **values, **common)


def _subtasks(spec: Mapping[str, Any], tests: Sequence[CodeTest]) -> dict[str, float]:
    named = {test.subtask for test in tests} - {""}
    entries: Any = spec.get("subtasks")
    if entries is not None and (not isinstance(entries, dict) or not entries):
        raise ValueError("code reward: subtasks must be an object from names to points")
    points: dict[str, float] = {
        str(name): _positive(value, f"subtasks[{name}]", float)
        for name, value in cast(dict[Any, Any], entries or {}).items()
    }
    for name in (*sorted(named - points.keys()), *(points.keys() - named)):
        problem = "is missing in `subtasks`" if name in named else "has no test"
        raise ValueError(f"code reward: subtask {name!r} {problem}")
    for index, test in enumerate(tests):
        if points and not test.subtask and not test.sample:
            raise ValueError(f"code reward: tests[{index}] needs a `subtask` or `sample: true`")
    return {name: value / sum(points.values()) for name, value in points.items()}


def _check_keys(fields: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
            raise ValueError(f"{where}: unknown key {key!r}; {hint}")


def _positive(value: Any, key: str, kind: type) -> Any:
    fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not fits or not 0 < value < math.inf:
        raise ValueError(f"code reward: {key} = {value!r} must be a positive {kind.__name__}")
    return value
