"""Progress lines and the live panel."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from keel.trainer.run.progress import Display, Wait, duration
from keel.trainer.run.view import LiveView, PlainView, open_view
from tests.waiting import wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("at", "done", "text"),
    [
        (4.0, 0, "evaluating · 0 of 200 prompts · 4 s"),
        (10.0, 50, "evaluating · 50 of 200 prompts · 10 s, about 30 s left"),
        (1.0, 50, "evaluating · 50 of 200 prompts · 1 s"),  # too early
        (400.0, 200, "evaluating · 200 of 200 prompts · 7 min"),
    ],
)
def test_wait_estimates_remaining_time(at: float, done: int, text: str) -> None:
    clock = Clock()
    wait = Wait("evaluating", total=200, unit="prompts", clock=clock)
    clock.now, wait.done = at, done
    assert wait.text() == text
    assert duration(11100) == "3 h 05 min"


def test_plain_lines_come_at_start_and_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    display, clock, lines = Display(poll_s=0.001), Clock(), list[str]()

    def printed(number: int) -> bool:
        lines.extend(capsys.readouterr().out.splitlines())
        return len(lines) >= number

    wait = Wait("starting Ray", clock=clock)
    display.begin(wait)
    for number, now in enumerate((2.0, 33.0, 63.0), start=1):
        clock.now = now
        wait_for(lambda number=number: printed(number))
    display.end(wait)
    assert printed(4) and len(lines) == 4
    assert "33 s" in lines[1] and "63 s" in lines[3]


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
    "reward/error": 0.25,
    "mismatch/logp_abs": 3e-6,
    "sampling/kept_mean": 7.5,
    "time/rollout": 3.0,
    "time/train": 1.0,
    "eval/sums/pass@1": 0.5,
    "eval/sums/score": 0.8,
    "eval/sums/unscored": 0.0,
}


def test_plain_view_prints_a_line_per_step() -> None:
    stream = io.StringIO()
    view = open_view("t", 10, stream)
    assert isinstance(view, PlainView)
    view.record(3, NUMBERS)
    line = stream.getvalue()
    assert line.count("\n") == 1 and "score" not in line
    for part in ("step 3/10", "reward 0.250", "eval/sums/pass@1 0.500", "mismatch 3e-06"):
        assert part in line
    assert "reward errors 25.0%" in line


def test_panel_shows_progress_health_and_times() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=130)
    with LiveView("quickstart", 10, console) as view:
        view.begin("evaluating")
        view.reach(12, 256, "prompts")
        view.begin("training")
        view.record(3, NUMBERS)
        view.say("saved")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("quickstart", "step 3/10", "training", "mismatch", "7.5 ids", "saved"):
        assert part in text
    assert "sampling 75%" in text and "▁" in text and "reward errors 25.0%" in text
