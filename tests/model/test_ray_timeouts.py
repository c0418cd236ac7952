"""No call of Ray's is waited for without an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayTaskError,
)

from keel.model import ray_timeouts as ray_calls
from keel.model.ray_timeouts import (
    BEYOND_S,
    Patience,
    RayLost,
    awaited,
    bounded,
    get,
    joined,
    kill,
    lose,
    lost,
    name_of,
    of_a_loss,
    of_death,
    shut_down,
    start,
    wait,
)
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


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether Ray is."""
    there = [True]
    monkeypatch.setattr("ray.is_initialized", lambda: there[0])
    return there


def test_who_comes_after_the_end_of_ray_starts_no_other_one(there: list[bool]) -> None:
    """Ray itself would: `ray.get` and all the others begin with a cluster where there is none."""
    calls: list[str] = []

    def shuts_down() -> None:
        with pytest.raises(RayLost, match="has left its cluster"):
            bounded(lambda: calls.append("meanwhile"), PATIENCE_S, "list its nodes")
        there[0] = False

    shut_down(shuts_down, PATIENCE_S, "end")
    with pytest.raises(RayLost, match="has left its cluster"):
        bounded(lambda: calls.append("later"), PATIENCE_S, "list its nodes")
    with pytest.raises(RayLost, match="has left its cluster"):
        awaited(Future())
    assert not calls and not lost()
    there[0] = True  # by somebody else
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7
    there[0] = False
    joined()
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7
    shut_down(lambda: None, PATIENCE_S, "end")
    assert bounded(lambda: 7, PATIENCE_S, "count") == 7, "there was none to leave"


def test_a_call_under_way_ends_with_ray(there: list[bool]) -> None:
    never, left = threading.Event(), threading.Event()

    def shuts_down() -> None:
        there[0] = False

    def hangs() -> bool:
        shut_down(shuts_down, PATIENCE_S, "end")
        left.set()
        return never.wait(PATIENCE_S)

    with pytest.raises(RayLost, match="has left its cluster"):
        bounded(hangs, PATIENCE_S, "say which calls are done")
    assert left.wait(PATIENCE_S)
    never.set()


def test_a_lost_ray_ends_what_waits_for_it_and_is_asked_no_more() -> None:
    never = threading.Event()

    def hangs() -> bool:
        lose("its raylet is gone")
        return never.wait(PATIENCE_S)

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


def test_who_was_stopped_has_not_waited() -> None:
    now = 0.0
    patience = Patience(10.0, 1.0, lambda: now)
    assert patience.left() == 10.0
    now += 3600.0
    assert patience.left() == 8.0, "as for two turns"
    for _ in range(7):
        now += 1.0
        assert patience.left() > 0
    now += 1.5
    assert patience.left() == 0.0


class World:
    """In which a call is done after some turns, of `turn_s` seconds each."""

    def __init__(self, patch: pytest.MonkeyPatch, turns: int, turn_s: float) -> None:
        self.now, self._turns, self._turn_s = 0.0, turns, turn_s
        self.asked, self.limits = list[float](), list[float]()
        patch.setattr(ray_calls.ray, "wait", self.wait)
        patch.setattr(ray_calls.ray, "get", lambda ref, timeout: "its result")
        patch.setattr(ray_calls, "bounded", self._bounded)

    def _bounded(self, call: Callable[[], Any], seconds: float, what: str) -> Any:
        self.limits.append(seconds)
        return call()

    def patience(self, seconds: float) -> Patience:
        return Patience(seconds, clock=lambda: self.now)

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.asked.append(timeout)
        self.now += min(self._turn_s, timeout) if self._turn_s < 60 else self._turn_s
        return (refs, []) if len(self.asked) > self._turns else ([], refs)


