"""Programs against hidden tests: right ones pass, wrong and hostile ones fail."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.sections.rewards import CodeConfig
from keel.rewards.code import verifier as module
from keel.rewards.code.verifier import _CodeVerdict
from keel.rewards.sandbox.sandbox import IsolationError, Sandbox, open_sandbox
from tests.rewards.code.hostile import (
    ADD_CALL,
    ADD_STDIN,
    HOSTILE,
    HURRIED,
    SLEEPERS,
    answer,
    verify_code,
)
from tests.waiting import PATIENCE_S, within_some

SUM = "print(sum(map(int, input().split())))"
BOTH = f"""
def add(a, b):
    return a + b
if __name__ == "__main__":
    {SUM}
"""
pytestmark = pytest.mark.e2e
PATIENT = CodeConfig(completion_s=PATIENCE_S, time_s=100.0)


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> CodeConfig:
    """Settings with a sandbox, or without one in tests that are `in_both`."""
    isolation = getattr(request, "param", "bubblewrap")
    if isolation == "bubblewrap":
        request.getfixturevalue("box")
    return replace(PATIENT, isolation=isolation)


in_both = pytest.mark.parametrize(
    "settings", ["bubblewrap", "none-i-trust-the-answers"], indirect=True
)


def spec(*tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"kind": "code", "tests": list(tests), **more}


def passed(verdict: _CodeVerdict) -> list[bool]:
    return [not why for why in verdict.failures]


@in_both
def test_a_right_program_passes(settings: CodeConfig) -> None:
    verdict = verify_code(spec(ADD_STDIN, ADD_CALL, ADD_STDIN), answer(BOTH), settings)
    assert (verdict.score, passed(verdict), any(verdict.failures)) == (1.0, [True] * 3, False)


def test_credit_is_all_or_nothing_or_partial(settings: CodeConfig) -> None:
    tests = (ADD_STDIN, {"stdin": "1 1\n", "stdout": "3"}, {"stdin": "1 2", "stdout": "3\n\n"})
    verdict = verify_code(spec(*tests), answer(SUM), settings)
    assert verdict.score == 0.0
    assert list(verdict.failures) == ["", "wrong output", "not run"]
    verdict = verify_code(spec(*tests, partial=True), answer(SUM), settings)
    assert verdict.score == pytest.approx(2 / 3)
    assert passed(verdict) == [True, False, True]


def test_points_for_whole_subtasks(settings: CodeConfig) -> None:

    def case(n: int, **more: Any) -> dict[str, Any]:
        return {"stdin": f"{n} 1\n", "stdout": f"{n + 1}\n", **more}

    tests = (
        case(1, sample=True),
        case(2, subtask="small"),
        case(30, subtask="large"),
        case(31, subtask="large"),
        case(32, subtask="large", sample=True),
        case(3, subtask="small"),
    )
    task = spec(*tests, subtasks={"small": 30, "large": 70})
    verdict = verify_code(task, answer(SUM), settings)
    assert verdict.score == pytest.approx(1) and all(passed(verdict))
    points = {"samples": 1, "subtask/small": 0.3, "subtask/large": 0.7}
    assert verdict.parts == pytest.approx(points)
    small = answer("a, b = map(int, input().split())\nprint(a + b if a < 10 else 0)")
    verdict = verify_code(task, small, settings)
    assert verdict.score == pytest.approx(0.3)
    assert verdict.parts == pytest.approx({**points, "samples": 0, "subtask/large": 0})
    assert list(verdict.failures) == [*("", "", "wrong output", "not run", "wrong output", "")]


@in_both
def test_process_exit_costs_only_its_own_call(settings: CodeConfig) -> None:
    source = """
import os, time
class Solution:
    def f(self, n):
        print("noise")
        if n == 1: os._exit(0)
        if n == 2: raise KeyError(n)
        while n == 3: pass
        return {"n": (n, [n / 3]), "s": {n}}
"""
    tests = [
        {"call": "Solution.f", "args": [n], "returns": {"n": [n, [n / 3]], "s": {"~set": [n]}}}
        for n in range(5)
    ]

    def check(limit_s: float) -> None:
        task = spec(*tests, partial=True, time_limit_s=limit_s)
        verdict = verify_code(task, answer(source), settings)
        assert passed(verdict) == [True, False, False, False, True]
        assert "KeyError" in verdict.failures[2] and "time" in verdict.failures[3]

    within_some(check, (0.4, 5.0, 30.0))


@in_both
def test_output_is_limited_per_call(settings: CodeConfig) -> None:
    calls = [{"call": "f", "args": [n], "returns": "a" * n} for n in [300_000] * 5]
    verdict = verify_code(spec(*calls), answer("def f(n): return 'a' * n"), settings)
    assert verdict.score == 1.0, str(verdict.failures)
    calls = [{"call": "f", "args": [n], "returns": "a" * n} for n in (1, 1_200_000, 2)]
    verdict = verify_code(spec(*calls, partial=True), answer("def f(n): return 'a' * n"), settings)
    assert passed(verdict) == [True, False, True]
    assert "output" in str(verdict.failures)


def test_sources(settings: CodeConfig) -> None:
    read = "sys.stdin" if settings.isolation != "bubblewrap" else "open('/dev/stdin')"
    source = f"import sys\nprint({read}.read().strip(), __name__)\nexit(0)"
    verdict = verify_code(spec({"stdin": "é\n", "stdout": "é __main__"}), answer(source), settings)
    assert verdict.score == 1.0, str(verdict.failures)
    verdict = verify_code(spec({"stdout": "1"}), answer("source\nprint(1)"), settings)
    assert verdict.score == 0.0 and "NameError" in str(verdict.failures)
    for source, why in (("def add(", "SyntaxError"), ("1 / 0", "Zero"), ("def f(): 1", "KeyError")):
        verdict = verify_code(spec(ADD_CALL, ADD_CALL, partial=True), answer(source), settings)
        assert verdict.score == 0.0 and why in str(verdict.failures)


def test_calls_have_leetcodes_imports(settings: CodeConfig) -> None:
    source = """
