"""Sample and score completions ahead of the training loop, and collect them into batches.

A prompt is submitted for sampling as soon as `keel.rl.buffer.GroupBuffer` has room for it, and its
group is scored as soon as all of its completions are sampled. A batch is ready once the buffer has
enough groups. With `algorithm.max_lag: 0` and `publish_every: 1`, sampling then pauses until the
engines have received the weights of the next step. Otherwise it continues while the trainer works.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from keel.configs.schema import Config
from keel.rl.buffer import Batch, GroupBuffer, Lag
from keel.rl.futures import failed, then
from keel.rl.types import Group, Prompt, ScoredGroup

GRACE_S = 60.0
"""Extra seconds that `BatchStream.take` waits after `Config.group_timeout_s` before it raises
TimeoutError."""
POLL_S = 0.2  # seconds between two calls of `should_abort` during a wait
T = TypeVar("T")


class Cancelled(Exception):
    """Raised when the run is aborted while waiting."""


class EmptyBatch(RuntimeError):
    """Raised if a batch contains no completions that can be trained on."""

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        reasons = {reason for group in groups for reason in group.group.dropped}
        super().__init__(
            f"none of {len(groups)} groups has a completion to learn from; reasons: "
            f"{'; '.join(sorted(reasons)) or 'none'}"
        )
        self.prompts = [group.group.prompt for group in groups]


def never_abort() -> bool:
    return False


def wait_for(future: Future[T], should_abort: Callable[[], bool]) -> T:
    """Wait for a future and return its result. Raises `Cancelled` if the run is aborted."""
    while not future.done():
        if should_abort():
            raise Cancelled
        wait([future], POLL_S)
    return future.result()


class SamplingProgress:
    """Estimates how much of a batch has been sampled, based on the finished prompts or the engines'
    decoding steps, whichever is further along."""

    def __init__(
        self, config: Config, prompts: int, samples: int, count_steps: Callable[[], int] | None
    ) -> None:
        """`count_steps` returns the number of decoding steps so far. It is ignored if the run has
        environments, because the number of turns in an episode can't be predicted."""
        rollout, completions = config.rollout, prompts * samples
        waves = -(-completions // (rollout.max_num_seqs * rollout.engines))
        self._most = min(rollout.engines, completions) * waves * rollout.sampling.max_tokens
        self._prompts, self._count = prompts, None if config.with_agents else count_steps
        self._before = self._count() if self._count else 0

    def estimate(self, finished: int) -> tuple[int, int, str]:
        steps = min(self._count() - self._before, self._most) if self._count else 0
        if steps * self._prompts > finished * self._most:
            return steps, self._most, "decoding steps"
        return finished, self._prompts, "prompts"


class BatchStream:
    """Samples and scores groups of completions and collects them into training batches. Callbacks
    run on the engines' and reward functions' threads."""

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
        """`next_prompts(n)` returns the next n prompts. `position(prompts)` returns the data
        position from which a resumed run would start with these prompts. `sample` and `score` must
        return immediately and enforce their own timeouts. `start` is the last completed step."""
        algorithm = config.algorithm
        self._next_prompts, self._position = next_prompts, position
        self._sample, self._score = sample, score
        self._buffer = GroupBuffer(
            batch=algorithm.prompts_per_step,
            lag=Lag(batches=algorithm.max_lag, publish_every=algorithm.publish_every),
            start=start,
            steps=config.run.steps,
            filter_by=algorithm.filter_groups,
            max_refills=algorithm.max_refills,
        )
        self._timeout_s = config.group_timeout_s + GRACE_S
        self._changed = threading.Condition(threading.RLock())
        self._in_flight: dict[int, Future[ScoredGroup]] = {}
        self._sampling: set[int] = set()
        self._failure: BaseException | None = None
        self._update: Future[None] | None = None
        self._open = False

    def open(self) -> None:
        self._open = True
        self._fill()

    def close(self) -> None:
        with self._changed:
            self._open = False
            flights = list(self._in_flight.values())
        for flight in flights:
            flight.cancel()

    def take(
        self, timed: Callable[[str], Any], should_abort: Callable[[], bool] = never_abort
    ) -> Batch:
        """Wait for the next batch and return it. Enters `timed("rollout")` while the batch is being
        sampled, and `timed("reward")` once only scores are missing. Raises any error from sampling
        or scoring, `EmptyBatch`, `Cancelled`, or TimeoutError if no group arrives in time."""
        with self._changed:
            while (aborted := should_abort()) or not self._buffer.ready():
                if aborted:
                    raise Cancelled
                if self._failure is not None:
                    raise self._failure
                awaited = self._buffer.awaited()
                sampled = bool(awaited) and self._sampling.isdisjoint(awaited)
                with timed("reward" if sampled else "rollout"):
                    self._wait_for_change(should_abort)
            batch = self._buffer.take()
        if not any(len(group.rewards_G) for group in batch.groups):
            raise EmptyBatch(batch.groups)
        return batch

    def _wait_for_change(self, should_abort: Callable[[], bool]) -> None:
        end = time.monotonic() + self._timeout_s
        while not self._changed.wait(min(POLL_S, self._timeout_s)) and not should_abort():
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"waited {self._timeout_s:.0f} s for a group: {len(self._in_flight)} are in "
                    f"flight, {len(self._sampling)} of them being sampled (rollout.timeout_s and "
                    "the timeouts of environments and rewards)"
                )

    def track_adoption(self, step: int, update: Future[None]) -> None:
        def on_adopted(done: Future[None]) -> None:
            with self._changed:
                if (error := done.exception()) is not None:
                    self._failure = self._failure or error
                else:
                    self._buffer.adopted(step)
                self._changed.notify_all()
            self._fill()

        self._update = update
        update.add_done_callback(on_adopted)

    def wait_for_adoption(self, should_abort: Callable[[], bool] = never_abort) -> None:
        if self._update is not None:
            wait_for(self._update, should_abort)

    def position(self, untrained: Sequence[Prompt] = ()) -> Mapping[str, Any]:
        """Return the data position for a checkpoint. A run resumed from it skips all prompts that
        were already trained on. `untrained` holds the current batch's prompts if it wasn't trained
        on."""
        with self._changed:  # no prompt may move from the stream to the buffer meanwhile
            return self._position([*untrained, *self._buffer.unfinished()])

    def _fill(self) -> None:
        """Submit as many prompts as fit in the buffer. Errors are stored for `take`, because
        futures swallow exceptions raised in callbacks."""
        with self._changed:
            room = self._buffer.room() if self._open and self._failure is None else 0
            try:
                prompts = [(self._buffer.submitted(p), p) for p in self._next_prompts(room)]
            except Exception as error:
                self._failure = self._failure or error
                self._changed.notify_all()
                return
            self._sampling.update(number for number, _ in prompts)
        for number, prompt in prompts:
            try:
                sampled = self._sample(prompt)
            except Exception as error:
                sampled = failed(error)
            sampled.add_done_callback(partial(self._on_sampled, number))
            flight = then(sampled, self._score)
            with self._changed:
                self._in_flight[number] = flight
                closed = not self._open
            flight.add_done_callback(partial(self._on_scored, number))
            if closed:  # since the prompts were drawn, so `close` did not see this group
                flight.cancel()

    def _on_sampled(self, number: int, _: object) -> None:
        with self._changed:
            self._sampling.discard(number)
            self._changed.notify_all()

    def _on_scored(self, number: int, flight: Future[ScoredGroup]) -> None:
        with self._changed:
            del self._in_flight[number]
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
