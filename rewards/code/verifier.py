r"""Runs programs on hidden tests.

Expected outputs never enter the sandbox. A program only gets the input, and its output is compared
outside the sandbox. It can therefore neither read the expected output nor forge a verdict. The
return value of a call leaves the sandbox as data, so a forged one is just another wrong value.

Spec (`Prompt.reward`):

    {"kind": "code", "language": "python", "partial": false, "reference": "…",
     "time_limit_s": 2.0, "memory_mib": 512, "tolerance": 1e-6,
     "tests": [{"stdin": "1 2\n", "stdout": "3\n"},
               {"call": "add", "args": [1, 2], "kwargs": {}, "returns": 3},
               {"call": "Solution.add", "args": [1, 2], "returns": 3}]}

Only `kind` and `tests` are required. Only Python supports `call`. All calls run in the same process
until it exits. `"sample": true` marks a test that the policy can see in the task. `"subtask": NAME`
assigns a test to a subtask. The points of the subtasks are in `"subtasks": {NAME: points, …}`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeGuard, cast

from pydantic import BaseModel, Field, model_validator

from keel.configs.sections.rewards import CodeConfig
from keel.rewards.sandbox.sandbox import Limits, Sandbox, SandboxOutcome, open_sandbox
from keel.rewards.spec import STRICT, RewardSpec
from keel.rewards.text import outside_think
from keel.rl.strict_json import allow_long_integers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Language:
    """The commands `Sandbox.run` uses to compile and run programs in one language."""

    source: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()  # compiles the source to `program`, which is put in `{box}`
    extra: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    calls: tuple[str, ...] = ()  # calls functions (`keel.rewards.code.call_driver`)


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

_LANGUAGES: dict[str, _Language] = {
    # Without `site`, which doubles the start-up time.
    "python": _Language(
        source="solution.py",
        run=("{python}", "-S", "{box}/launch.py", "{box}/solution.py"),
        extra={"launch.py": _LAUNCH, "driver.py": _DRIVER.read_bytes()},
        calls=("{python}", "-S", "{box}/driver.py", "{box}/solution.py"),
    ),
    "c++": _Language(
        source="solution.cpp",
        compile=("g++", "-O2", "-std=c++17", "-o", "program", "{box}/solution.cpp"),
        run=("{box}/program",),
    ),
    "c": _Language(
        source="solution.c",
        compile=("gcc", "-O2", "-std=c17", "-o", "program", "{box}/solution.c", "-lm"),
        run=("{box}/program",),
    ),
}


class _CodeTest(BaseModel):
    """A test of the output of a program or, if `call` is set, of the return value of a function."""

    model_config = STRICT
    stdin: str = ""
    stdout: str | None = None
    call: str | None = Field(None, pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)?$")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    returns: Any = None
    sample: bool = False  # True if the task shows this test to the policy as an example
    subtask: str = ""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.stdout is None) == (self.call is None):
            raise ValueError("needs either `stdout` or `call`")
        if self.call is not None and "returns" not in self.model_fields_set:
            raise ValueError("needs `returns`, the expected value of the call")
        self.stdin.encode()  # raises ValueError for half of a surrogate pair
        return self


class _CodeTask(RewardSpec):
    language: Literal["python", "c++", "c"] = "python"
    tests: tuple[_CodeTest, ...] = Field(min_length=1, strict=False)
    partial: bool = False  # if True, the score is the fraction of tests that pass
    subtasks: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    reference: str | None = None
    tolerance: float | None = Field(None, gt=0, lt=1)
    time_limit_s: float | None = None
    memory_mib: int | None = None

    @model_validator(mode="after")
    def _check_tests(self) -> Self:
        if self.partial and self.subtasks:
            raise ValueError("`partial` and `subtasks` exclude each other; remove one")
        if self.language != "python" and any(test.call for test in self.tests):
            raise ValueError("tests: only Python functions can be called; use stdin and stdout")
        points, named = {*(self.subtasks or {})}, {test.subtask for test in self.tests} - {""}
        if points != named:
            different = ", ".join(sorted(points ^ named))
            raise ValueError(
                f"subtasks and tests must name the same subtasks; differ in {different}"
            )
        if points and not all(test.subtask or test.sample for test in self.tests):
            raise ValueError("with subtasks, all tests need a `subtask` or `sample: true`")
        self.limits(CodeConfig())
        return self

    def limits(self, settings: CodeConfig) -> Limits:
        """Return the resource limits: those in `settings`, unless the task sets its own."""
        limits = Limits(**{each.name: getattr(settings, each.name) for each in fields(Limits)})
        if self.time_limit_s is not None:
            limits = replace(limits, time_s=self.time_limit_s)
        if self.memory_mib is not None:
            limits = replace(limits, memory_mib=self.memory_mib)
        return limits

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """The share of the score for each subtask."""
        points = self.subtasks or {}
        return {name: value / sum(points.values()) for name, value in points.items()}


def code_blocks(text: str) -> list[str]:
    """Return the contents of all fenced code blocks, or an empty list if the last block is never
    closed."""
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


def read_task(spec: Mapping[str, Any]) -> _CodeTask:
    """Parse a programming task's reward spec. Raises ValueError naming the invalid field."""
    allow_long_integers()  # in tests and in return values
    return _CodeTask.parse(spec)


