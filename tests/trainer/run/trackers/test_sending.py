"""What a run has written is sent on beside it, whatever the tracker does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from keel.commands import train as main
from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.trainer.run.journal import note
from keel.trainer.run.trackers.known import check_trackers
from keel.trainer.run.trackers.sender import OWN, Trackers, TrackerThread, has_abandoned_threads
from keel.trainer.run.trackers.tracker import (
    End,
    Opened,
    Tracked,
    grouped,
    knobs_of,
    without_keys,
)
from tests.waiting import PATIENCE_S, wait_for


class Scripted:
    """A tracker that fails, or hangs, when told to."""

    cure = "Plug it in"

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.events: list[str] = []
        self.ids: list[str] = []
        self.ends: list[End] = []
        self.abandoned = False
        self.broken, self.released = "", threading.Event()
        self.released.set()

    def open(self, run: Tracked) -> Opened:
        self._tried()
        self.ids.append(run.id)
        return Opened(id=run.id or "own", where="https://me:hunter2@there/run")

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._tried()
        self.steps.append((step, dict(numbers)))

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        self._tried()
        self.events.append(text)

    def close(self, end: End) -> None:
        self._tried()
        self.ends.append(end)

    def abandon(self) -> None:
        self.abandoned = True

    def _tried(self) -> None:
        assert self.released.wait(PATIENCE_S)
        if self.broken:
            raise RuntimeError(self.broken)


class Run:
    """A run folder that is written to, and its tracker."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tracker = folder, Scripted()
        self.said: list[str] = []

    def write(self, *steps: int, of: str = "a") -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            for step in steps:
                file.write(json.dumps({"step": step, "time": 1.0, f"reward/{of}": step}) + "\n")

    def note(self, kind: str, text: str) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"step": 1, "time": 1.0, "kind": kind, "text": text}) + "\n")

    def start(self, *, again_s: float = 0.0, late_s: float = 1e9) -> tuple[TrackerThread, Trackers]:
        make: Callable[[], Scripted] = lambda: self.tracker  # noqa: E731
        say = self.said.append
        sending = TrackerThread(
            "scripted", make, self.folder, {}, say, again_s=again_s, late_s=late_s
        )
        return sending, Trackers([sending], say)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_resumed_run_goes_on_where_the_tracker_is_and_tells_it_nothing_twice(run: Run) -> None:
    run.write(0, 1, 2, 3)
    run.note("alarm", "first")
    _, trackers = run.start()
    trackers.close("stopped", 3)
    # Resumed from a checkpoint of step 1: what came after is taken out and done again.
    (run.folder / "metrics.jsonl").write_text("")
    run.write(0, 1)
    run.note("resume", "second")
    run.note(OWN, "its own")
    _, trackers = run.start()
    run.write(2, 3, 4, 5, of="b")
    trackers.look()
    trackers.close("finished", 5)
    assert [step for step, _ in run.tracker.steps] == [0, 1, 2, 3, 4, 5]
    assert run.tracker.steps[3] == (3, {"reward/a": 3})
    assert run.tracker.steps[4] == (4, {"reward/b": 4})
    assert run.tracker.events == ["first", "second"]
    assert run.tracker.ids == ["", "own"]
    assert run.tracker.ends == ["stopped", "finished"]
    assert run.said == ["scripted: https://…@there/run"] * 2


def test_an_evaluation_that_is_made_up_for_is_told_once_and_of_its_step(run: Run) -> None:
    run.write(0, 1)
    _, trackers = run.start()
    trackers.close("stopped", 1)
    with (run.folder / "metrics.jsonl").open("a") as file:
        line = {"step": 1, "time": 2.0, "eval/a/score": 0.5, "reward/a": 7}
        file.write(json.dumps(line) + "\n")
    for end in ("stopped", "stopped"):
        _, trackers = run.start()
        trackers.close(end, 1)
    run.write(2)
    _, trackers = run.start()
    trackers.close("finished", 2)
    assert run.tracker.steps == [
        (0, {"reward/a": 0}),
        (1, {"reward/a": 1}),
        (1, {"eval/a/score": 0.5}),
        (2, {"reward/a": 2}),
    ]


def test_a_tracker_that_fails_is_said_once_and_told_later_what_it_missed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    run.tracker.broken = "401: 0123456789abcdef is no key of https://me:hunter2@there"
    run.write(0, 1)
    sending, trackers = run.start()
    for _ in range(3):
        wait_for(lambda: not sending._wake.is_set())
        trackers.look()
    (line,) = wait_for(lambda: run.said)
    assert line == (
        "warning: scripted: RuntimeError: 401: … is no key of https://…@there. The run goes on; "
        "scripted is tried again, and told then what it has missed. Plug it in"
    )
    run.tracker.broken = ""
    run.write(2)
    trackers.look()
    wait_for(lambda: [step for step, _ in run.tracker.steps] == [0, 1, 2])
    trackers.close("finished", 2)
    assert run.said[1:] == ["scripted: https://…@there/run", "scripted has caught up with the run"]


