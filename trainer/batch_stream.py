"""Keeps the engines busy and hands the loop its batches.

Groups flow through futures: a prompt is submitted as soon as `keel.rl.buffer.GroupBuffer` has
room, its group is scored as soon as it is sampled, and a batch is there as soon as the buffer has
one. With `algorithm.max_lag: 0` the engines then wait for the step and its weights; with more they
go on sampling while the trainer works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from keel.configs.schema import Config
from keel.rl.buffer import Batch, GroupBuffer, Lag
from keel.rl.futures import then
from keel.rl.types import Group, Prompt, ScoredGroup

GRACE_S = 60.0
"""Beyond `Config.group_timeout_s`, whose parts are watched over by what they are deadlines of."""
LOOK_S = 0.2
"""How often who waits looks whether there is still time to."""
T = TypeVar("T")


class Abandoned(Exception):
    """There is no time to wait any longer."""


def never() -> bool:
    return False


def wait_for(future: Future[T], hurry: Callable[[], bool]) -> T:
    """Its result; it has a deadline of its own. Raises `Abandoned` once `hurry()`."""
    while not future.done():
        if hurry():
            raise Abandoned
        wait([future], LOOK_S)
    return future.result()


def decoding_steps(config: Config, completions: int) -> int:
    """Decoding steps of all engines together for so many completions, if each reaches its limit."""
    rollout = config.rollout
    waves = -(-completions // (rollout.max_num_seqs * rollout.engines))
    return min(rollout.engines, completions) * waves * rollout.sampling.max_tokens


class Feed:
    """One run's stream of batches. Callbacks come from the threads of engines and rewards."""

    def __init__(
        self,
        config: Config,
        *,
        next_prompts: Callable[[int], Sequence[Prompt]],
        position: Callable[[Sequence[Prompt]], Mapping[str, Any]],
        sample: Callable[[Prompt], Future[Group]],
        score: Callable[[Group], Future[ScoredGroup]],
        start: int,
    ) -> None:
        """next_prompts: the next n; position: where those stand, if the given prompts are to come
        again; sample, score: with deadlines of their own, and they never block; start: the last
        step done. Nothing is sampled before `open`."""
        algorithm = config.algorithm
        self._next_prompts, self._position = next_prompts, position
        self._sample, self._score = sample, score
        self._buffer = GroupBuffer(
            batch=algorithm.prompts_per_step,
            lag=Lag(
                batches=algorithm.max_lag,
                publish_every=algorithm.publish_every,
                updates=algorithm.updates_per_batch,
            ),
            start=start,
            steps=config.run.steps,
            filter_by=algorithm.filter_groups,
            max_refills=algorithm.max_refills,
        )
        self._timeout_s = config.group_timeout_s + GRACE_S
        self._changed = threading.Condition(threading.RLock())
        self._flights: dict[int, Future[ScoredGroup]] = {}
        self._sampling: set[int] = set()
        self._failure: BaseException | None = None
        self._update: Future[None] | None = None
        self._open = False

    def open(self) -> None:
        """Start sampling."""
        self._open = True
        self._fill()

    def close(self) -> None:
        """Give up what is being sampled."""
        with self._changed:
            self._open = False
            flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()

    def take(self, waiting: Callable[[str], Any], hurry: Callable[[], bool] = never) -> Batch:
        """The next batch.

        `waiting(what)` is a context in which it waits: for one of the batch's groups to be sampled
        (`rollout`) or, all of them being there, to be scored (`reward`). Raises what sampling or
        scoring raised, TimeoutError if nothing at all arrives for longer than all their deadlines
        together, and `Abandoned` once `hurry()`.
        """
        with self._changed:
            while hurry() or not self._buffer.ready():
                if hurry():
                    raise Abandoned
                if self._failure is not None:
                    raise self._failure
                awaited = self._buffer.awaited()
                sampled = bool(awaited) and self._sampling.isdisjoint(awaited)
                with waiting("reward" if sampled else "rollout"):
                    if not self._changes(hurry):
                        raise TimeoutError(
                            f"waited {self._timeout_s:.0f} s for a group (rollout.timeout_s, "
                            "twice in case that an engine is replaced, with run.startup_timeout_s "
                            "and rollout.update_timeout_s for the new one, those of "
                            f"environments and of rewards): {len(self._flights)} are in flight, "
                            f"{len(self._sampling)} of them being sampled"
                        )
            return self._buffer.take()

    def _changes(self, hurry: Callable[[], bool]) -> bool:
        """Wait until something arrives, or there is no time any more; False: nothing has."""
        end = time.monotonic() + self._timeout_s
        while not (changed := self._changed.wait(min(LOOK_S, self._timeout_s))):
            if hurry() or time.monotonic() >= end:
                break
        return changed or hurry()

    def adopting(self, step: int, update: Future[None]) -> None:
        """The engines are taking the weights of after `step`; once they have, there is room."""

        def adopted(done: Future[None]) -> None:
            with self._changed:
                if (error := done.exception()) is not None:
                    self._failure = self._failure or error
                else:
                    self._buffer.adopted(step)
                self._changed.notify_all()
            self._fill()

        self._update = update
        update.add_done_callback(adopted)

    def wait_for_adoption(self, hurry: Callable[[], bool] = never) -> None:
        """Return once the engines have the last weights; raises what loading them raised, and
        `Abandoned` once `hurry()`. The engines' deadlines bound it: one that is late is replaced,
        and not for ever."""
        if self._update is not None:
            wait_for(self._update, hurry)

    def position(self, again: Sequence[Prompt] = ()) -> Mapping[str, Any]:
        """From where prompts come again after what has been trained on. again: of a batch that was
        taken, and is not trained on."""
        with self._changed:  # so that no prompt is taken meanwhile, and then in neither part
            return self._position([*again, *self._buffer.unfinished()])

    def standing(self) -> tuple[Mapping[str, Any], Sequence[Prompt]]:
        """`position`, and whose groups are to be discarded and in no batch yet."""
        with self._changed:
            return self._position(self._buffer.unfinished()), self._buffer.discarding()

    def _fill(self) -> None:
        with self._changed:
            room = self._buffer.room() if self._open and self._failure is None else 0
            prompts = [(self._buffer.submitted(p), p) for p in self._next_prompts(room)]
            self._sampling.update(number for number, _ in prompts)
        for number, prompt in prompts:
            sampled = self._sample(prompt)
            sampled.add_done_callback(lambda _, number=number: self._sampled(number))
            flight = then(sampled, self._score)
            with self._changed:
                self._flights[number] = flight
            flight.add_done_callback(lambda done, number=number: self._arrived(number, done))

    def _sampled(self, number: int) -> None:
        with self._changed:
            self._sampling.discard(number)
            self._changed.notify_all()

    def _arrived(self, number: int, flight: Future[ScoredGroup]) -> None:
        with self._changed:
            del self._flights[number]
            if flight.cancelled():
                return
            error = flight.exception()
            if error is not None:
                self._failure = self._failure or error
            else:
                self._buffer.arrived(number, flight.result())
            self._changed.notify_all()
        if error is None:
            self._fill()