_REL_TOLERANCE = 1e-9
_MAX_COMPARISONS = 500_000
_WHOLE = re.compile(r"[+-]?[0-9]+")


def _same_value(expected: Any, value: Any, tolerance: float | None = None) -> bool:
    """Compare two values encoded as in `keel.rewards.code.call_driver`.

    A list equals a tuple with the same items, and the order of sets and dicts doesn't matter. A
    number never equals a boolean. Integers must match exactly. Other numbers may differ by up to
    `tolerance`, which is relative unless the expected number is an integer. Values that take more
    than `_MAX_COMPARISONS` comparisons count as different.
    """
    return _Comparison(tolerance).same(expected, value)


class _Comparison:
    def __init__(self, tolerance: float | None) -> None:
        self._tolerance = tolerance
        self._budget = _MAX_COMPARISONS

    def same(self, expected: Any, value: Any) -> bool:
        if _is_number(expected) and _is_number(value):
            return _numbers_match(expected, value, self._tolerance)
        kind, left = _collection_items(expected)
        other, right = _collection_items(value)
        if kind != other or kind == "?":  # malformed
            return False
        if kind == "":
            return type(expected) is type(value) and expected == value
        if len(left) != len(right):
            return False
        if kind != "~tuple":
            return self._same_unordered(left, right)
        return all(map(self.same, left, right))

    def _same_unordered(self, expected: list[Any], value: list[Any]) -> bool:
        """Sort two unordered collections and compare them. Items that end up in different positions
        because of rounding are matched one by one."""
        expected, value = sorted(expected, key=_sort_key), sorted(value, key=_sort_key)
        pairs = zip(expected, value, strict=True)
        differing = [i for i, (one, two) in enumerate(pairs) if not self.same(one, two)]
        if differing and not any(isinstance(v, float) for v in _values_in([expected, value])):
            return False
        remaining = list(differing)
        for i in differing:
            for j in remaining:
                self._budget -= 1 + sum(1 for _ in _values_in([expected[i], value[j]]))
                if self._budget < 0:
                    return False
                if self.same(expected[i], value[j]):
                    remaining.remove(j)
                    break
            else:
                return False
        return True


