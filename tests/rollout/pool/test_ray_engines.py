"""What a failed call of an engine's actor means for the pool. Starts no Ray."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
    WorkerCrashedError,
)

from keel.rollout.pool.ray_engines import RayEngine, _as_engine_errors, as_future
from keel.rollout.spec import EngineError


class Ref:
    """A call that has failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(self.error)
        return future


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("update", "traceback", error)


def outcomes(error: Exception) -> list[BaseException | None]:
    """Of a call of the pool, and of weights that a trainer's rank has sent."""
    ref: Any = Ref(error)
    cause: Exception = error.cause if isinstance(error, RayTaskError) else error  # type: ignore[assignment]
    sent = _as_engine_errors(Ref(cause).future())
    return [as_future(ref).exception(timeout=300), sent.exception(timeout=300)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ActorDiedError(), "died"),
        (OutOfMemoryError("a worker was killed: the node runs low on memory"), "low on memory"),
        (NodeDiedError("node 7 died"), "node 7 died"),
        (WorkerCrashedError(), "died unexpectedly"),
        (raised(TimeoutError("waited 60 s for running answers")), "waited 60 s"),
    ],
)
def test_an_engine_that_died_or_is_late_can_be_replaced(error: Exception, reason: str) -> None:
    for outcome in outcomes(error):
        assert isinstance(outcome, EngineError) and reason in str(outcome)


def test_a_killed_engine_is_one_line_without_rays_guesses() -> None:
    said = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: RolloutWorker\n"
        "\tactor_id: a507e630\n\tpid: 3762\n\tip: 127.0.0.1\nThe actor is dead because its worker "
        "process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Some common causes …"
    )

    class Died(ActorDiedError):
        def __str__(self) -> str:
            return said

    for outcome in outcomes(Died()):
        assert str(outcome).startswith("its process 3762 has died: it was killed, by the kernel")
        assert "common causes" not in str(outcome)


def test_a_result_that_went_with_its_node_is_sampled_again() -> None:
    lost = ObjectLostError("ref", "address", "generate")
    assert as_future(cast(Any, Ref(lost))).exception(timeout=300) is lost  # of a bucket, perhaps
    actor = SimpleNamespace(generate=None, turn=None)
    engine = object.__new__(RayEngine)
    engine.actor = actor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keel.model.ray_timeouts.call", lambda *_: Ref(lost))
        asked: Any = None
        futures = [
            engine.generate(asked, group_size=1, sampling=asked, record=True, draw=0),
            engine.turn(asked, sampling=asked, record=True),
        ]
    for future in futures:
        assert isinstance(future.exception(timeout=300), EngineError)


def test_what_the_pool_cannot_repair_is_passed_on() -> None:
    for outcome in outcomes(raised(ValueError("no tensor 'x'"))):
        assert isinstance(outcome, ValueError)