class Solution:
    def least(self, numbers: List[int], k: Optional[int]) -> Dict[str, Any]:
        heapify(numbers)
        return {"first": numbers[0], "most": Counter(numbers).most_common(1)[0][0],
                "pow": pow(2, 5, 7), "inf": math.inf > 1, "at": bisect_left([1, 3], 2)}
"""
    expected = {"first": 1, "most": 4, "pow": 4, "inf": True, "at": 1}
    test = {"call": "Solution.least", "args": [[4, 1, 4], 2], "returns": expected}
    verdict = verify_code(spec(test), answer(source), settings)
    assert verdict.score == 1.0, str(verdict.failures)
    printing = verify_code(spec({"stdout": "[]"}), answer("print(List)"), settings)
    assert "NameError" in str(printing.failures), "programs must import"


def test_completion_time_bounds_all_tests(box: Sandbox) -> None:
    task = spec(*[ADD_STDIN] * 9, partial=True)

    def check(completion_s: float) -> None:
        settings = CodeConfig(completion_s=completion_s, time_s=1000.0)
        verdict = verify_code(task, answer("import time; time.sleep(1000)"), settings)
        assert verdict.score == 0.0
        assert "limit of time" in verdict.failures[0]
        assert "completion" in verdict.failures[-1]

    within_some(check, (0.8, 5.0, 60.0))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_languages(box: Sandbox) -> None:
    source = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
    text = f"```cpp\n{source}\n```"
    assert verify_code(spec(ADD_STDIN, ADD_STDIN, language="c++"), text, PATIENT).score == 1.0
    verdict = verify_code(spec(ADD_STDIN, language="c++"), "```\nint main() {\n```", PATIENT)
    assert verdict.score == 0.0 and "compile" in str(verdict.failures)


def test_the_program_in_the_answer_counts(box: Sandbox) -> None:
    right, wrong = answer(SUM), answer("print(0)")
    for text, score in (
        (right, 1.0),
        (f"<think>{wrong}</think>{right}", 1.0),
        (f"<think>{right}</think>{wrong}", 0.0),
        (f"<think>{right}</think>Done.", 0.0),
        (f"{right}<think>", 1.0),
        (f"<think>{right}", 0.0),
        ("42", 0.0),
        (answer("#" * 300_000), 0.0),
        (answer(f"{SUM} # \ud800"), 1.0),
    ):
        assert verify_code(spec(ADD_STDIN), text, PATIENT).score == score, text


def test_untrusted_programs_are_refused_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(isolation: str) -> None:
        raise IsolationError(f"{isolation} is missing")

    monkeypatch.setattr(module, "open_sandbox", refuse)
    for text in (answer(SUM), "no program at all"):
        with pytest.raises(IsolationError, match="missing"):
            verify_code(spec(ADD_STDIN), text)


def test_expected_outputs_never_enter_the_sandbox(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, calls = open_sandbox("bubblewrap"), []
    run = sandbox.run

    def record(command: Any, **options: Any) -> Any:
        calls.append(repr((command, options)))
        return run(command, **options)

    monkeypatch.setattr(sandbox, "run", record)
    secret = "5201314159"
    tests = ({"stdin": "1", "stdout": secret}, {"call": "f", "args": [1], "returns": int(secret)})
    verify_code(spec(*tests, partial=True, reference=f"print({secret})"), answer(SUM))
    assert len(calls) == 2 and not any(secret in call for call in calls)


@pytest.mark.parametrize("name", sorted(SLEEPERS))
def test_hostile_programs_score_zero(name: str, box: Sandbox) -> None:
    verdict = verify_code(spec(ADD_STDIN, ADD_CALL, partial=True), answer(HOSTILE[name]), HURRIED)
    assert verdict.score == 0.0
    assert all(verdict.failures)


def test_hostile_programs_leave_nothing_behind(box: Sandbox) -> None:
    # A separate process has none of the resources that other tests hold.
    done = subprocess.run(
        [sys.executable, "-m", "tests.rewards.code.hostile", "--rounds=1"],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        timeout=5 * PATIENCE_S,
        check=True,
    )
    report = json.loads(done.stdout)
    before, after = report["before"], report["after"]
    assert report["programs"] > 60 and report["rewarded"] == []
    assert after.pop("resident") < before.pop("resident") + (6 << 20)
    assert after == before
    assert (after["processes"], after["threads"], after["folders"]) == (0, 1, [])
