"""How often a run starts again by itself, and from where."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, RayTaskError

from keel.configs.load import load_config
from keel.model import ray_timeouts
from keel.trainer.run import session
from keel.trainer.run.checkpoint import SaveError, State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import EVENTS
from keel.trainer.run.restarts import WINDOW_S, Restarts, WorkerLost
from keel.trainer.run.session import run_with_restarts


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By a signal, or a Ray, that another test's command has had or lost; nor are others."""
    monkeypatch.setattr(session, "preempted", lambda: "")
    monkeypatch.setattr(session, "asked", lambda: False)
    ray_timeouts.joined()
    yield
    ray_timeouts.joined()


def test_losses_are_counted_as_a_rate() -> None:
    now = [0.0]
    restarts = Restarts(2, clock=lambda: now[0])
    with pytest.raises(WorkerLost, match=r"^it cannot start$"):
        restarts.another(WorkerLost("it cannot start"))
    restarts.begun = True
    restarts.another(WorkerLost("first"))
    restarts.another(WorkerLost("second"))
    with pytest.raises(
        WorkerLost, match=r"third\nthis was loss 3 within 3 hours, and run\.max_restarts"
    ):
        restarts.another(WorkerLost("third"))
    now[0] = WINDOW_S
    for _ in range(2):
        restarts.another(WorkerLost("those are long ago"))
    never = Restarts(0)
    never.begun = True
    with pytest.raises(WorkerLost, match=r"gone\nrun\.max_restarts = 0\. What was saved is there"):
        never.another(WorkerLost("gone"))


class World:
    """A run whose parts are fakes; what becomes of each start is the test's to say."""

    def __init__(self, folder: Path, *knobs: str) -> None:
        given = load_config("quickstart", [f"run.dir={folder}", "run.steps=9", *knobs])
        self.config, self.folder = given, folder
        self.restored: list[str] = []
        self.starts: list[int] = []
        self.loaded: list[str] = []
        self.open = 0
        self.export: Any = None

    @contextmanager
    def started(self, _: RunFolder) -> Iterator[Any]:
        assert not self.open, "the one before has to be gone, with its memory"
        self.open += 1
        learner = SimpleNamespace(
            load=lambda path: self.loaded.append(path.name), export=self.export
        )
        try:
            yield SimpleNamespace(learner=learner)
        finally:
            self.open -= 1

    def run(self, drive: Callable[[RunFolder, int], int]) -> None:
        def noted(_: Any, folder: RunFolder, __: Any, start: int) -> int:
            self.starts.append(start)
            (self.folder / "metrics.jsonl").touch()
            return drive(folder, start)

        run_with_restarts(
            ["train", "quickstart"],
            self.config,
            text="plan",
            restore=lambda cursor: self.restored.append(cursor["at"]),
            position=lambda: {"at": "the beginning"},
            started=self.started,
            drive=noted,
        )

    def save(self, folder: RunFolder, step: int) -> None:
        digest = config_digest(self.config)
        cursor = {"at": f"step {step}"}
        state = State(step=step, version=step, cursor=cursor, config=digest)
        folder.save(state, lambda _: {})


def test_a_run_that_loses_a_rank_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)

    def drive(folder: RunFolder, start: int) -> int:
        if len(world.starts) == 1:
            raise WorkerLost("trainer rank 0 died (process 7 on here)")
        if len(world.starts) == 2:
            world.save(folder, 4)
            raise WorkerLost("trainer rank 0 is gone")
        return 5  # stopped by its user

    world.run(drive)
    assert world.starts == [0, 0, 4] and world.loaded == ["step_000004"]
    assert world.restored == ["the beginning", "step 4"]
    said = capsys.readouterr().out
    assert "rank 0 died (process 7 on here)\nThe run starts again from its beginning" in said
    assert "trainer rank 0 is gone\nThe run starts again from step 4" in said
    assert (tmp_path / EVENTS).read_text().count('"kind": "restart"') == 2


