"""Every Ray call has a deadline."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from keel.model import ray_timeouts
from keel.model.ray_timeouts import (
    RayLost,
    Unanswered,
    await_future,
    bounded,
    is_loss,
    kill,
    lost_reason,
    mark_lost,
    new_session,
    shut_down,
    stop,
)
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def healthy() -> Iterator[None]:
    new_session()
    yield
    new_session()


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """List whose only element is the result of `ray.is_initialized`."""
    state = [True]
    monkeypatch.setattr("ray.is_initialized", lambda: state[0])
    return state


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that is set only after the test, to release its threads."""
    event = threading.Event()
    yield event
    event.set()


def test_bounded_returns_results_and_errors(never: threading.Event) -> None:
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7
    with pytest.raises(KeyError, match="absent"):
        bounded(lambda: {}["absent"], PATIENCE_S, "look")
    with pytest.raises(Unanswered, match="list its nodes"):
        bounded(never.wait, 0.01, "list its nodes")
    assert bounded(lambda: 7, PATIENCE_S, "answer") == 7, "a hanging call blocks no other"


def test_no_call_restarts_ray_after_shutdown(initialized: list[bool]) -> None:
    calls: list[str] = []

    def stop() -> None:
        with pytest.raises(RayLost):
            bounded(lambda: calls.append("meanwhile"), PATIENCE_S, "list its nodes")
        initialized[0] = False

    shut_down(stop, PATIENCE_S, "end")
    with pytest.raises(RayLost):
        bounded(lambda: calls.append("later"), PATIENCE_S, "list its nodes")
    with pytest.raises(RayLost):
        await_future(Future())
    assert not calls and not lost_reason()
    initialized[0] = True  # another component joined a cluster
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7
    initialized[0] = False
    new_session()
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7
    shut_down(lambda: None, PATIENCE_S, "end")
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7, "there was no cluster to leave"


def test_mark_lost_ends_pending_and_later_calls(never: threading.Event) -> None:
    def hang() -> bool:
        mark_lost("its raylet is gone")
        return never.wait(PATIENCE_S)

    with pytest.raises(RayLost, match="its raylet is gone"):
        bounded(hang, PATIENCE_S, "store an object")
    mark_lost("second")
    kill("an actor")
    with pytest.raises(RayLost):
        bounded(lambda: mark_lost("called"), PATIENCE_S, "anything")
    assert lost_reason() == "its raylet is gone", "the first reason is kept"
    with pytest.raises(RayLost):
        await_future(Future())


def test_a_hanging_kill_is_awaited_once(
    monkeypatch: pytest.MonkeyPatch, never: threading.Event
) -> None:
    calls = list[str]()

    def hang(actor: str) -> None:
        calls.append(actor)
        never.wait(PATIENCE_S)

    monkeypatch.setattr("ray.kill", hang)
    monkeypatch.setattr(ray_timeouts, "CALL_S", 0.01)
    for actor in ("rank 0", "rank 1"):
        kill(actor)
    assert calls == ["rank 0"] and "end an actor" in lost_reason()


def test_an_actor_that_cannot_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, never: threading.Event
) -> None:
    killed = list[object]()
    monkeypatch.setattr("ray.kill", killed.append)
    monkeypatch.setattr(ray_timeouts, "CALL_S", 0.01)
    actor = SimpleNamespace(end=SimpleNamespace(remote=never.wait))
    stop([actor])
    assert killed == [actor]


def test_losses_are_recognized_in_remote_errors() -> None:
    losses = [ActorDiedError(), ObjectLostError("ref", "address", "put"), Unanswered()]
    assert all(map(is_loss, losses))
    for error in (*losses, RuntimeError("a bug")):
        raised = RayTaskError("step", "traceback", error).as_instanceof_cause()
        assert is_loss(raised) == (error in losses), error


@pytest.mark.e2e
def test_an_actor_exits_with_its_raylet() -> None:
    actor = (
        "import time; from keel.model.ray_timeouts import exit_with_raylet; "
        f"exit_with_raylet(); print(flush=True); time.sleep({PATIENCE_S})"
    )
    raylet = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {actor!r}])"
    environment = {**os.environ, ray_timeouts.NAME: "session/actor"}
    with subprocess.Popen(
        [sys.executable, "-c", raylet], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "\n"
        process.kill()
        assert not process.stdout.read(), "the pipe is closed when the actor exits, too"
