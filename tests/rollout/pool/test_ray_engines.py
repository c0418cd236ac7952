"""Tests which errors the pool receives from an engine's actor. Ray is not started."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, RayTaskError

from keel.rollout.pool.ray_engines import RayEngine, as_future, with_engine_errors
from keel.rollout.spec import EngineError
from tests.rollout.pool.fake_engines import failed


class Ref:
    """Reference to an actor call that failed."""

    sample = None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def future(self) -> Future[Any]:
        return failed(self.error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ActorDiedError(), EngineError),
        (NodeDiedError("node 7 died"), EngineError),
        (RayTaskError("update", "", TimeoutError("waited 60 s")), EngineError),
        (RayTaskError("update", "", ValueError("no tensor 'x'")), ValueError),
    ],
)
def test_dead_and_late_engines_raise_engine_errors(error: Exception, kind: type[Exception]) -> None:
    cause: Any = error.cause if isinstance(error, RayTaskError) else error
    for future in (as_future(cast(Any, Ref(error))), with_engine_errors(failed(cause))):
        assert isinstance(future.exception(timeout=300), kind)


def test_a_lost_result_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ObjectLostError("ref", "address", "generate")
    assert as_future(cast(Any, Ref(lost))).exception(timeout=300) is lost  # perhaps a bucket
    engine = object.__new__(RayEngine)
    engine.actor = Ref(lost)
    monkeypatch.setattr("keel.model.ray_timeouts.call", lambda *_: Ref(lost))
    nothing: Any = None
    future = engine.sample(nothing, sampling=nothing, record=True)
    assert isinstance(future.exception(timeout=300), EngineError)
