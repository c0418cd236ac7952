"""Whether engines that have something to sample get on with it. Belongs to the pool's thread, and
never waits.

A process whose GPU hangs lives, and answers: what it does not do is finish a step. It is asked how
many it has finished, and time counts only while it can sample and has completions to sample; so
weight updates, sleep and waiting do not count, and its first step, which may compile, has no limit
here (`rollout.timeout_s` has one for all that an engine does).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from keel.rollout.pool.requests import RolloutEngine, Slot
from keel.rollout.spec import EngineError, Progress

LOOK_S = 2.0
"""Seconds between two polls of an engine."""
SAID_S, STUCK_S = 20.0, 60.0
"""An engine that has finished no step for so long is spoken of; and is taken for dead."""
SAID_STEPS, STUCK_STEPS = 4.0, 10.0
"""And not before so many times what its longest step so far took."""


@dataclass(slots=True)
class _Pulse:
    engine: RolloutEngine
    asked: Future[Progress] | None = None
    last: Progress = field(default_factory=Progress)
    still_s: float = 0.0
    """For which it has been able to sample and has finished no step."""
    said: bool = False

    def look(self, passed: float) -> None:
        """passed: seconds since the look before."""
        self.still_s += passed
        if self.asked is not None and self.asked.done():
            # One that has died is found by whoever waits for its work.
            if self.asked.cancelled() or self.asked.exception() is not None:
                self.asked = None
                return
            now, self.asked = self.asked.result(), None
            if now.steps != self.last.steps or not now.orders:
                self.still_s, self.said = 0.0, False
            self.last = now
        if self.asked is None:
            self.asked = self.engine.progress()

    @property
    def late(self) -> bool:
        """Whether to speak of it."""
        return self._longer(SAID_S, SAID_STEPS)

    @property
    def stuck(self) -> bool:
        return self._longer(STUCK_S, STUCK_STEPS)

    @property
    def most_s(self) -> float:
        return max(STUCK_S, STUCK_STEPS * self.last.longest_s)

    def _longer(self, seconds: float, steps: float) -> bool:
        return self.last.steps > 0 and self.still_s >= max(seconds, steps * self.last.longest_s)


class Pulses:
    """Of all engines of a pool."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pulses: dict[int, _Pulse] = {}
        self._last = clock()

    @property
    def steps(self) -> int:
        """Decoding steps that the present engines have finished, as of the last poll."""
        return sum(pulse.last.steps for pulse in tuple(self._pulses.values()))

    @property
    def due(self) -> float:
        """When to look again."""
        return self._last + LOOK_S

    def look(
        self, slots: Sequence[Slot], say: Callable[[str], object]
    ) -> list[tuple[Slot, EngineError]]:
        """Engines that hang, and what to say of each; say: told of those that may."""
        now = self._clock()
        if now < self._last + LOOK_S:
            return []
        # A driver that was stopped has not looked meanwhile.
        passed, self._last = min(now - self._last, 2 * LOOK_S), now
        found: list[tuple[Slot, EngineError]] = []
        for slot in slots:
            pulse = self._pulses.get(slot.index)
            if pulse is None or pulse.engine is not slot.engine:
                pulse = self._pulses[slot.index] = _Pulse(slot.engine)
            if slot.stage != "ready" or not slot.sequences:
                pulse.still_s, pulse.said = 0.0, False
                continue
            pulse.look(passed)
            words = (
                f"has finished no step for {pulse.still_s:.0f} s, with {slot.sequences} "
                f"completions to sample; its longest so far took {pulse.last.longest_s:.2g} s"
            )
            if pulse.stuck:
                found.append((slot, EngineError(f"hangs: it {words}")))
            elif pulse.late and not pulse.said:
                pulse.said = True
                say(
                    f"rollout engine {slot.index} {words}. After {pulse.most_s:.0f} s it is "
                    "started again"
                )
        return found
