"""Tests how the pool sees errors of an engine's actor. Ray is not started."""

from __future__ import annotations

from concurrent.futures import Future
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

from keel.rollout.pool.ray_engines import RayEngine, as_future, with_engine_errors
from keel.rollout.spec import EngineError
from tests.rollout.pool.fake_engines import failed


class Ref:
    """Reference to an actor call that has failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def future(self) -> Future[Any]:
        return failed(self.error)


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("update", "traceback", error)


def outcomes(error: Exception) -> list[BaseException | None]:
    """Return the errors that an actor call and a weight transfer raise."""
    cause: Any = error.cause if isinstance(error, RayTaskError) else error
    futures = [as_future(cast(Any, Ref(error))), with_engine_errors(failed(cause))]
    return [future.exception(timeout=300) for future in futures]


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
def test_dead_and_late_engines_raise_engine_errors(error: Exception, reason: str) -> None:
    for outcome in outcomes(error):
        assert isinstance(outcome, EngineError) and reason in str(outcome)


def test_a_killed_engine_is_reported_without_guesses() -> None:
    class Died(ActorDiedError):
        def __str__(self) -> str:
            return (
                "The actor died unexpectedly before finishing this task.\n\tpid: 3762\nThe actor "
                "is dead because its worker process has died. Some common causes …"
            )

    for outcome in outcomes(Died()):
        assert "3762" in str(outcome) and "common causes" not in str(outcome)


def test_a_lost_result_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ObjectLostError("ref", "address", "generate")
    assert as_future(cast(Any, Ref(lost))).exception(timeout=300) is lost  # perhaps a bucket
    engine = object.__new__(RayEngine)
    engine.actor = Ref(lost)
    for name in ("generate", "turn"):
        setattr(engine.actor, name, None)
    monkeypatch.setattr("keel.model.ray_timeouts.call", lambda *_: Ref(lost))
    nothing: Any = None
    for future in (
        engine.generate(nothing, group_size=1, sampling=nothing, record=True, draw=0),
        engine.turn(nothing, sampling=nothing, record=True),
    ):
        assert isinstance(future.exception(timeout=300), EngineError)


def test_other_errors_are_passed_on() -> None:
    for outcome in outcomes(raised(ValueError("no tensor 'x'"))):
        assert isinstance(outcome, ValueError)