def _same_text(expected: str, output: str, tolerance: float | None = None) -> bool:
    """Compare two outputs, ignoring trailing whitespace. If `tolerance` is set, compare them word
    by word, with the same tolerance for numbers as `_same_value`."""
    if tolerance is None:
        return _lines(expected) == _lines(output)
    left, right = expected.split(), output.split()
    return len(left) == len(right) and all(
        a == b or _close_words(a, b, tolerance) for a, b in zip(left, right, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers_match(expected: int | float, value: int | float, tolerance: float | None) -> bool:
    if isinstance(expected, int) and isinstance(value, int):
        return expected == value
    try:
        left, right = float(expected), float(value)
    except OverflowError:  # an integer beyond floating point
        return False
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return _within_tolerance(left, right, tolerance, whole=isinstance(expected, int))


def _within_tolerance(
    expected: float, value: float, tolerance: float | None, *, whole: bool
) -> bool:
    if expected == value:
        return True
    difference = abs(expected - value)
    if not math.isfinite(difference):
        return False
    if tolerance is None:
        most = _REL_TOLERANCE * abs(expected)
        return difference <= (min(most, 1e-6) if whole else max(most, 1e-12))
    return difference <= tolerance * (1.0 if whole else max(1.0, abs(expected)))


def _close_words(expected: str, value: str, tolerance: float) -> bool:
    whole = _WHOLE.fullmatch(expected) is not None
    if whole and _WHOLE.fullmatch(value):
        return int(expected) == int(value) if max(len(expected), len(value)) < 4000 else False
    if not value.isascii() or "_" in value:  # numbers to Python only
        return False
    try:
        left, right = float(expected), float(value)
    except ValueError:
        return False
    return _within_tolerance(left, right, tolerance, whole=whole)


def _collection_items(value: Any) -> tuple[str, list[Any]]:
    """Return a collection's kind and its items. The kind is "" for any other value and "?" for a
    malformed collection."""
    if isinstance(value, list):
        return "~tuple", cast(list[Any], value)
    if not isinstance(value, dict):
        return "", []
    items = cast(dict[str, Any], value)
    if len(items) == 1:
        ((key, content),) = items.items()
        if key in ("~tuple", "~set", "~dict"):
            return (key, cast(list[Any], content)) if isinstance(content, list) else ("?", [])
    return "~dict", [[key, item] for key, item in items.items()]


def _values_in(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        pending += _collection_items(value)[1]


def _sort_key(item: Any) -> tuple[int, Any]:
    """Return a sort key that orders numbers by value. They are rounded, so that 9.9999999 ends up
    next to 10.0."""
    if _is_number(item):
        return 0, (True, 0) if math.isnan(item) else (False, round(item, 6))
    kind, inside = _collection_items(item)
    if kind in ("", "?"):
        return 1, json.dumps(item)
    keys = [_sort_key(part) for part in inside]
    return 2, (kind, keys if kind == "~tuple" else sorted(keys))


_MAX_CHARACTERS = 1 << 18
_OUT_OF_TIME = "the completion ran out of time"
_COMPILE_LIMITS = Limits(
    time_s=20.0, memory_mib=2048, processes=16, files_mib=256, output_kib=64 << 10
)
"""Resource limits for compilers, which are trusted, unlike the source code."""


class _CodeVerdict(NamedTuple):
    """The score of a program, from 0 to 1."""

    score: float
    failures: tuple[str, ...]  # the reason each test of the spec failed, or "" if it passed
    parts: Mapping[str, float]
    """Additional reward parts. `samples` is 1 if the program passed all tests that the task
    shows, and `subtask/NAME` is the part of the score earned in a subtask."""


def code_verifier(spec: Mapping[str, Any], settings: CodeConfig) -> Callable[[str], _CodeVerdict]:
    """Build a verifier that runs the last code block in an answer against the hidden tests. Code
    inside the thinking is ignored.

    Raises ValueError if the spec is malformed or this machine can't isolate programs. The verifier
    raises RuntimeError if the sandbox itself fails.
    """
    task, sandbox = read_task(spec), open_sandbox(settings.isolation)

    def verify(answer_text: str) -> _CodeVerdict:
        blocks = code_blocks(outside_think(answer_text))
        if not blocks:
            return _verdict(task, [], "no closed code block at the end of the answer")
        if len(blocks[-1]) > _MAX_CHARACTERS:
            return _verdict(task, [], f"the program is longer than {_MAX_CHARACTERS} characters")
        return _Attempt(task, blocks[-1], sandbox, settings).verdict()

    return verify


def check_task(
    spec: Mapping[str, Any], settings: CodeConfig, *, name: str, run_reference: bool = False
) -> None:
    """Raise ValueError if an expected output is longer than a program may print or, with
    `run_reference`, if the `reference` solution fails a test."""
    limit, task = settings.output_kib, read_task(spec)
    for index, test in enumerate(task.tests):
        output = test.stdout or ""
        shortest = len("\n".join(_lines(output)).encode(errors="replace"))
        if task.tolerance is not None:  # a number within the tolerance may have fewer digits
            shortest = 2 * len(output.split()) - 1
        if shortest / 1024 > limit:
            raise ValueError(
                f"{name}: tests[{index}] expects more output than {limit} KiB; raise "
                "rewards.code.output_kib or shorten the test"
            )
    if not run_reference:
        return
    sandbox = open_sandbox(settings.isolation)
    verdict = _Attempt(task, task.reference or "", sandbox, settings).verdict()
    for index, failure in enumerate(verdict.failures):
        if failure:
            raise ValueError(
                f"{name}: its reference solution fails tests[{index}]: {failure}; correct one of "
                "them"
            )


def _failed_subtasks(task: _CodeTask, failures: Sequence[str]) -> set[str]:
    return {test.subtask for test, why in zip(task.tests, failures, strict=False) if why}


def _verdict(task: _CodeTask, failures: list[str], skipped: str = "not run") -> _CodeVerdict:
    failures += [skipped] * (len(task.tests) - len(failures))
    failed = _failed_subtasks(task, failures)
    if task.subtasks:
        score = math.fsum(share for name, share in task.shares.items() if name not in failed)
    else:
        score = failures.count("") / len(failures) if task.partial else float(not any(failures))
    parts = {f"subtask/{k}": share * (k not in failed) for k, share in task.shares.items()}
    if shown := [why for test, why in zip(task.tests, failures, strict=True) if test.sample]:
        parts["samples"] = float(not any(shown))
    return _CodeVerdict(score, tuple(failures), parts)


class _Attempt:
    def __init__(self, task: _CodeTask, code: str, sandbox: Sandbox, settings: CodeConfig) -> None:
        self._task, self._sandbox = task, sandbox
        self._language = _LANGUAGES[task.language]
        self._limits = task.limits(settings)
        self._deadline = time.monotonic() + settings.completion_s
        # A lone surrogate cannot be encoded; escaped, it is a syntax error.
        source = code.encode(errors="backslashreplace")
        self._files: Mapping[str, bytes] = {self._language.source: source, **self._language.extra}

    def verdict(self) -> _CodeVerdict:
        task = self._task
        if self._language.compile:
            # The binary comes out through a pipe: no folder is shared with the sandbox.
            words = ["/bin/sh", "-c", '"$@" >&2 && exec cat program', "sh"]
            outcome = self._run([*words, *self._language.compile], limits=_COMPILE_LIMITS)
            if not outcome.ok:
                return _verdict(task, [], f"does not compile: {outcome.why()}")
            self._files = {"program": outcome.stdout}
        failures: list[str] = []
        while len(failures) < len(task.tests):
            test = task.tests[len(failures)]
            if any(failures[-1:]) and not task.partial and not task.subtasks:
                break
            lost = test.subtask in _failed_subtasks(task, failures)
            if test.subtask and lost and not test.sample:
                failures.append("not run")
            elif self._remaining_s() <= 0:
                return _verdict(task, failures, _OUT_OF_TIME)
            elif test.call:
                failures += self._run_calls(len(failures))
            else:
                failures.append(self._run_program(test))
        return _verdict(task, failures)

    def _run_program(self, test: _CodeTest) -> str:
        """Run the program on the input of a test. Returns the failure, or "" if it passed."""
        outcome = self._run(self._language.run, stdin=test.stdin.encode())
        if why := outcome.why():
            return why
        try:
            output = outcome.stdout.decode()
        except UnicodeDecodeError:
            return "its output is not UTF-8"
        same = _same_text(test.stdout or "", output, self._task.tolerance)
        return "" if same else "wrong output"

    def _run_calls(self, start: int) -> list[str]:
        """Run consecutive function-call tests in one process, starting at test `start`. Returns the
        failure ("" if it passed) for each test that ran before the process exited."""
        tests = list(takewhile(lambda test: test.call, self._task.tests[start:]))
        calls = json.dumps([[test.call, test.args, test.kwargs] for test in tests]).encode()
        outcome = self._run(self._language.calls, stdin=calls, lines=len(tests))
        failures: list[str] = []
        lines = outcome.stdout.split(b"\n")[:-1][: len(tests)]
        for test, line in zip(tests, lines, strict=False):
            if self._remaining_s() <= 0:  # parsing output takes time too
                return [*failures, _OUT_OF_TIME]
            kind, value, same = "unreadable", "something unreadable", False
            with suppress(ValueError, RecursionError):
                reply: Any = json.loads(line)
                if isinstance(reply, dict) and len(cast(dict[str, Any], reply)) == 1:
                    ((kind, value),) = cast(dict[str, Any], reply).items()
            if kind == "broken":
                return [f"does not load: {value}"[:300]] * len(tests)
            with suppress(RecursionError):
                same = kind == "returned" and _same_value(test.returns, value, self._task.tolerance)
            why = "wrong value" if kind == "returned" else f"raised {value}"[:300]
            failures.append("" if same else why)
        if len(failures) < len(tests):
            failures.append(outcome.why() or "ended before it returned")
        return failures

    def _remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def _run(self, command: Sequence[str], **options: Any) -> SandboxOutcome:
        options = {"limits": self._limits, **options}
        return self._sandbox.run(
            command, files=self._files, within_s=self._remaining_s(), **options
        )