def test_a_wait_is_made_in_turns_and_a_long_one_counts_as_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    well = World(monkeypatch, turns=100, turn_s=1.0)
    assert wait(["a"], seconds=well.patience(2.5)) == ([], ["a"])
    assert well.asked == [1.0, 1.0, 0.5]
    assert well.limits == [left + BEYOND_S for left in (2.5, 1.5, 0.5)], "if Ray's own stand still"
    stopped = World(monkeypatch, turns=4, turn_s=3600.0)
    assert wait(["a"], seconds=stopped.patience(10.0)) == (["a"], [])
    assert get("a", seconds=1.0) == "its result"


def test_what_is_not_there_in_time_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, turns=10**6, turn_s=1.0)
    with pytest.raises(GetTimeoutError, match=r"within 0\.01 s"):
        get("a", seconds=0.01)


def test_each_start_knows_its_own_actors() -> None:
    first = start()
    mark = f"{first}/trainer rank 0"
    assert name_of(mark, first) == "trainer rank 0"
    joined()
    assert start() != first and name_of(mark, start()) == "" == name_of("", start())


def test_an_actor_that_cannot_be_ended_hides_no_error_and_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a GCS that hangs. The others are not asked to end, but nobody waits for them either."""
    never, asked = threading.Event(), list[str]()

    def hangs(actor: str) -> None:
        asked.append(actor)
        never.wait(PATIENCE_S)

    monkeypatch.setattr("ray.kill", hangs)
    monkeypatch.setattr(ray_calls, "CALL_S", 0.01)
    for actor in ("rank 0", "rank 1"):
        kill(actor)
    never.set()
    assert asked == ["rank 0"] and "waited 0.01 s for Ray to end an actor" in lost()


def test_time_while_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times, resumed = iter([0.0, 0.0]), threading.Event()
    clock = lambda: next(times, 1000.0)  # noqa: E731
    monkeypatch.setattr(ray_calls, "Patience", lambda *of: Patience(*of, clock))
    threading.Timer(3 * ray_calls.LOOK_S, resumed.set).start()
    assert bounded(lambda: resumed.wait(PATIENCE_S), 60.0, "do something")


def test_calls_share_a_thread_that_returned() -> None:
    threads = {bounded(threading.get_ident, PATIENCE_S, "say its thread") for _ in range(50)}
    assert len(threads) <= 2


def test_a_call_that_hangs_blocks_no_other() -> None:
    release = threading.Event()
    with pytest.raises(ray_calls.Unanswered):
        bounded(lambda: release.wait(PATIENCE_S), 0.01, "hang")
    assert bounded(lambda: 7, PATIENCE_S, "answer") == 7
    release.set()


def test_what_says_that_a_process_is_gone() -> None:
    away = [ActorDiedError(), ObjectLostError("ref", "address", "put"), ray_calls.Unanswered()]
    assert all(map(of_a_loss, away))
    for there in (*away, RuntimeError("it is well")):
        raised = RayTaskError("step", "traceback", there).as_instanceof_cause()
        assert of_a_loss(raised) == (there in away), there


class Died(ActorDiedError):
    """As Ray words it."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __str__(self) -> str:
        return self._words


def test_of_a_node_that_is_gone_its_address_is_said_and_not_all_of_rays_ids() -> None:
    said = of_death(
        Died(
            "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainerWorker\n"
            "\tactor_id: 19fb148bbfe210f178e5d07601000000\n\tpid: 4382\n\tip: 10.77.0.2\nThe actor "
            "died because its node has died. Node Id: 5ee846073a025916c1abeacdf7c3fc\n\tthe "
            "actor's node was terminated unexpectedly: health check failed due to no heartbeats"
        )
    )
    assert said == "its node (10.77.0.2) is gone: health check failed due to no heartbeats"
    assert of_death(Died("its worker process has died. Perhaps of: …")) == "", "guesses"
    assert of_death(Died("no memory")) == "no memory"
    reset = (
        "RpcError: RPC error: recvmsg:Connection reset by peer rpc_code: 14. The task may or may"
    )
    broken = of_death(
        ActorUnavailableError(f"temporarily unavailable: {reset} not have been", None)
    )
    assert broken == "the connection to it is lost (recvmsg:Connection reset by peer)"