def test_a_checkpoint_in_the_place_of_a_damaged_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    with RunFolder(world.config) as folder:
        for step in (3, 4):
            world.save(folder, step)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints/step_000004/more").touch()

    def drive(folder: RunFolder, start: int) -> int:
        if len(world.starts) == 1:
            world.save(folder, 4)
            raise WorkerLost("trainer rank 0 is gone")
        return 5

    world.run(drive)
    assert world.starts == [3, 4]
    assert "it is kept as damaged_step_000004" in capsys.readouterr().out


def test_a_run_whose_last_evaluation_was_cut_off_makes_it_before_it_exports(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, "run.steps=4")
    exported: list[list[int]] = []
    with RunFolder(world.config) as folder:
        world.save(folder, 4)
    lines = [{"step": 0, "eval/h/pass@1": 0.5}, {"step": 4, "loss": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def export(folder: Path) -> dict[str, Any]:
        folder.mkdir()
        exported.append(world.starts.copy())
        return {}

    def drive(folder: RunFolder, start: int) -> int:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "eval/h/pass@1": 0.7}) + "\n")
        return start

    world.export = export
    world.run(drive)
    assert world.starts == [4] and exported == [[4]]
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    world.run(drive)
    assert world.starts == [4] and len(exported) == 2, "it is measured, and only exported again"


@pytest.mark.parametrize("room", [True, False])
def test_without_room_for_the_last_checkpoint_the_model_is_exported_all_the_same(
    tmp_path: Path, room: bool
) -> None:
    world = World(tmp_path, "run.steps=4")

    def export(folder: Path) -> dict[str, Any]:
        if not room:
            raise OSError("no space is left")
        folder.mkdir()
        return {}

    def full(*_: Any) -> dict[str, Any]:
        raise OSError("No space left on device")

    def drive(folder: RunFolder, start: int) -> int:
        learner: Any = SimpleNamespace(version=4, save=full)
        assert session.save_checkpoint(
            folder, world.config, learner, 3, {}, stop=lambda: False, say=said.append
        )
        session.save_checkpoint(
            folder, world.config, learner, 4, {}, stop=lambda: False, say=said.append
        )
        return 4

    said: list[str] = []
    world.export = export
    with pytest.raises(SaveError, match=r"step_000004: cannot be written: No space") as raised:
        world.run(drive)
    assert "The run goes on" in said[0] and (tmp_path / "model").exists() == room
    (note,) = raised.value.__notes__
    assert ("The trained model is in" in note) == room
    assert ("no space is left" in note) != room


def test_a_run_that_keeps_losing_them_ends(tmp_path: Path) -> None:
    world = World(tmp_path, "run.max_restarts=2")

    def drive(*_: Any) -> int:
        raise WorkerLost("trainer rank 0 died")

    with pytest.raises(
        WorkerLost, match=r"trainer rank 0 died\nthis was loss 3 .* = 2\. What was saved"
    ):
        world.run(drive)
    assert len(world.starts) == 3


def test_without_ray_no_process_can_start_again(tmp_path: Path) -> None:
    world = World(tmp_path)

    def drive(*_: Any) -> int:
        ray_timeouts.mark_lost("the raylet is gone")
        raise WorkerLost("trainer rank 0 died")  # as it does then

    with pytest.raises(ray_timeouts.RayLost, match="the raylet is gone"):
        world.run(drive)
    assert len(world.starts) == 1


def test_what_went_with_a_rank_that_died_is_a_loss_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that is to load weights can be the first to notice."""
    world = World(tmp_path)

    def drive(*_: Any) -> int:
        if len(world.starts) == 1:
            raise ObjectLostError("ref", "address", "put")
        raise RayTaskError("step", "traceback", ValueError("no fault of a machine's"))

    with pytest.raises(RayTaskError, match="traceback"):
        world.run(drive)
    assert world.starts == [0, 0]
    said = capsys.readouterr().out
    assert "is gone with what others need of it: " in said and "The run starts again from" in said


def test_a_run_that_was_asked_to_stop_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)

    def drive(*_: Any) -> int:
        monkeypatch.setattr(session, "asked", lambda: True)
        raise WorkerLost("trainer rank 0 died")

    with pytest.raises(
        WorkerLost, match="rank 0 died\nThe run was asked to stop, and does not start"
    ):
        world.run(drive)
    assert world.starts == [0]
