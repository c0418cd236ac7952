"""Programs against hidden tests.

What is right never enters the sandbox: a program gets an input, and its output is compared here.
So it cannot read the wanted output, and there is no verdict in there that it could forge, patch or
print. A call's result comes out as data; a forged one is only another wrong value.

Spec (`Prompt.reward`):

    {"kind": "code", "language": "python", "partial": false, "reference": "…",
     "time_limit_s": 2.0, "memory_mib": 512, "tolerance": 1e-6,
     "tests": [{"stdin": "1 2\\n", "stdout": "3\\n"},
               {"call": "add", "args": [1, 2], "kwargs": {}, "returns": 3},
               {"call": "Solution.add", "args": [1, 2], "returns": 3}]}

Only `kind` and `tests` are required. `call` is for Python; all calls share one process as long as
it lives. A test may have `"sample": true`, where the task shows it, and `"subtask": NAME`, where
`"subtasks": {NAME: points, …}` says what it is worth to pass all tests of each.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from keel.rewards.code.compare import least_output, same_text, same_value
from keel.rewards.code.spec import Case, Task, code_block, read_task
from keel.rewards.sandbox.sandbox import Sandbox, open_sandbox
from keel.rewards.sandbox.watch import Limits, Outcome
from keel.rewards.text import outside_think

SAMPLES, SUBTASK = "samples", "subtask/"
"""Of parts: all tests that the task shows; and before the name of a subtask."""
MAX_CHARACTERS = 1 << 18
"""Longer programs are wrong."""
_TIME_OVER = "the completion's time was over"
COMPILE = Limits(time_s=20.0, memory_mib=2048, processes=16, files_mib=256, output_kib=64 << 10)
"""Compilers are ours, but what they are given is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSettings:
    """The recipe's `rewards.code`."""

    isolation: str = "bubblewrap"
    completion_s: float = 10.0
    """Longest look at one completion, all its tests together; those that do not fit count as
    failed."""
    limits: Limits = field(default_factory=Limits)
    """Of a run, where the prompt does not say otherwise."""

    @staticmethod
    def from_knobs(knobs: Mapping[str, Any]) -> CodeSettings:
        """From the fields of `keel.configs.schema.CodeConfig`."""
        rest = dict(knobs)
        own = {name: rest.pop(name) for name in ("isolation", "completion_s") if name in rest}
        return CodeSettings(**own, limits=Limits(**rest))


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Of one test, in the spec's order."""

    passed: bool
    reason: str = ""
    """Why not. The program has a say in the words."""


