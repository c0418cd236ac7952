"""No call of Ray's is waited for without an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from keel.model import ray_calls
from keel.model.ray_calls import RayLost, awaited, bounded, joined, kill, lose, lost, of_a_loss
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def well() -> Iterator[None]:
    joined()
    yield
    joined()


def test_what_comes_back_is_handed_on() -> None:
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7
    with pytest.raises(KeyError, match="absent"):
        bounded(lambda: {}["absent"], PATIENCE_S, "look")


def test_what_does_not_come_back_is_named() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"waited 0\.01 s for Ray to list its nodes"):
        bounded(never.wait, 0.01, "list its nodes")
    never.set()


def test_a_lost_ray_ends_what_waits_for_it_and_is_asked_no_more() -> None:
    never = threading.Event()

    def hangs() -> bool:
        lose("its raylet is gone")
        return never.wait()

    with pytest.raises(RayLost, match="its raylet is gone"):
        bounded(hangs, PATIENCE_S, "take an object into its store")
    never.set()
    lose("so is the rest")
    assert lost() == "its raylet is gone", "the first is the cause"
    kill("an actor")  # gone with it
    with pytest.raises(RayLost):
        bounded(lambda: lose("called"), PATIENCE_S, "anything")
    assert lost() == "its raylet is gone"
    with pytest.raises(RayLost):
        awaited(Future())


def test_an_actor_that_cannot_be_ended_hides_no_error_and_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a GCS that hangs. The others are not asked to end, but nobody waits for them either."""
    never, asked = threading.Event(), list[str]()

    def hangs(actor: str) -> None:
        asked.append(actor)
        never.wait()

    monkeypatch.setattr("ray.kill", hangs)
    monkeypatch.setattr(ray_calls, "CALL_S", 0.01)
    for actor in ("rank 0", "rank 1"):
        kill(actor)
    never.set()
    assert asked == ["rank 0"] and "waited 0.01 s for Ray to end an actor" in lost()


def test_a_process_that_was_stopped_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now, there = [0.0], threading.Event()

    def wait(some: Any, seconds: float) -> Any:
        if now[0]:
            there.set()
            return futures.wait(some, PATIENCE_S)
        now[0] += 1000.0  # in a look of 0.2 s
        return None

    monkeypatch.setattr(ray_calls, "futures", SimpleNamespace(wait=wait))
    monkeypatch.setattr(ray_calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert bounded(there.wait, 60.0, "do something")


def test_what_says_that_a_process_is_gone() -> None:
    away = [ActorDiedError(), ObjectLostError("ref", "address", "put"), ray_calls.Unanswered()]
    assert all(map(of_a_loss, away))
    for there in (*away, RuntimeError("it is well")):
        raised = RayTaskError("step", "traceback", there).as_instanceof_cause()
        assert of_a_loss(raised) == (there in away), there
