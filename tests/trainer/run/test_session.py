"""Starting, restarting, resuming and ending a run, with a fake trainer and fake engines."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, RayTaskError

from keel.commands import check as check_module
from keel.commands import exit_status
from keel.commands.cli import main
from keel.configs.load import load_config
from keel.model import ray_timeouts
from keel.model.ray_timeouts import RayLost
from keel.rl.supervisor import PREEMPTION, RESTART_PERIOD_S
from keel.trainer import session
from keel.trainer.placement.hardware import Hardware
from keel.trainer.run.checkpoint import SaveError, State, config_digest
from keel.trainer.run.errors import WorkerLost
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import EVENTS
from keel.trainer.run.signals import (
    PREEMPTED,
    Interrupt,
    Preempted,
    preemption_signal,
    signals_blocked,
    signals_deferred,
    stop_requested,
    watching,
)
from keel.trainer.session import Restarts, run_with_restarts, save_checkpoint

DIED = "trainer rank 0 died"


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Isolate each test from signals and lost Ray clusters of other tests."""
    monkeypatch.setattr(session, "preemption_signal", lambda: "")
    monkeypatch.setattr(session, "stop_requested", lambda: False)
    ray_timeouts.new_session()
    yield
    ray_timeouts.new_session()


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
    now[0] = RESTART_PERIOD_S
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
    def launch(self, *_: Any) -> Iterator[Any]:
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

        task: Any = SimpleNamespace(
            config=self.config,
            facts=None,
            hardware=Hardware(gpu=False),
            choice=SimpleNamespace(values={}),
            tokenizer_digest="",
            text=lambda: "plan",
            restore=lambda cursor: self.restored.append(cursor["at"]),
            position=lambda: {"at": "the beginning"},
        )
        run_with_restarts(["train", "quickstart"], task, self.launch, counted)

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


def test_only_the_last_checkpoint_must_be_written(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "run.steps=4")
    lines: list[str] = []

    def full(*_: Any) -> dict[str, Any]:
        raise OSError("No space left on device")

    def drive(folder: RunFolder, start: int) -> int:
        learner: Any = SimpleNamespace(version=4, save=full)
        how: dict[str, Any] = {"stop": lambda: False, "say": lines.append}
        assert not save_checkpoint(folder, run.config, learner, 3, {}, **how)
        save_checkpoint(folder, run.config, learner, 4, {}, **how)
        return 4

    with pytest.raises(SaveError, match="step_000004"):
        run.run(drive)
    assert len(lines) == 1


def test_lost_objects_restart_but_task_errors_do_not(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)

    def drive(*_: Any) -> int:
        if len(run.starts) == 1:
            raise ObjectLostError("ref", "address", "put")
        raise RayTaskError("step", "traceback", ValueError("a bug"))

    with pytest.raises(RayTaskError, match="traceback"):
        run.run(drive)
    assert run.starts == [0, 0]


DEADLINE_S = 120


def test_first_ctrl_c_stops_and_second_interrupts() -> None:
    lines: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with watching():
        with Interrupt(lines.append) as interrupt:
            assert not interrupt() and not stop_requested()
            signal.raise_signal(signal.SIGINT)
            assert interrupt() and not interrupt.should_abort() and len(lines) == 1
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            assert interrupt.should_abort()
        assert stop_requested()
    assert signal.getsignal(signal.SIGINT) == before
    with watching():
        assert not stop_requested()


@pytest.mark.parametrize("number", PREEMPTION)
def test_preemption_aborts_once(number: signal.Signals) -> None:
    lines: list[str] = []
    before = signal.getsignal(number)
    with Interrupt(lines.append, grace_s=DEADLINE_S) as interrupt:
        signal.raise_signal(number)
        assert interrupt() and interrupt.should_abort()
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert len(lines) == 1 and number.name in lines[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == before
    with Interrupt(lines.append) as interrupt:
        assert not interrupt() and not interrupt.should_abort()


def test_exceeded_grace_raises_anywhere() -> None:
    with watching():
        with pytest.raises(Preempted), Interrupt(lambda _: None, grace_s=0.01):
            signal.raise_signal(signal.SIGTERM)
            threading.Event().wait(DEADLINE_S)
        assert (
            preemption_signal().startswith("SIGTERM, ")
            and "run.grace_s = 0.01" in preemption_signal()
        )
    assert not preemption_signal()


def raises(error: BaseException | None = None) -> Callable[..., None]:
    """Return a command that is preempted and then fails with `error`, or ends early."""

    def command(*_: object) -> None:
        with Interrupt(lambda _: None):
            signal.raise_signal(signal.SIGTERM)
            if error is not None:
                raise error

    return command


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (lambda *_: signal.raise_signal(signal.SIGTERM), PREEMPTED),
        (raises(), PREEMPTED),
        (raises(RayLost("the raylet is gone")), PREEMPTED),
        (raises(RuntimeError("the disk is full")), 1),
    ],
)
def test_preempted_command_has_its_own_status(
    command: Callable[..., None],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("KEEL_TRACEBACK", raising=False)
    monkeypatch.setattr(exit_status, "lost_reason", lambda: "")
    monkeypatch.setattr(check_module, "check", command)
    assert main(["check", "quickstart"]) == status
    assert ("SIGTERM" in capsys.readouterr().err) == (status == PREEMPTED)


@pytest.mark.e2e
def test_blocked_signals_never_reach_children() -> None:
    echo = [sys.executable, "-S", "-c", "print(input())"]
    with watching():
        with signals_blocked():
            child = subprocess.Popen(echo, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for number in PREEMPTION:
                child.send_signal(number)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does
        with pytest.raises(Preempted):
            signal.raise_signal(signal.SIGTERM)
    assert child.communicate("alive", timeout=DEADLINE_S)[0] == "alive\n"


def test_deferred_signals_are_handled_afterwards() -> None:
    done: list[str] = []
    with watching():
        with pytest.raises(KeyboardInterrupt), signals_deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            with signals_deferred():
                done.append("inner")
            done.append("outer")
        assert done == ["inner", "outer"]
        assert stop_requested() and preemption_signal() == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
