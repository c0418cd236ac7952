"""Every Ray call has a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    RayTaskError,
)

from keel.model import ray_timeouts
from keel.model.ray_timeouts import (
    Deadline,
    RayLost,
    Unanswered,
    awaited,
    bounded,
    get,
    is_loss,
    joined,
    kill,
    lost_reason,
    mark_lost,
    shut_down,
    wait,
)
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def healthy() -> Iterator[None]:
    joined()
    yield
    joined()


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Result of `ray.is_initialized`, as a list of one."""
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
    threads = {bounded(threading.get_ident, PATIENCE_S, "name its thread") for _ in range(50)}
    assert len(threads) <= 2


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
        awaited(Future())
    assert not calls and not lost_reason()
    initialized[0] = True  # another component joined a cluster
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7
    initialized[0] = False
    joined()
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
        awaited(Future())


def test_deadline_caps_the_time_between_polls() -> None:
    now = 0.0
    deadline = Deadline(10.0, 1.0, lambda: now)
    assert deadline.remaining() == 10.0
    now += 3600.0
    assert deadline.remaining() == 8.0
    for _ in range(7):
        now += 1.0
        assert deadline.remaining() > 0
    now += 1.5
    assert deadline.remaining() == 0.0


class FakeRay:
    """Answers `ray.wait` after a number of polls of `poll_s` seconds each."""

    def __init__(self, patch: pytest.MonkeyPatch, polls: int, poll_s: float) -> None:
        self.now, self._polls, self._poll_s = 0.0, polls, poll_s
        self.timeouts, self.limits = list[float](), list[float]()
        patch.setattr(ray_timeouts.ray, "wait", self._wait)
        patch.setattr(ray_timeouts.ray, "get", lambda ref, timeout: "its result")
        patch.setattr(ray_timeouts, "bounded", self._bounded)

    def deadline(self, seconds: float) -> Deadline:
        return Deadline(seconds, clock=lambda: self.now)

    def _bounded(self, call: Callable[[], Any], seconds: float, what: str) -> Any:
        self.limits.append(seconds)
        return call()

    def _wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.timeouts.append(timeout)
        self.now += min(self._poll_s, timeout) if self._poll_s < 60 else self._poll_s
        return (refs, []) if len(self.timeouts) > self._polls else ([], refs)


def test_wait_polls_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = FakeRay(monkeypatch, polls=100, poll_s=1.0)
    assert wait(["a"], seconds=slow.deadline(2.5)) == ([], ["a"])
    assert slow.timeouts == [1.0, 1.0, 0.5]
    assert slow.limits == [remaining + ray_timeouts._GRACE_S for remaining in (2.5, 1.5, 0.5)]
    stopped = FakeRay(monkeypatch, polls=4, poll_s=3600.0)
    assert wait(["a"], seconds=stopped.deadline(10.0)) == (["a"], [])
    assert get("a", seconds=1.0) == "its result"
    FakeRay(monkeypatch, polls=10**6, poll_s=1.0)
    with pytest.raises(GetTimeoutError):
        get("a", seconds=0.01)


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


def test_losses_are_recognized_in_remote_errors() -> None:
    losses = [ActorDiedError(), ObjectLostError("ref", "address", "put"), Unanswered()]
    assert all(map(is_loss, losses))
    for error in (*losses, RuntimeError("a bug")):
        raised = RayTaskError("step", "traceback", error).as_instanceof_cause()
        assert is_loss(raised) == (error in losses), error
