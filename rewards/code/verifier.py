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
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, cast

from keel.rewards.code.compare import min_output, same_text, same_value
from keel.rewards.code.spec import CodeTask, CodeTest, code_block, read_task
from keel.rewards.sandbox.sandbox import Sandbox, open_sandbox
from keel.rewards.sandbox.watch import Limits, SandboxOutcome
from keel.rewards.text import outside_think

_SAMPLES, _SUBTASK = "samples", "subtask/"
"""Names of reward components: one for all example tests, and the prefix for subtasks."""
_MAX_CHARACTERS = 1 << 18
"""The maximum length of a program in characters. Longer programs count as wrong."""
_OUT_OF_TIME = "the completion ran out of time"
_COMPILE_LIMITS = Limits(
    time_s=20.0, memory_mib=2048, processes=16, files_mib=256, output_kib=64 << 10
)
"""Limits for compilers. The compilers are trusted, but the source code is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSettings:
    """The settings in the recipe's `rewards.code`."""

    isolation: str = "bubblewrap"
    completion_s: float = 10.0
    """Time limit for all tests of one completion. Tests that do not finish in time fail."""
    limits: Limits = field(default_factory=Limits)
    """Limits for one run of a program. A prompt may set its own limits."""

    @staticmethod
    def from_knobs(knobs: Mapping[str, Any]) -> CodeSettings:
        """Create the settings from the fields of `keel.configs.schema.CodeConfig`."""
        limits = dict(knobs)
        names = ("isolation", "completion_s")
        settings = {name: limits.pop(name) for name in names if name in limits}
        return CodeSettings(**settings, limits=Limits(**limits))


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one test."""

    passed: bool
    reason: str = ""
    """Why the test failed. It may quote the program's output."""


