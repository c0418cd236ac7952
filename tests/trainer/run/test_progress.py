"""Progress lines, the live panel, and estimates of the remaining time."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from keel.trainer.run import progress
from keel.trainer.run.progress import Display, DurationCache, Wait, duration, waiting
from keel.trainer.run.view import Activity, LiveView, PlainView, TimeLeft, open_view
from tests.waiting import wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("at", "done", "last_s", "text"),
    [
        (4.0, 0, None, "evaluating · 0 of 200 prompts · 4 s"),
        (10.0, 50, 99.0, "evaluating · 50 of 200 prompts · 10 s, about 30 s left"),
        (1.0, 50, None, "evaluating · 50 of 200 prompts · 1 s"),  # too early
        (4.0, 0, 10.0, "evaluating · 0 of 200 prompts · 4 s, about 6 s left"),
        (14.0, 0, 10.0, "evaluating · 0 of 200 prompts · 14 s (last time 10 s)"),
        (400.0, 200, None, "evaluating · 200 of 200 prompts · 7 min"),
    ],
)
def test_wait_estimates_remaining_time(
    at: float, done: int, last_s: float | None, text: str
) -> None:
    clock = Clock()
    wait = Wait("evaluating", total=200, unit="prompts", last_s=last_s, clock=clock)
    clock.now, wait.done = at, done
    assert wait.text() == text


def test_earlier_progress_does_not_count_as_speed() -> None:
    clock = Clock()
    wait = Wait("making tasks", total=200, unit="tasks", clock=clock)
    wait.done = wait.before = 150
    clock.now = 10.0
    assert wait.remaining() is None
    wait.done = 160
    assert wait.remaining() == 40.0


def test_wait_is_measured_when_shown() -> None:
    wait = Wait("starting", total=60e9, unit="bytes", clock=Clock())

    def measure(shown: Wait) -> None:
        shown.done, shown.note = 12e9, "engines are ready"

    wait.measure = measure
    assert wait.text() == "starting · 12.0 of 60.0 GB · engines are ready · 0 s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (720, "12 min"), (11100, "3 h 05 min"), (0.4, "0 s")]
)
def test_duration_text(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_come_at_start_and_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    display, clock, lines = Display(poll_s=0.001), Clock(), list[str]()

    def printed(number: int) -> Callable[[], bool]:
        def check() -> bool:
            lines.extend(capsys.readouterr().out.splitlines())
            return len(lines) >= number

        return check

    wait = Wait("starting Ray", last_s=50.0, clock=clock)
    display.begin(wait)
    for number, now in enumerate((2.0, 33.0, 63.0), start=1):
        clock.now = now
        wait_for(printed(number))
    display.end(wait)
    assert printed(4)() and len(lines) == 4
    assert "33 s, about 17 s left" in lines[1] and "63 s" in lines[3]


def test_brief_waits_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display, clock = Display(poll_s=0.001), Clock()
    outer, inner = Wait("outer", clock=clock), Wait("inner", clock=clock)
    for wait in (outer, inner):
        display.begin(wait)
    for wait in (inner, outer):
        display.end(wait)
    clock.now = 40.0
    quiet = Wait("training", quiet=True, clock=clock)
    display.begin(quiet)
    clock.now = 69.0
    display.end(quiet)
    assert capsys.readouterr().out == ""


def test_lost_reader_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    display, clock = Display(poll_s=0.001), Clock()
    wait = Wait("a", clock=clock)
    display.begin(wait)
    clock.now = 2.0
    wait_for(lambda: wait in display._printed)
    display.end(wait)


def test_durations_survive_damage(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "waits.json"
    memory = DurationCache(lambda: path)
    memory.keep("Ray", 4.04)
    assert DurationCache(lambda: path).last("Ray") == 4.0
    for number in range(progress.REMEMBERED):
        memory.keep(f"other {number}", 1.0)
    assert memory.last("Ray") is None and memory.last("other 0") == 1.0
    path.write_text("{ not JSON")
    assert memory.last("other 0") is None
    memory.keep("Ray", 5.0)
    assert json.loads(path.read_text()) == {"Ray": 5.0}
    blocked = DurationCache(lambda: path / "below a file" / "waits.json")
    blocked.keep("Ray", 5.0)
    assert blocked.last("Ray") is None


def test_only_completed_waits_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError), waiting("a", "a"):
        raise ValueError
    with waiting("b", "b"), waiting("c"):
        pass
    assert list(json.loads((tmp_path / "keel" / "waits.json").read_text())) == ["b"]


TERMINAL = """
import sys, time
from keel.trainer.run.progress import waiting
with waiting("starting Ray", total=8, unit="steps") as wait:
    wait.done = 3
    while "3 of 8" not in open(sys.argv[1]).read():
        time.sleep(0.01)
    print("a line")
    print("another line", file=sys.stderr)
