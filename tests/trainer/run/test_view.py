"""The terminal view: plain lines without a terminal, a panel with one, time left in words."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from keel.trainer.run.view import (
    LiveView,
    Now,
    PlainView,
    Progress,
    duration,
    open_view,
    sparkline,
)

NUMBERS = {
    "reward/mean": 0.25,
    "mismatch/logp_abs": 3e-6,
    "sampling/kept_mean": 7.5,
    "time/rollout": 3.0,
    "time/train": 1.0,
    "eval/sums/pass@1": 0.5,
    "eval/sums/score": 0.8,
    "eval/sums/unscored": 0.0,
}


def test_without_a_terminal_each_step_is_a_line() -> None:
    stream = io.StringIO()
    view = open_view("t", 10, stream)
    assert isinstance(view, PlainView)
    view.record(3, NUMBERS)
    line = stream.getvalue()
    assert line.count("\n") == 1
    for part in (
        "step 3/10",
        "reward 0.250",
        "eval/sums/pass@1 0.500",
        "mismatch 3e-06",
    ):
        assert part in line
    assert "score" not in line
    view.record(4, {**NUMBERS, "eval/sums/unscored": 2.0})
    assert "eval/sums/unscored 2.000" in stream.getvalue()


def test_the_panel_shows_progress_health_and_the_time_split() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=110)
    with LiveView("quickstart", 10, console) as view:
        view.begin("training")
        view.begin("evaluating")
        view.reach(12, 256, "prompts")
        view.begin("training")
        view.record(3, NUMBERS)
        view.say("saved")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "quickstart",
        "step 3/10",
        "training",
        "mismatch",
        "7.5 ids",
        "sampling 75%",
        "saved",
    ):
        assert part in shown


def test_what_goes_on_is_counted_and_measured_by_the_last_time() -> None:
    now = Now()
    now.begin("evaluating")
    now.reach(12, 256, "prompts")
    assert now.wait.words() == "evaluating · 12 of 256 prompts · 0 s"
    now.wait._began -= 90.0
    now.begin("training")
    assert now.wait.words() == "training · 0 s"
    now.begin("evaluating")
    assert now.wait.words() == "evaluating · 0 s, about 2 min left"


def test_time_left_counts_only_steps_seen_by_this_process() -> None:
    now = [0.0]
    progress = Progress(100, lambda: now[0])
    assert progress.left(50) is None
    now[0] = 10.0
    assert progress.left(55) == pytest.approx(10 / 5 * 45)


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (720, "12 min"), (11100, "3 h 05 min"), (0.4, "0 s")]
)
def test_durations_read_as_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_sparkline_has_its_lowest_and_highest_bar() -> None:
    drawn = sparkline([0.0, 0.5, 1.0])
    assert drawn.startswith("▁")
    assert drawn[2] == "█"
    assert len(sparkline([1.0] * 1000).split(" ")[0]) <= 40


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ({"reward/error": 0.25}, "reward errors 25.0%"),
        ({"rollout/uniform_group_fraction": 1.0}, "no group differs"),
    ],
)
def test_rewards_that_fail_or_do_not_differ_stand_on_the_step(
    numbers: dict[str, float], shown: str
) -> None:
    stream = io.StringIO()
    PlainView(10, stream).record(3, {**NUMBERS, **numbers})
    assert f"step 3/10  {shown}" in stream.getvalue()
    console = Console(file=io.StringIO(), force_terminal=True, width=130)
    with LiveView("quickstart", 10, console) as view:
        view.record(3, {**NUMBERS, **numbers})
    assert shown in console.file.getvalue()  # type: ignore[attr-defined]


def test_healthy_rewards_are_not_mentioned() -> None:
    stream = io.StringIO()
    healthy = {"reward/error": 0.0, "rollout/uniform_group_fraction": 0.75}
    PlainView(10, stream).record(3, {**NUMBERS, **healthy})
    assert "error" not in stream.getvalue()
    assert "differs" not in stream.getvalue()


def test_it_writes_to_what_is_standard_output_by_now(capsys: pytest.CaptureFixture[str]) -> None:
    """A test's own, say, which is closed after it."""
    for view in (PlainView(1), open_view("t", 1)):
        view.say("step")
        assert capsys.readouterr().out == "step\n"