@dataclass(frozen=True, slots=True)
class CodeVerdict:
    """The score of a program, from 0 to 1, and the result of each test in the order of the spec."""

    score: float
    per_test: tuple[CaseResult, ...]
    reason: str = ""
    """Why the first failed test failed, or "" if all tests passed."""
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Additional reward components. `samples` is 1 if the program passed every test that the task
    shows. `subtask/NAME` is the share of the score that the program earned for a subtask. The
    mapping is empty if the spec has neither."""


def verify_code(
    spec: Mapping[str, Any], answer_text: str, settings: CodeSettings | None = None
) -> CodeVerdict:
    """Run the last code block of an answer, outside its thinking, on the hidden tests. Raises
    ValueError if the spec is malformed or this machine cannot isolate programs, and RuntimeError if
    the sandbox itself fails."""
    settings = settings or CodeSettings()
    task = read_task(spec)
    sandbox = open_sandbox(settings.isolation)
    code = code_block(outside_think(answer_text))
    if code is None:
        return _verdict(task, [], "no closed code block at the end of the answer")
    if len(code) > _MAX_CHARACTERS:
        return _verdict(task, [], f"the program is longer than {_MAX_CHARACTERS} characters")
    return _Attempt(task, code, sandbox, settings).verdict()


def check_outputs(spec: Mapping[str, Any], settings: CodeSettings, *, name: str) -> None:
    """Raise ValueError if an expected output exceeds the output limit for programs."""
    limit = settings.limits.output_kib
    task = read_task(spec)
    for index, test in enumerate(task.tests):
        needed = min_output(test.stdout, task.tolerance) / 1024
        if needed > limit:
            raise ValueError(
                f"{name}: tests[{index}] expects {needed:.0f} KiB of output, above the limit of "
                f"{limit} (rewards.code.output_kib); raise it or shorten the test"
            )


def check_reference(spec: Mapping[str, Any], settings: CodeSettings, *, name: str) -> None:
    """Run the `reference` solution of a spec, if it has one, on the tests. Raises ValueError if the
    spec is malformed or the solution fails a test."""
    try:
        task = read_task(spec)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if task.reference is None:
        return
    sandbox = open_sandbox(settings.isolation)
    verdict = _Attempt(task, task.reference, sandbox, settings).verdict()
    for index, result in enumerate(verdict.per_test):
        if not result.passed:
            raise ValueError(
                f"{name}: its reference solution fails tests[{index}]: {result.reason}. Correct "
                "the test or the solution"
            )


def _failed(task: CodeTask, results: Sequence[CaseResult]) -> set[str]:
    """Return the names of the subtasks with at least one failed test."""
    pairs = zip(task.tests, results, strict=False)
    return {test.subtask for test, result in pairs if not result.passed}


def _verdict(task: CodeTask, results: list[CaseResult], skipped: str = "not run") -> CodeVerdict:
    """Compute the verdict. Tests without a result failed for the reason `skipped`."""
    results += [CaseResult(False, skipped)] * (len(task.tests) - len(results))
    passes, failed = [result.passed for result in results], _failed(task, results)
    parts = {f"{_SUBTASK}{k}": v * (k not in failed) for k, v in task.subtasks.items()}
    if task.subtasks:
        score = math.fsum(worth for name, worth in task.subtasks.items() if name not in failed)
    else:
        score = sum(passes) / len(passes) if task.partial else float(all(passes))
    shown = [result.passed for test, result in zip(task.tests, results, strict=True) if test.sample]
    if shown:
        parts = {_SAMPLES: float(all(shown)), **parts}
    reason = next((result.reason for result in results if not result.passed), "")
    return CodeVerdict(score, tuple(results), reason, parts)


class _Attempt:
    """Compiles a program and runs it on its tests."""

    def __init__(self, task: CodeTask, code: str, sandbox: Sandbox, settings: CodeSettings) -> None:
        self._task = task
        self._sandbox = sandbox
        self._limits = task.within(settings.limits)
        self._deadline = time.monotonic() + settings.completion_s
        # A lone surrogate cannot be encoded; escaped, it is a syntax error.
        source = code.encode(errors="backslashreplace")
        self._files: Mapping[str, bytes] = {task.language.source: source, **task.language.extra}

    def verdict(self) -> CodeVerdict:
        task = self._task
        if task.language.compile:
            # The binary comes out through a pipe: no folder is shared with the sandbox.
            words = ["/bin/sh", "-c", '"$@" >&2 && exec cat program', "sh"]
            outcome = self._sandbox.run(
                [*words, *task.language.compile],
                files=self._files,
                limits=_COMPILE_LIMITS,
                within_s=self._remaining(),
            )
            if not outcome.ok:
                return _verdict(task, [], f"does not compile: {outcome.why()}")
            self._files = {"program": outcome.stdout}
        results: list[CaseResult] = []
        while len(results) < len(task.tests):
            test = task.tests[len(results)]
            if results and not results[-1].passed and not task.partial and not task.subtasks:
                break
            if test.subtask and not test.sample and test.subtask in _failed(task, results):
                results.append(CaseResult(False, "not run"))
            elif self._remaining() <= 0:
                return _verdict(task, results, _OUT_OF_TIME)
            elif test.call:
                results += self._call(len(results))
            else:
                results.append(self._run(test))
        return _verdict(task, results)

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _run(self, test: CodeTest) -> CaseResult:
        outcome = self._start(self._task.language.run, test.stdin)
        if not outcome.ok:
            return CaseResult(False, outcome.why())
        try:
            output = outcome.stdout.decode()
        except UnicodeDecodeError:
            return CaseResult(False, "its output is not UTF-8")
        if not same_text(test.stdout, output, self._task.tolerance):
            return CaseResult(False, "wrong output")
        return CaseResult(True)

    def _call(self, start: int) -> list[CaseResult]:
        tests = list(takewhile(lambda test: test.call, self._task.tests[start:]))
        calls = json.dumps([[test.call, test.args, test.kwargs] for test in tests]).encode()
        outcome = self._start(self._task.language.calls, calls, lines=len(tests))
        results: list[CaseResult] = []
        lines = outcome.stdout.split(b"\n")[:-1][: len(tests)]
        for test, line in zip(tests, lines, strict=False):
            if self._remaining() <= 0:  # parsing output takes time too
                return [*results, CaseResult(False, _OUT_OF_TIME)]
            kind, value = "unreadable", "something unreadable"
            with suppress(ValueError, RecursionError):
                reply: Any = json.loads(line)
                if isinstance(reply, dict) and len(cast(dict[str, Any], reply)) == 1:
                    ((kind, value),) = cast(dict[str, Any], reply).items()
            if kind == "broken":
                return [CaseResult(False, f"does not load: {value}"[:300])] * len(tests)
            if kind != "returned":
                results.append(CaseResult(False, f"raised {value}"[:300]))
            elif self._returned(test, value):
                results.append(CaseResult(True))
            else:
                results.append(CaseResult(False, "wrong value"))
        if len(results) < len(tests):
            results.append(CaseResult(False, outcome.why() or "ended before it returned"))
        return results

    def _returned(self, test: CodeTest, value: Any) -> bool:
        try:
            return same_value(test.returns, value, self._task.tolerance)
        except RecursionError:
            return False

    def _start(self, command: Sequence[str], stdin: bytes, lines: int = 0) -> SandboxOutcome:
        return self._sandbox.run(
            command,
            files=self._files,
            stdin=stdin,
            limits=self._limits,
            lines=lines,
            within_s=self._remaining(),
        )
