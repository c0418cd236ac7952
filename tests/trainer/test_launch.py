"""Start order of engines and ranks, and failed starts."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from keel.rollout.spec import EngineError
from keel.trainer import launch as system
from keel.trainer.run.progress import Wait
from keel.trainer.run.restarts import Restarts, WorkerLost
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    "error",
    [
        EngineError("rollout engine 0 did not start: its node has died"),
        TimeoutError("waited 600 s for rollout engine 0 to start"),
    ],
)
def test_failed_start_is_a_worker_loss(
    error: Exception,
) -> None:
    class Well:
        def should_stop_waiting(self) -> bool:
            return False

    engines: Future[tuple[str, ...]] = Future()
    engines.set_exception(error)
    watch: Any = Well()
    with pytest.raises(WorkerLost, match=str(error)) as raised:
        system._await_engines(engines, watch)
    restarts = Restarts(3)
    with pytest.raises(WorkerLost):
        restarts.count(raised.value)
    restarts.started = True
    restarts.count(raised.value)


class Starting:
    """A pool, ranks and a watchdog that record events in order."""

    def __init__(self, *, waits_for: str) -> None:
        """Engines become ready only after these ranks."""
        self.done: list[str] = []
        self._waits_for, self._seen = waits_for, threading.Event()

    def _did(self, what: str) -> None:
        self.done.append(what)
        if what == self._waits_for:
            self._seen.set()

    def start(self) -> tuple[str, ...]:
        assert self._seen.wait(PATIENCE_S) if self._waits_for else True
        self._did("engines are up")
        return ("engines warn",)

    def should_stop_waiting(self) -> bool:
        return False

    @property
    def ranks(self) -> Any:
        owner = self

        class Ranks:
            def prepared(self) -> None:
                owner._did("ranks have their libraries")

            def start(self) -> list[str]:
                owner._did("ranks are up")
                return ["ranks warn"]

            def warm_up(self, *, whole: bool = False) -> None:
                owner._did("ranks warm up for whole micro-batches" if whole else "ranks warm up")

        return Ranks()


def started(starting: Starting, **how: bool) -> list[str]:
    parts: Any = starting
    with ThreadPoolExecutor(2) as both:
        return system._start_together(parts, starting.ranks, both, parts, Wait("starting"), **how)


def test_ranks_compile_while_engines_start() -> None:
    starting = Starting(waits_for="ranks warm up")
    warnings = started(starting, engines_first=False, warm=True)
    assert warnings == ["engines warn", "ranks warn"]
    assert starting.done[-4:] == [
        "ranks are up",
        "ranks warm up",
        "engines are up",  # so ranks get the remaining GPU memory
        "ranks warm up for whole micro-batches",
    ]


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
