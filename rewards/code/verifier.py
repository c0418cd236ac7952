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
from typing import Any, NamedTuple, cast

from keel.rewards.code.compare import min_output, same_text, same_value
from keel.rewards.code.spec import CodeTask, CodeTest, code_block, read_task
from keel.rewards.sandbox.sandbox import Limits, Sandbox, SandboxOutcome, open_sandbox
from keel.rewards.text import outside_think

_SAMPLES, _SUBTASK = "samples", "subtask/"
"""Names of reward components: the one for all example tests, and the prefix of those for
subtasks."""
_MAX_CHARACTERS = 1 << 18
"""Maximum length of a program in characters. Longer programs count as wrong."""
_OUT_OF_TIME = "the completion ran out of time"
_COMPILE_LIMITS = Limits(
    time_s=20.0, memory_mib=2048, processes=16, files_mib=256, output_kib=64 << 10
)
"""Resource limits for compilers. Compilers are trusted, but the source code is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSettings:
    """The settings under `rewards.code` in the recipe."""

    isolation: str = "bubblewrap"
    completion_s: float = 10.0
    """Time limit for all tests of a completion. Tests that do not finish in time count as
    failed."""
    limits: Limits = field(default_factory=Limits)
    """Resource limits for one run of a program. A prompt may set its own."""

    @staticmethod
    def from_knobs(knobs: Mapping[str, Any]) -> CodeSettings:
        """Create the settings from the fields of `keel.configs.schema.CodeConfig`."""
        limits = dict(knobs)
        names = ("isolation", "completion_s")
        settings = {name: limits.pop(name) for name in names if name in limits}
        return CodeSettings(**settings, limits=Limits(**limits))


class CodeVerdict(NamedTuple):
    """The score of a program, from 0 to 1."""

    score: float
    failures: tuple[str, ...]
    """The reason each test failed, or "" if it passed, in the order of the spec. A reason may quote
    the program's output."""
    parts: Mapping[str, float]
    """Additional reward components. `samples` is 1 if the program passed all tests that the task
    shows. `subtask/NAME` is the share of the score that the program earned for a subtask."""


def verify_code(
    spec: Mapping[str, Any], answer_text: str, settings: CodeSettings | None = None
) -> CodeVerdict:
    """Run the last code block of an answer on the hidden tests. Code in the thinking is ignored.
    Raises ValueError if the spec is malformed or this machine cannot isolate programs, and
    RuntimeError if the sandbox itself fails."""
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
    """Raise ValueError if the `reference` solution of a valid spec fails a test."""
    task, sandbox = read_task(spec), open_sandbox(settings.isolation)
    verdict = _Attempt(task, task.reference or "", sandbox, settings).verdict()
    for index, failure in enumerate(verdict.failures):
        if failure:
            raise ValueError(
                f"{name}: its reference solution fails tests[{index}]: {failure}. Correct the test "
                "or the solution"
            )


def _failed_subtasks(task: CodeTask, failures: Sequence[str]) -> set[str]:
    return {test.subtask for test, why in zip(task.tests, failures, strict=False) if why}


def _verdict(task: CodeTask, failures: list[str], skipped: str = "not run") -> CodeVerdict:
    """Compute the verdict. Tests without a result count as failures with the reason `skipped`."""
    failures += [skipped] * (len(task.tests) - len(failures))
    failed = _failed_subtasks(task, failures)
    if task.subtasks:
        score = math.fsum(worth for name, worth in task.subtasks.items() if name not in failed)
    else:
        score = failures.count("") / len(failures) if task.partial else float(not any(failures))
    parts: dict[str, float] = {}
    if shown := [why for test, why in zip(task.tests, failures, strict=True) if test.sample]:
        parts[_SAMPLES] = float(not any(shown))
    parts |= {f"{_SUBTASK}{k}": v * (k not in failed) for k, v in task.subtasks.items()}
    return CodeVerdict(score, tuple(failures), parts)


class _Attempt:
    def __init__(self, task: CodeTask, code: str, sandbox: Sandbox, settings: CodeSettings) -> None:
        self._task, self._sandbox = task, sandbox
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
            outcome = self._run([*words, *task.language.compile], limits=_COMPILE_LIMITS)
            if not outcome.ok:
                return _verdict(task, [], f"does not compile: {outcome.why()}")
            self._files = {"program": outcome.stdout}
        failures: list[str] = []
        while len(failures) < len(task.tests):
            test = task.tests[len(failures)]
            if any(failures[-1:]) and not task.partial and not task.subtasks:
                break
            if (
                test.subtask
                and not test.sample
                and test.subtask in _failed_subtasks(task, failures)
            ):
                failures.append("not run")
            elif self._remaining() <= 0:
                return _verdict(task, failures, _OUT_OF_TIME)
            elif test.call:
                failures += self._call(len(failures))
            else:
                outcome = self._run(task.language.run, stdin=test.stdin)
                failures.append(outcome.why() or self._wrong_output(test, outcome.stdout))
        return _verdict(task, failures)

    def _wrong_output(self, test: CodeTest, stdout: bytes) -> str:
        try:
            same = same_text(test.stdout, stdout.decode(), self._task.tolerance)
        except UnicodeDecodeError:
            return "its output is not UTF-8"
        return "" if same else "wrong output"

    def _call(self, start: int) -> list[str]:
        """Run consecutive tests that call functions, beginning with test `start`, in one process.
        Returns the failures up to the end of the process."""
        tests = list(takewhile(lambda test: test.call, self._task.tests[start:]))
        calls = json.dumps([[test.call, test.args, test.kwargs] for test in tests]).encode()
        outcome = self._run(self._task.language.calls, stdin=calls, lines=len(tests))
        failures: list[str] = []
        lines = outcome.stdout.split(b"\n")[:-1][: len(tests)]
        for test, line in zip(tests, lines, strict=False):
            if self._remaining() <= 0:  # parsing output takes time too
                return [*failures, _OUT_OF_TIME]
            kind, value, same = "unreadable", "something unreadable", False
            with suppress(ValueError, RecursionError):
                reply: Any = json.loads(line)
                if isinstance(reply, dict) and len(cast(dict[str, Any], reply)) == 1:
                    ((kind, value),) = cast(dict[str, Any], reply).items()
            if kind == "broken":
                return [f"does not load: {value}"[:300]] * len(tests)
            with suppress(RecursionError):
                same = kind == "returned" and same_value(test.returns, value, self._task.tolerance)
            why = "wrong value" if kind == "returned" else f"raised {value}"[:300]
            failures.append("" if same else why)
        if len(failures) < len(tests):
            failures.append(outcome.why() or "ended before it returned")
        return failures

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def _run(self, command: Sequence[str], **options: Any) -> SandboxOutcome:
        options = {"limits": self._limits, **options}
        return self._sandbox.run(command, files=self._files, within_s=self._remaining(), **options)
