"""Detects engines that have work to do but no longer finish any steps.

A process still answers when its GPU hangs, so the pool polls the number of finished steps. Only the
time in which an engine can sample counts. Weight updates, sleep and idle time are excluded. The
first step is excluded as well, because it may compile kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from keel.rollout.pool.engine_supervisor import EngineSlot, RolloutEngine
from keel.rollout.spec import EngineError, EngineProgress

PROGRESS_POLL_S = 2.0
WARN_S, STUCK_S = 20.0, 60.0
"""Seconds without a finished step before the pool logs a warning, and before it replaces the
engine."""
_WARN_STEPS, _STUCK_STEPS = 4.0, 10.0
"""Lower bounds for these two times, as multiples of the longest step so far."""


@dataclass(slots=True)
class _Watch:
    engine: RolloutEngine
    poll: Future[EngineProgress] | None = None
    last: EngineProgress = field(default_factory=EngineProgress)
    stalled_s: float = 0.0
    warned: bool = False

    def update(self, elapsed_s: float) -> None:
        self.stalled_s += elapsed_s
        if self.poll is not None and self.poll.done():
            # The dispatcher replaces an engine that died.
            if self.poll.cancelled() or self.poll.exception() is not None:
                self.poll = None
                return
            now, self.poll = self.poll.result(), None
            if now.steps != self.last.steps or not now.requests:
                self.stalled_s, self.warned = 0.0, False
            self.last = now
        if self.poll is None:
            self.poll = self.engine.progress()

    def exceeds(self, seconds: float, steps: float) -> bool:
        limit_s = max(seconds, steps * self.last.longest_s)
        return self.last.steps > 0 and self.stalled_s >= limit_s


class StallDetector:
    """Monitors the engines of a pool and reports engines that hang."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watches: dict[int, _Watch] = {}
        self._last = clock()

    @property
    def steps(self) -> int:
        """Number of decoding steps that the current engines had finished at the last poll."""
        return sum(watch.last.steps for watch in tuple(self._watches.values()))

    @property
    def next_poll(self) -> float:
        return self._last + PROGRESS_POLL_S

    def poll(
        self, slots: Sequence[EngineSlot], warn: Callable[[str], object]
    ) -> list[tuple[EngineSlot, EngineError]]:
        """Poll all engines and return the slots of those that hang. Calls `warn` for engines that
        may be hanging."""
        now = self._clock()
        if now < self._last + PROGRESS_POLL_S:
            return []
        # Time in which the driver itself was stopped does not count.
        elapsed_s, self._last = min(now - self._last, 2 * PROGRESS_POLL_S), now
        stuck: list[tuple[EngineSlot, EngineError]] = []
        for slot in slots:
            watch = self._watches.get(slot.index)
            if watch is None or watch.engine is not slot.engine:
                watch = self._watches[slot.index] = _Watch(slot.engine)
            if slot.stage != "ready" or not slot.sequences:
                watch.stalled_s, watch.warned = 0.0, False
                continue
            watch.update(elapsed_s)
            message = (
                f"has finished no step for {watch.stalled_s:.0f} s with {slot.sequences} "
                f"completions to sample; its longest step took {watch.last.longest_s:.2g} s"
            )
            if watch.exceeds(STUCK_S, _STUCK_STEPS):
                stuck.append((slot, EngineError(f"hangs: it {message}")))
            elif watch.exceeds(WARN_S, _WARN_STEPS) and not watch.warned:
                watch.warned = True
                limit_s = max(STUCK_S, _STUCK_STEPS * watch.last.longest_s)
                warn(f"rollout engine {slot.index} {message}. It is restarted at {limit_s:.0f} s")
        return stuck