def test_an_event_that_failed_is_told_again_and_counted_once(run: Run) -> None:
    run.write(0)
    sending, trackers = run.start()
    wait_for(lambda: sending.step == 0)
    run.tracker.broken = "down"
    run.note("alarm", "first")
    trackers.look()
    wait_for(lambda: len(run.said) == 2)
    run.tracker.broken = ""
    trackers.close("stopped", 0)
    run.note("alarm", "second")
    _, trackers = run.start()
    trackers.close("finished", 0)
    assert run.tracker.events == ["first", "second"]


def test_a_damaged_note_of_how_far_it_was_begins_anew(run: Run) -> None:
    (run.folder / "trackers").mkdir()
    (run.folder / "trackers" / "scripted.json").write_text("{")
    run.write(0)
    _, trackers = run.start()
    trackers.close("finished", 0)
    assert [step for step, _ in run.tracker.steps] == [0]


def test_after_a_failure_it_is_left_alone_for_a_while_but_tried_at_the_end(run: Run) -> None:
    run.tracker.broken = "down"
    sending, trackers = run.start(again_s=1e6)
    wait_for(lambda: run.said)
    run.tracker.broken = ""
    run.write(0)
    trackers.look()
    wait_for(lambda: not sending._wake.is_set())
    assert run.tracker.ids == []
    trackers.close("finished", 0)
    assert [step for step, _ in run.tracker.steps] == [0]


def test_however_long_it_stays_away_it_is_tried_again(run: Run) -> None:
    run.tracker.broken = "down"
    sending, trackers = run.start(again_s=1e6)
    wait_for(lambda: run.said)
    for _ in range(2000):
        sending._failed(OSError("down"))
    run.tracker.broken = ""
    run.write(0)
    trackers.close("finished", 0)
    assert [step for step, _ in run.tracker.steps] == [0]


def test_a_tracker_that_hangs_holds_up_nothing_and_the_process_ends_without_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(main, "exit_now", left.append)
    monkeypatch.setitem(main.COMMANDS, "check", lambda *_: None)
    assert main.run("check") == 0 and not left
    run.tracker.released.clear()
    run.write(0, 1)
    sending, trackers = run.start(late_s=0.0)
    wait_for(lambda: sending._since)
    trackers.look()
    trackers.look()
    assert [line.partition(".")[0] for line in run.said] == [
        "warning: scripted has not answered for 0 s"
    ]
    trackers.close("finished", 1, seconds=0.1)
    assert "was told of 0 of 1 steps within 0 s; when the run is resumed" in run.said[1]
    assert run.tracker.abandoned
    main.run("check")
    assert left == [0]
    run.tracker.released.set()
    assert sending.done.wait(PATIENCE_S)
    assert [step for step, _ in run.tracker.steps] == [0, 1]
    assert len(run.said) == 2
    wait_for(lambda: not has_abandoned_threads())


def test_a_line_that_is_being_written_is_left_until_it_is_whole(run: Run) -> None:
    run.write(0)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, ')
    sending, trackers = run.start()
    wait_for(lambda: sending.step == 0)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('"time": 1.0, "loss": 2.0}\n')
    trackers.look()
    trackers.close("finished", 1)
    assert run.tracker.steps[1] == (1, {"loss": 2.0})


def test_half_a_line_of_the_events_keeps_none_back(run: Run) -> None:
    note(run.folder, 0, "alarm", "before")
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"step": 1, "kind": "al')  # the disk was full, or the power gone
    note(run.folder, 2, "alarm", "after")
    note(run.folder, 2, "alarm", "later")
    run.write(0)
    _, trackers = run.start()
    trackers.close("finished", 1)
    assert run.tracker.events == ["before", "after", "later"]
    assert run.tracker.ends == ["finished"]


def test_names_are_grouped() -> None:
    assert grouped({"loss": 1.0, "eval/sums/pass@1": 2.0}) == {
        "train/loss": 1.0,
        "eval/sums/pass@1": 2.0,
    }


def test_knobs_are_plain_data() -> None:
    config = load_config("quickstart", ["eval.variants=[{name: short, max_tokens: 8}]"])
    knobs = knobs_of(config)
    assert knobs["trainer.lr"] == config.trainer.lr
    assert knobs["eval.variants"][0]["max_tokens"] == 8
    assert json.loads(json.dumps(knobs)) == knobs


def test_short_values_of_the_environment_are_left_in_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PUBLIC_KEY", "a")
    assert without_keys("an apple") == "an apple"


def test_what_a_tracker_lacks_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("keel.trainer.run.trackers.known.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"run.trackers: mlflow: .* pip install '.\[mlflow\]'"):
        check_trackers(["mlflow"])
    monkeypatch.undo()
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb", "mlflow", "trackio"])
    check_trackers([])


def test_each_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"run.trackers = .*: must name each once"):
        load_config("quickstart", ["run.trackers=[mlflow, mlflow]"])
    with pytest.raises(ConfigError, match="must be one of wandb, mlflow, trackio"):
        load_config("quickstart", ["run.trackers=[comet]"])
