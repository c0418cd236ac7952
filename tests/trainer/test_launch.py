"""Start order of engines and ranks, and failed starts."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from keel.rl.futures import failed
from keel.rollout.spec import EngineError
from keel.trainer import launch as system
from keel.trainer.run.restarts import WorkerLost


def test_failed_start_is_a_worker_loss() -> None:
    watch: Any = SimpleNamespace(should_stop_waiting=lambda: False)
    for error in (EngineError("its node has died"), TimeoutError("waited 600 s for engine 0")):
        with pytest.raises(WorkerLost, match=str(error)):
            system._await_engines(failed(error), watch)


def test_endpoint_conversations_end_with_their_last_group() -> None:
    groups: list[Future[Any]] = [Future(), Future(), Future()]
    remaining, forgotten = iter(groups), []

    class Agents:
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            return next(remaining)

    class Turns:
        def forget(self, prompt: Any) -> None:
            forgotten.append(prompt.prompt_id)

    parts: dict[str, Any] = {"agents": Agents(), "turns": Turns()}
    unused: Any = None
    remote = system.RemoteRuntime(config=unused, completions=unused, scorer=unused, **parts)
    one, other = (SimpleNamespace(prompt_id=name, environment="shop") for name in ("a", "b"))
    for group in (one, one, other):
        remote.submit(cast(Any, group), "eval", 8)
    groups[0].set_result(None)
    assert not forgotten, "the second group has turns to come"
    groups[2].set_result(None)
    groups[1].set_result(None)
    assert forgotten == ["b", "a"]