print("the end")
"""


@pytest.mark.e2e
def test_terminal_shows_one_live_line(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.touch()
    actual, expected = pty.openpty()
    streams = {"stdin": expected, "stdout": expected, "stderr": expected}
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
    command = [sys.executable, "-c", TERMINAL, str(seen)]
    with subprocess.Popen(command, env=environment, **streams):
        os.close(expected)
        text = ""
        while True:
            try:
                text += os.read(actual, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
            seen.write_text(text)
    os.close(actual)
    lines = [re.sub(r"\x1b\[[0-9;?]*\w", "", line) for line in re.split(r"\r?\n|\r", text)]
    printed = [line for line in lines if line and "starting Ray" not in line]
    assert printed == ["a line", "another line", "the end"]
    assert any("starting Ray · 3 of 8 steps · " in line for line in lines)


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


def plain(numbers: dict[str, float]) -> str:
    stream = io.StringIO()
    view = open_view("t", 10, stream)
    assert isinstance(view, PlainView)
    view.record(3, numbers)
    return stream.getvalue()


def panel(numbers: dict[str, float]) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=130)
    with LiveView("quickstart", 10, console) as view:
        view.begin("evaluating")
        view.reach(12, 256, "prompts")
        view.begin("training")
        view.record(3, numbers)
        view.say("saved")
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_view_prints_a_line_per_step() -> None:
    line = plain(NUMBERS)
    assert line.count("\n") == 1 and "score" not in line
    for part in ("step 3/10", "reward 0.250", "eval/sums/pass@1 0.500", "mismatch 3e-06"):
        assert part in line
    assert "eval/sums/unscored 2.000" in plain({**NUMBERS, "eval/sums/unscored": 2.0})


def test_panel_shows_progress_health_and_times() -> None:
    text = panel(NUMBERS)
    for part in ("quickstart", "step 3/10", "training", "mismatch", "7.5 ids", "saved"):
        assert part in text
    assert "sampling 75%" in text and "▁" in text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"reward/error": 0.25}, "reward errors 25.0%"),
        ({"rollout/uniform_group_fraction": 1.0}, "no group differs"),
    ],
)
def test_reward_problems_are_shown(numbers: dict[str, float], text: str) -> None:
    assert text in plain({**NUMBERS, **numbers}) and text in panel({**NUMBERS, **numbers})
    healthy = {"reward/error": 0.0, "rollout/uniform_group_fraction": 0.75}
    assert text not in plain({**NUMBERS, **healthy})


def test_activity_remembers_its_last_duration() -> None:
    activity = Activity()
    activity.begin("evaluating")
    activity.reach(12, 256, "prompts")
    assert activity.wait.text() == "evaluating · 12 of 256 prompts · 0 s"
    activity.wait._began -= 90.0
    activity.begin("training")
    activity.begin("evaluating")
    assert activity.wait.text() == "evaluating · 0 s, about 2 min left"


def test_time_left_counts_steps_of_this_process() -> None:
    clock = Clock()
    time_left = TimeLeft(100, clock)
    assert time_left.after(50) is None
    clock.now = 10.0
    assert time_left.after(55) == pytest.approx(10 / 5 * 45)


def test_view_writes_to_current_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    for view in (PlainView(1), open_view("t", 1)):
        view.say("step")
        assert capsys.readouterr().out == "step\n"
