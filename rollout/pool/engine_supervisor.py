"""The engines of a pool through their lives: started, brought to weights, put to sleep, replaced.

Belongs to the pool's thread, and never waits: each slot says what it waits for, until when, and the
pool tells the fleet when that is over.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

from keel.configs.schema import RolloutConfig
from keel.rollout.pool.requests import RolloutEngine, Slot, Stage, Update
from keel.rollout.spec import EngineError

MAX_RESTARTS = 3
"""Times that an engine is started again within `window_s` before the run is given up."""
RECENT_S = 3 * 3600.0
"""A run of weeks outlives failures that are this far apart, however many."""
DISTURBED, TRIES = "Error in memory profiling", 3
"""What vLLM says where another process gave memory of the GPU back while an engine measured what it
needs, as one that was ended a moment ago does: nothing is wrong, and it is tried so often."""
LOOK_S = 0.2
"""How often a start looks whether it is still wanted."""
TASKS = {"starting": "start", "loading": "take new weights", "going to sleep": "fall asleep"}

_NUMBER = re.compile(r"\b(?:[0-9a-f]{8,}|\d+)\b")
"""Process and actor ids, which differ from one start to the next."""

Translate = Callable[[Future[int]], Future[int]]
"""Replaces errors of a delivery that say an engine died or is late by `EngineError`."""


def window_s(config: RolloutConfig, startup_s: float) -> float:
    """`RECENT_S`, and longer where that many engines cannot even start and fall silent in it."""
    return max(RECENT_S, (MAX_RESTARTS + 2) * (config.silent_s + startup_s))


class Unwanted(RuntimeError):
    """Who wanted engines has ended them, and waits for none."""


class Fleet:
    """What all engines are to be: on the weights of `wanted`, or asleep once `resting` is set."""

    def __init__(
        self,
        config: RolloutConfig,
        build: Callable[[int], RolloutEngine],
        translate: Translate,
        *,
        startup_s: float,
        update_s: float,
    ) -> None:
        """`build(i)` begins to start engine i, which has `startup_s` for it, and `update_s` to take
        weights or to fall asleep."""
        self.slots: list[Slot] = []
        self.update_s = update_s
        self.wanted: Update | None = None
        self.resting: Future[None] | None = None
        self._config, self._build, self._translate = config, build, translate
        self._startup_s = startup_s
        self.start_seconds: dict[str, float] = {}
        """Seconds of each phase of the start, of the slowest engine."""
        self._over = False
        """Set by another thread than that of the start, which is not to outlive it."""

    @property
    def restarts(self) -> int:
        """How often an engine had to be started again so far."""
        return sum(len(slot.restarts) for slot in self.slots)

    @property
    def pending(self) -> Mapping[Future[Any], Slot]:
        """What slots wait for."""
        return {slot.pending: slot for slot in self.slots if slot.pending is not None}

    @property
    def _started(self) -> Stage:
        """What an engine that has started is: with `rollout.time_share` it waits for weights."""
        return "asleep" if self._config.time_share else "ready"

    def start(self) -> tuple[str, ...]:
        """Start all engines, wait for them, and return their warnings without duplicates.

        Raises `EngineError` or `TimeoutError` if an engine does not start."""
        for index in range(self._config.engines):
            engine = self._build(index)
            deadline = time.monotonic() + self._startup_s
            self.slots.append(Slot(index, engine, "starting", engine.ready(), deadline))
            self._check_wanted(engine)  # `kill` may not have seen it
        warnings: list[str] = []
        for slot in self.slots:
            warnings += self._first_start(slot)
            slot.stage, slot.pending = self._started, None
        return tuple(dict.fromkeys(warnings))

    def _first_start(self, slot: Slot, tries: int = TRIES) -> list[str]:
        """Wait for an engine's first start; its warnings."""
        assert slot.pending is not None
        try:
            while not slot.pending.done() and (left := slot.deadline - time.monotonic()) > 0:
                self._check_wanted(slot.engine)
                wait([slot.pending], min(left, LOOK_S))
            started = slot.pending.result(timeout=0)
            for phase, seconds in started.seconds.items():
                self.start_seconds[phase] = max(seconds, self.start_seconds.get(phase, 0.0))
            return list(started.warnings)
        except TimeoutError:
            raise TimeoutError(
                f"rollout engine {slot.index} was not ready within {self._startup_s:g} s "
                "(run.startup_timeout_s)"
            ) from None
        except EngineError as error:
            if tries == 1 or DISTURBED not in str(error):
                raise EngineError(f"rollout engine {slot.index} did not start: {error}") from error
        slot.engine.kill()
        slot.engine = self._build(slot.index)
        slot.pending = slot.engine.ready()
        said = (
            f"rollout engine {slot.index} was started again: another process gave GPU memory back"
        )
        return [said, *self._first_start(slot, tries - 1)]

    def follow(self, wanted: Update | None, resting: Future[None] | None) -> None:
        """Have all engines load new weights, or fall asleep. Those that are between stages
        follow when they have got there."""
        self.resting = resting
        if wanted is not None and wanted is not self.wanted:
            self.wanted = wanted
            self._load([slot for slot in self.slots if slot.stage in ("ready", "asleep")])
        if resting is not None:
            self._put_to_sleep([slot for slot in self.slots if slot.stage == "ready"])

    def kill(self) -> None:
        """End all engines, those too that another thread has `start` wait for."""
        self._over = True
        for slot in self.slots:
            slot.engine.kill()
        self.slots.clear()

    def _check_wanted(self, engine: RolloutEngine) -> None:
        """Raises `Unwanted`, and ends the engine, where it is started for nobody any more."""
        if self._over:
            engine.kill()
            raise Unwanted("the engines were ended while they started")

    def advance(self, slot: Slot) -> EngineError | None:
        """What a slot waited for is over, or late: go on to the next stage. An error is a reason to
        `replace` the engine."""
        assert slot.pending is not None
        if not slot.pending.done():
            return EngineError(f"did not {TASKS[slot.stage]} in time")
        error = slot.pending.exception()
        if isinstance(error, EngineError):
            return error
        if error is not None:
            raise error
        if slot.stage == "loading":
            if slot.pending.result() < slot.version:
                raise RuntimeError(
                    f"rollout engine {slot.index}: reports weights {slot.pending.result()} after "
                    f"an update to {slot.version}"
                )
            slot.version = slot.pending.result()
        stages: dict[Stage, Stage] = {"starting": self._started, "going to sleep": "asleep"}
        slot.stage, slot.pending = stages.get(slot.stage, "ready"), None
        slot.start_failure = ""
        if self.resting is not None:
            if slot.stage == "ready":
                self._put_to_sleep([slot])
        elif self.wanted is not None:
            if slot.stage == "asleep" or self.wanted.version > slot.version:
                self._load([slot])
            self._adopted()
        if self.resting is not None and all(slot.stage == "asleep" for slot in self.slots):
            settle(self.resting)
        return None

    def replace(self, slot: Slot, error: EngineError) -> None:
        """Start another engine in this slot, or give up by raising `EngineError`: if that has been
        done too often, or if the last start failed in the same way."""
        slot.engine.kill()
        if slot.stage == "starting":
            failure = _NUMBER.sub("#", str(error))
            if failure == slot.start_failure and DISTURBED not in failure:
                raise EngineError(
                    f"rollout engine {slot.index} failed to start twice in the same way: {error}"
                ) from error
            slot.start_failure = failure
        now = time.monotonic()
        window = window_s(self._config, self._startup_s)
        if sum(now - restart < window for restart in slot.restarts) >= MAX_RESTARTS:
            raise EngineError(
                f"rollout engine {slot.index} failed {MAX_RESTARTS + 1} times within "
                f"{window / 3600:.3g} hours, the last time with: {error}"
            ) from error
        slot.restarts.append(now)
        slot.engine = self._build(slot.index)
        slot.stage, slot.pending, slot.version = "starting", slot.engine.ready(), 0
        slot.deadline = now + self._startup_s
        self._adopted()

    def _adopted(self) -> None:
        """Say so once the engines have the last weights. One that is started again takes them when
        it has got there, and the others go on meanwhile; but with `rollout.time_share` the trainer
        needs the memory that it starts in."""
        starting = (
            [] if self._config.time_share else [s for s in self.slots if s.stage == "starting"]
        )
        rest = [slot for slot in self.slots if slot not in starting]
        if self.wanted is not None and rest and all(slot.stage == "ready" for slot in rest):
            settle(self.wanted.done)

    def _put_to_sleep(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.stage, slot.pending = "going to sleep", slot.engine.sleep()
            slot.deadline = time.monotonic() + self.update_s

    def _load(self, slots: Sequence[Slot]) -> None:
        assert self.wanted is not None
        if not slots:
            return
        version = self.wanted.version
        delivered = self.wanted.transfer.to([slot.engine for slot in slots])
        for slot, future in zip(slots, delivered, strict=True):
            slot.stage, slot.version = "loading", version
            slot.pending = self._translate(future)
            slot.deadline = time.monotonic() + self.update_s


def settle(future: Future[None]) -> None:
    with suppress(InvalidStateError):  # done already
        future.set_result(None)
