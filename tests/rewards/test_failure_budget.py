"""Errors of reward functions are reported once, with their location, and stop the run."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

from keel.rewards.checks import FAILED, try_functions
from keel.rewards.failures import _MIN_WINDOW, FailureRate, RewardStopped
from tests.rewards import functions
from tests.rewards.groups import PROMPT, group, new_scorer, score
from tests.waiting import PATIENCE_S, within_some

pytestmark = pytest.mark.e2e


def weights(name: str) -> dict[str, dict[str, float]]:
    return {"maths": {"correct": 1.0, f"{functions.NAME}.{name}": 0.5}}


def place(name: str, line: int) -> str:
    _, first = inspect.getsourcelines(getattr(functions, name))
    return f"functions.py:{first + line} in {name}"


FAILING = [
    ("raises", 1, "TypeError"),
    ("none", 0, "BadReward: returned a NoneType"),
    ("later", 1, "TypeError"),
    ("leaves", 1, "exit(3)"),
]
"""Name of a function, its failing line, and a part of the message."""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_is_reported_once_with_its_line(workers: int) -> None:
    lines: list[str] = []
    domains = {name: weights(name)["maths"] for name, *_ in FAILING}
    with new_scorer(domains, workers=workers, timeout_s=PATIENCE_S, say=lines.append) as scorer:
        for name, line, message in FAILING:
            lines.clear()
            prompt = replace(PROMPT, domain=name)
            for _ in range(2):
                (scored,) = score(scorer, [group("</think>3", "</think>3", prompt=prompt)])
            (only,) = lines
            assert name in only and "file/1" in only and message in only
            assert message.startswith("BadReward") or place(name, line) in only
            assert [parts["error"] for parts in scored.parts_G] == [1.0, 1.0], name
            assert [parts["correct"] for parts in scored.parts_G] == [1.0, 1.0], name


def test_a_failing_function_stops_the_run() -> None:
    with new_scorer(weights("none"), max_failure_fraction=0.2, say=lambda _: None) as scorer:
        future = scorer.submit(group(*["</think>3"] * 8))
        with pytest.raises(RewardStopped, match=r"5 of the last 5.*BadReward"):
            future.result(PATIENCE_S)


def test_rare_failures_do_not_stop_the_run() -> None:
    entry = {"answer": "2 × 3", "metadata": {}}
    unreadable = {"kind": "reasoning_gym", "task": "prime_factorization", "entry": entry}
    prompt = replace(PROMPT, reward=unreadable)
    lines: list[str] = []
    with new_scorer(weights("some"), max_failure_fraction=0.2, say=lines.append) as scorer:
        for _ in range(30):
            scored = score(scorer, [group(*["</think>ok"] * 9, "</think>bad", prompt=prompt)])
    assert [parts["error"] for parts in scored[0].parts_G] == [1.0] * 10
    assert scored[0].notes_G[0]["correct"].startswith("error: ValueError")
    assert "prime_factorization" in lines[0] and "a bad one" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize(("share", "stops_at"), [(0.0, 1), (0.2, 5), (0.5, 11), (1.0, None)])
def test_early_failure_rate_counts_twenty(share: float, stops_at: int | None) -> None:
    rate = FailureRate(share)
    first = next((n for n in range(1, 10 * _MIN_WINDOW) if rate.add(True)), None)
    assert first == stops_at
    assert FailureRate(share).add(False) == ""


@pytest.mark.parametrize(("name", "message"), [("dies", "SIGSEGV"), ("hangs", "deadline")])
def test_a_lost_worker_reports_its_location(
    tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.rewards.pool._FIRST_CALL_S", 0.0)

    def check(limit_s: float) -> None:
        lines: list[str] = []
        log = tmp_path / "run" / f"rewards_{limit_s}"
        with new_scorer(
            weights(name), workers=1, timeout_s=limit_s, say=lines.append, log=log
        ) as one:
            score(one, [group("</think>4")])
        assert re.search(rf"{message}.*{re.escape(place(name, 1))}", "".join(lines))
        assert f"in {name}" in (log / "worker_0.log").read_text()

    within_some(check, (1.0, 10.0, 60.0) if name == "hangs" else (PATIENCE_S,))


def test_functions_are_tried_before_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("raises", "unlike", "loads", "slow")
    messages = try_functions(
        [PROMPT], {f"{functions.NAME}.{name}": 1.0 for name in names}, timeout_s=0.5
    )
    tried = {name.rpartition(".")[2]: message for name, message in messages.items()}
    assert tried["loads"].startswith("1 ")
    assert tried["unlike"].startswith("0.5 "), "two different completions"
    for name in ("raises", "slow"):
        assert tried[name].startswith(FAILED) and place(name, 1) in tried[name]
    assert "most recent call first" not in "".join(capfd.readouterr())
    with pytest.raises(ValueError, match=f"NameError.*{place('misspelt', 1)}"):
        try_functions([PROMPT], {f"{functions.NAME}.misspelt": 1.0}, timeout_s=PATIENCE_S)
