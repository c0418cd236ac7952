"""What is shown of long waits: how long still, in place on a terminal, in lines elsewhere."""

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

from keel.trainer.run import progress as waits
from keel.trainer.run.progress import Display, Memory, Wait, waiting
from tests.waiting import wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("at", "done", "last_s", "words"),
    [
        (4.0, 0, None, "evaluating · 0 of 200 prompts · 4 s"),
        (10.0, 50, 99.0, "evaluating · 50 of 200 prompts · 10 s, about 30 s left"),
        (1.0, 50, None, "evaluating · 50 of 200 prompts · 1 s"),  # too soon to tell
        (4.0, 0, 10.0, "evaluating · 0 of 200 prompts · 4 s, about 6 s left"),
        (14.0, 0, 10.0, "evaluating · 0 of 200 prompts · 14 s (last time 10 s)"),
        (400.0, 200, None, "evaluating · 200 of 200 prompts · 7 min"),
    ],
)
def test_how_long_still(at: float, done: int, last_s: float | None, words: str) -> None:
    clock = Clock()
    wait = Wait("evaluating", total=200, unit="prompts", last_s=last_s, clock=clock)
    clock.now, wait.done = at, done
    assert wait.words() == words


def test_what_was_done_before_says_nothing_of_how_long_still() -> None:
    clock = Clock()
    wait = Wait("making tasks", total=200, unit="tasks", clock=clock)
    wait.done = wait.before = 150
    clock.now = 10.0
    assert wait.left() is None
    wait.done = 160
    assert wait.left() == 40.0


def test_what_is_measured_when_it_is_shown() -> None:
    wait = Wait("starting", total=60e9, unit="bytes", clock=Clock())

    def measure(of: Wait) -> None:
        of.done, of.note = 12e9, "engines are ready"

    wait.measure = measure
    assert wait.words() == "starting · 12.0 of 60.0 GB · engines are ready · 0 s"


def test_without_a_terminal_there_is_a_line_at_the_start_at_times_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display, clock, said = Display(draw_s=0.001), Clock(), list[str]()

    def lines(number: int) -> Callable[[], bool]:
        def there() -> bool:
            said.extend(capsys.readouterr().out.splitlines())
            return len(said) >= number

        return there

    wait = Wait("starting Ray", last_s=50.0, clock=clock)
    display.begin(wait)
    clock.now = 2.0
    wait_for(lines(1))
    clock.now = 33.0
    wait_for(lines(2))
    clock.now = 63.0
    wait_for(lines(3))
    display.end(wait)
    assert lines(4)()
    assert said == [
        "starting Ray (last time 50 s) …",
        "starting Ray · 33 s, about 17 s left",
        "starting Ray · 63 s (last time 50 s)",
        "starting Ray: took 63 s",
    ]


def test_what_is_brief_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    display, clock = Display(draw_s=0.001), Clock()
    outer, inner = Wait("outer", clock=clock), Wait("inner", clock=clock)
    display.begin(outer)
    display.begin(inner)
    display.end(inner)
    display.end(outer)
    clock.now = 40.0
    quiet = Wait("training", quiet=True, clock=clock)
    display.begin(quiet)
    clock.now = 69.0
    display.end(quiet)
    assert capsys.readouterr().out == ""


def test_the_memory_is_of_the_same_wait_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "waits.json"
    memory = Memory(lambda: path)
    assert memory.last("Ray") is None
    memory.keep("Ray", 4.04)
    memory.keep("libraries", 9.0)
    assert Memory(lambda: path).last("Ray") == 4.0
    for number in range(waits.REMEMBERED):
        memory.keep(f"other {number}", 1.0)
    assert memory.last("Ray") is None and memory.last("other 0") == 1.0
    path.write_text("{ not JSON")
    assert memory.last("other 0") is None
    memory.keep("Ray", 5.0)
    assert json.loads(path.read_text()) == {"Ray": 5.0}
    blocked = Memory(lambda: path / "below a file" / "waits.json")
    blocked.keep("Ray", 5.0)
    assert blocked.last("Ray") is None


def test_only_what_came_to_its_end_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError), waiting("a", "a"):
        raise ValueError
    with waiting("b", "b"), waiting("c"):
        pass
    assert list(json.loads((tmp_path / "keel" / "waits.json").read_text())) == ["b"]


TERMINAL = """
import os, sys, time
from keel.trainer.run.progress import waiting
with waiting("starting Ray", total=8, unit="steps") as wait:
    wait.done = 3
    while "3 of 8" not in open(sys.argv[1]).read():
        time.sleep(0.01)
    print("a line")
    print("another", end="", file=sys.stderr)
    time.sleep(0.5)
    print(" one", file=sys.stderr)
print("the end")
"""


@pytest.mark.e2e
def test_on_a_terminal_it_is_one_line_below_what_is_printed(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.touch()
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", TERMINAL, str(seen)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "60"},
    ):
        os.close(theirs)
        text = ""
        while True:
            try:
                text += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
            seen.write_text(text)
    os.close(ours)
    screen = list[str]()
    for line in re.split(r"\r?\n", text.replace("\r\n", "\n")):
        screen.append(re.split(r"\r\x1b\[K", line)[-1])
    assert screen == ["a line", "another one", "the end", ""]
    drawn = re.findall(r"\r\x1b\[K(\S starting Ray · 3 of 8 steps · \d s)", text)
    assert len(drawn) >= 1


def test_a_reader_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    display, clock = Display(draw_s=0.001), Clock()
    wait = Wait("a", clock=clock)
    display.begin(wait)
    clock.now = 2.0
    wait_for(lambda: wait in display._said)
    display.end(wait)