@dataclass(frozen=True, slots=True)
class CodeVerdict:
    """How correct a program is, 0 … 1."""

    score: float
    per_test: tuple[CaseResult, ...]
    reason: str = ""
    """The first failure; "" if there is none."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """`samples`, 1 where all tests that the task shows are passed, and `subtask/NAME`, the share of
    the score that it got for each; none of them where the spec marks no tests so."""


def verify_code(
    spec: Mapping[str, Any], answer_text: str, settings: CodeSettings | None = None
) -> CodeVerdict:
    """Verify the last code block of a final text. Thinking is left out, if it is still there.

    Raises ValueError for a spec that cannot be read, and IsolationError (a ValueError) where this
    machine cannot hold an untrusted program; RuntimeError if the sandbox itself fails.
    """
    settings = settings or CodeSettings()
    task = read_task(spec)
    sandbox = open_sandbox(settings.isolation)
    code = code_block(outside_think(answer_text))
    if code is None:
        return _nothing(task, "no closed code block at the end of the answer")
    if len(code) > MAX_CHARACTERS:
        return _nothing(task, f"the program is longer than {MAX_CHARACTERS} characters")
    return _Attempt(task, code, sandbox, settings).verdict()


def check_outputs(spec: Mapping[str, Any], settings: CodeSettings, *, name: str) -> None:
    """Raise ValueError if a test wants more output than a program may make."""
    most = settings.limits.output_kib
    task = read_task(spec)
    for index, test in enumerate(task.tests):
        wanted = least_output(test.stdout, task.tolerance) / 1024
        if wanted > most:
            raise ValueError(
                f"{name}: tests[{index}] wants {wanted:.0f} KiB of output, and a program is ended "
                f"after {most} (rewards.code.output_kib): raise that, or shorten the test"
            )


def check_reference(spec: Mapping[str, Any], settings: CodeSettings, *, name: str) -> None:
    """Raise ValueError if the spec cannot be read or its own `reference` fails its tests.

    name: what the message calls the prompt. A spec without a reference is only read.
    """
    try:
        task = read_task(spec)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if task.reference is None:
        return
    sandbox = open_sandbox(settings.isolation)
    # To the end, so that the message can name a test even if credit is partial.
    verdict = _Attempt(task, task.reference, sandbox, settings).verdict()
    for index, result in enumerate(verdict.per_test):
        if not result.passed:
            raise ValueError(
                f"{name}: its reference solution fails tests[{index}]: {result.reason}; correct "
                "the test or the solution"
            )


def _nothing(task: Task, reason: str) -> CodeVerdict:
    results = (CaseResult(False, reason),) * len(task.tests)
    return CodeVerdict(0.0, results, reason, _parts(task, results))


def _failed(task: Task, results: Sequence[CaseResult]) -> set[str]:
    """Subtasks of which a test has failed."""
    return {
        test.subtask for test, result in zip(task.tests, results, strict=False) if not result.passed
    }


def _score(task: Task, results: Sequence[CaseResult]) -> float:
    passes = [result.passed for result in results]
    if task.subtasks:
        failed = _failed(task, results)
        return math.fsum(worth for name, worth in task.subtasks.items() if name not in failed)
    return sum(passes) / len(passes) if task.partial else float(all(passes))


def _parts(task: Task, results: Sequence[CaseResult]) -> dict[str, float]:
    """`CodeVerdict.parts`; results: one for each test."""
    failed = _failed(task, results)
    parts = {f"{SUBTASK}{k}": v * (k not in failed) for k, v in task.subtasks.items()}
    shown = [r.passed for test, r in zip(task.tests, results, strict=True) if test.sample]
    return {SAMPLES: float(all(shown)), **parts} if shown else parts


class _Attempt:
    """One program's way through its tests."""

    def __init__(self, task: Task, code: str, sandbox: Sandbox, settings: CodeSettings) -> None:
        self._task = task
        self._sandbox = sandbox
        self._limits = task.within(settings.limits)
        self._ends = time.monotonic() + settings.completion_s
        # What is no text for UTF-8 (half a surrogate pair) is no program either.
        source = code.encode(errors="backslashreplace")
        self._files: Mapping[str, bytes] = {task.language.source: source, **task.language.extra}

    def verdict(self) -> CodeVerdict:
        task = self._task
        if task.language.compile:
            failed = self._compile()
            if failed:
                return _nothing(task, failed)
        results: list[CaseResult] = []
        while len(results) < len(task.tests):
            test = task.tests[len(results)]
            if results and not results[-1].passed and not task.partial and not task.subtasks:
                results += self._skipped(results, "not run")
            elif test.subtask and not test.sample and test.subtask in _failed(task, results):
                results.append(CaseResult(False, "not run"))
            elif self._left() <= 0:
                results += self._skipped(results, _TIME_OVER)
            elif test.call:
                results += self._called(len(results))
            else:
                results.append(self._run(test))
        first = next((r.reason for r in results if not r.passed), "")
        return CodeVerdict(_score(task, results), tuple(results), first, _parts(task, results))

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _skipped(self, results: Sequence[CaseResult], why: str) -> list[CaseResult]:
        return [CaseResult(False, why)] * (len(self._task.tests) - len(results))

    def _compile(self) -> str:
        """Why there is no program; "" if there is one now."""
        # Out through a pipe: no folder of this machine is ever shared with the sandbox.
        words = ["/bin/sh", "-c", '"$@" >&2 && exec cat program', "sh"]
        made = self._sandbox.run(
            [*words, *self._task.language.compile],
            files=self._files,
            limits=COMPILE,
            within_s=self._left(),
        )
        if not made.ok:
            return f"does not compile: {made.why()}"
        self._files = {"program": made.stdout}
        return ""

    def _run(self, test: Case) -> CaseResult:
        ran = self._start(self._task.language.run, test.stdin)
        if not ran.ok:
            return CaseResult(False, ran.why())
        try:
            said = ran.stdout.decode()
        except UnicodeDecodeError:
            return CaseResult(False, "its output is no text")
        if not same_text(test.stdout, said, self._task.tolerance):
            return CaseResult(False, "wrong output")
        return CaseResult(True)

    def _called(self, start: int) -> list[CaseResult]:
        """Of the calls from test `start` on, as far as one process gets."""
        tests: list[Case] = []
        for test in self._task.tests[start:]:
            if not test.call:
                break
            tests.append(test)
        wanted = json.dumps([[test.call, test.args, test.kwargs] for test in tests]).encode()
        ran = self._start(self._task.language.calls, wanted, lines=len(tests))
        results: list[CaseResult] = []
        lines = ran.stdout.split(b"\n")[:-1][: len(tests)]
        for test, line in zip(tests, lines, strict=False):
            if self._left() <= 0:  # reading what was said takes time, too
                return [*results, CaseResult(False, _TIME_OVER)]
            kind, value = _reply(line)
            if kind == "broken":
                return [CaseResult(False, f"does not load: {value}"[:300])] * len(tests)
            if kind != "returned":
                results.append(CaseResult(False, f"raised {value}"[:300]))
            elif self._returned(test, value):
                results.append(CaseResult(True))
            else:
                results.append(CaseResult(False, "wrong value"))
        if len(results) < len(tests):
            results.append(CaseResult(False, ran.why() or "ended before it returned"))
        return results

    def _returned(self, test: Case, value: Any) -> bool:
        try:
            return same_value(test.returns, value, self._task.tolerance)
        except RecursionError:
            return False

    def _start(self, command: Sequence[str], stdin: bytes, lines: int = 0) -> Outcome:
        return self._sandbox.run(
            command,
            files=self._files,
            stdin=stdin,
            limits=self._limits,
            lines=lines,
            bounded=self._task.language.bounded,
            within_s=self._left(),
        )


def _reply(line: bytes) -> tuple[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return "unreadable", "something unreadable"
    if isinstance(reply, dict) and len(cast(dict[str, Any], reply)) == 1:
        ((kind, value),) = cast(dict[str, Any], reply).items()
        return kind, value
    return "unreadable", "something unreadable"
