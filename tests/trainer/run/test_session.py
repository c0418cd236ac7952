"""Starting, restarting, resuming and ending a run, with a fake trainer and fake engines."""

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
from keel.trainer.run.session import run_with_restarts, save_checkpoint

DIED = "trainer rank 0 died"


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Isolate each test from signals and lost Ray clusters of other tests."""
    monkeypatch.setattr(session, "preempted", lambda: "")
    monkeypatch.setattr(session, "stop_requested", lambda: False)
    ray_timeouts.joined()
    yield
    ray_timeouts.joined()


def test_restarts_are_limited_per_window() -> None:
    now = [0.0]
    restarts = Restarts(2, clock=lambda: now[0])
    with pytest.raises(WorkerLost, match=r"^cannot start$"):
        restarts.count(WorkerLost("cannot start"))
    restarts.started = True
    restarts.count(WorkerLost("first"))
    restarts.count(WorkerLost("second"))
    with pytest.raises(WorkerLost, match=r"third\n.*run\.max_restarts = 2"):
        restarts.count(WorkerLost("third"))
    now[0] = WINDOW_S
    for _ in range(2):
        restarts.count(WorkerLost("the others have expired"))
    never = Restarts(0)
    never.started = True
    with pytest.raises(WorkerLost, match=r"run\.max_restarts = 0"):
        never.count(WorkerLost("gone"))


class FakeRun:
    """A run with fake parts. Each test provides the `drive` that decides how it ends."""

    def __init__(self, folder: Path, *knobs: str) -> None:
        overrides = [f"run.dir={folder}", "run.steps=9", *knobs]
        self.config, self.folder = load_config("quickstart", overrides), folder
        self.restored: list[str] = []
        self.starts: list[int] = []
        self.loaded: list[str] = []
        self.running = 0
        self.export: Any = None

    @contextmanager
    def launch(self, _: RunFolder) -> Iterator[Any]:
        assert not self.running, "the previous attempt still holds memory"
        self.running += 1
        load = lambda path: self.loaded.append(path.name)  # noqa: E731
        try:
            yield SimpleNamespace(learner=SimpleNamespace(load=load, export=self.export))
        finally:
            self.running -= 1

    def run(self, drive: Callable[[RunFolder, int], int]) -> None:
        def counted(_: Any, folder: RunFolder, __: Any, start: int) -> int:
            self.starts.append(start)
            (self.folder / "metrics.jsonl").touch()
            return drive(folder, start)

        run_with_restarts(
            ["train", "quickstart"],
            self.config,
            text="plan",
            restore=lambda cursor: self.restored.append(cursor["at"]),
            position=lambda: {"at": "the beginning"},
            launch=self.launch,
            drive=counted,
        )

    def save(self, folder: RunFolder, step: int) -> None:
        digest = config_digest(self.config)
        state = State(step=step, version=step, cursor={"at": f"step {step}"}, config=digest)
        folder.save(state, lambda _: {})


def test_restart_continues_from_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path)

    def drive(folder: RunFolder, start: int) -> int:
        if len(run.starts) == 1:
            raise WorkerLost(DIED)
        if len(run.starts) == 2:
            run.save(folder, 4)
            raise WorkerLost(DIED)
        return 5  # stopped by the user

    run.run(drive)
    assert run.starts == [0, 0, 4] and run.loaded == ["step_000004"]
    assert run.restored == ["the beginning", "step 4"]
    assert capsys.readouterr().out.count(DIED) == 2
    assert (tmp_path / EVENTS).read_text().count('"kind": "restart"') == 2


def test_interrupted_last_evaluation_is_made_before_export(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "run.steps=4")
    exported: list[list[int]] = []
    with RunFolder(run.config) as folder:
        run.save(folder, 4)
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "eval/h/pass@1": 0.5}, {"step": 4, "loss": 0.1}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def export(folder: Path) -> dict[str, Any]:
        folder.mkdir()
        exported.append(run.starts.copy())
        return {}

    def drive(folder: RunFolder, start: int) -> int:
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 4, "eval/h/pass@1": 0.7}) + "\n")
        return start

    run.export = export
    run.run(drive)
    assert run.starts == [4] and exported == [[4]]
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    run.run(drive)
    assert run.starts == [4] and len(exported) == 2, "evaluated already, so only exported again"


@pytest.mark.parametrize("room", [True, False])
def test_model_is_exported_if_last_checkpoint_fails(tmp_path: Path, room: bool) -> None:
    run = FakeRun(tmp_path, "run.steps=4")
    lines: list[str] = []

    def export(folder: Path) -> dict[str, Any]:
        if not room:
            raise OSError("no space is left")
        folder.mkdir()
        return {}

    def full(*_: Any) -> dict[str, Any]:
        raise OSError("No space left on device")

    def drive(folder: RunFolder, start: int) -> int:
        learner: Any = SimpleNamespace(version=4, save=full)
        how: dict[str, Any] = {"stop": lambda: False, "say": lines.append}
        assert not save_checkpoint(folder, run.config, learner, 3, {}, **how)
        save_checkpoint(folder, run.config, learner, 4, {}, **how)
        return 4

    run.export = export
    with pytest.raises(SaveError, match="step_000004") as error:
        run.run(drive)
    assert len(lines) == 1 and (tmp_path / "model").exists() == room
    assert ("no space is left" in error.value.__notes__[0]) != room


def test_lost_objects_restart_but_task_errors_do_not(tmp_path: Path) -> None:
    """The first to notice the loss of a rank may be an engine that loads weights."""
    run = FakeRun(tmp_path)

    def drive(*_: Any) -> int:
        if len(run.starts) == 1:
            raise ObjectLostError("ref", "address", "put")
        raise RayTaskError("step", "traceback", ValueError("a bug"))

    with pytest.raises(RayTaskError, match="traceback"):
        run.run(drive)
    assert run.starts == [0, 0]
