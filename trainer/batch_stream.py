"""Sample and score completions ahead of the training loop, and collect them into batches.

`BatchStream` submits a prompt for sampling as soon as its `GroupBuffer` has room for it, and scores
the group as soon as all of its completions are sampled. A batch is ready once the buffer has enough
groups. With `algorithm.max_lag: 0` and `publish_every: 1`, sampling then pauses until the engines
have received the weights of the next step. Otherwise it continues while the trainer works.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

from keel.configs.schema import AlgorithmConfig, Config
from keel.rl.futures import POLL_S, Cancelled, failed, never_abort, then, wait_for
from keel.rl.metrics import Metric, Sum
from keel.rl.summary import FAIL, passed
from keel.rl.types import Group, Prompt, ScoredGroup


class EmptyBatch(RuntimeError):
    """Raised if a batch contains no completions that can be trained on."""

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        reasons = {reason for group in groups for reason in group.group.dropped}
        super().__init__(
            f"none of {len(groups)} groups has a completion to learn from; reasons: "
            f"{'; '.join(sorted(reasons)) or 'none'}"
        )
        self.prompts = [group.group.prompt for group in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups for one training step."""

    groups: tuple[ScoredGroup, ...]
    """Groups to train on, in the order in which their prompts were submitted."""
    discarded: tuple[ScoredGroup, ...] = ()
    """Groups that were sampled for this batch but filtered out."""
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])


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
        should_abort: Callable[[], bool] = never_abort,
        start: int,
    ) -> None:
        """`next_prompts(n)` returns the next n prompts. `position(prompts)` returns the data
        position from which a resumed run would start with these prompts. `sample` and `score` must
        return immediately and enforce their own timeouts. Waits end with `Cancelled` once
        `should_abort()` returns True. `start` is the last completed step."""
        self._next_prompts, self._position = next_prompts, position
        self._sample, self._score, self._should_abort = sample, score, should_abort
        self._buffer = GroupBuffer(config.algorithm, steps=config.run.steps, start=start)
        self._timeout_s = config.group_timeout_s
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

    def take(self, timed: Callable[[str], Any]) -> Batch:
        """Wait for the next batch and return it. Enters `timed("rollout")` while the batch is being
        sampled, and `timed("reward")` once only scores are missing. Raises any error from sampling
        or scoring, `EmptyBatch`, `Cancelled`, or TimeoutError if no group arrives in time."""
        with self._changed:
            while (aborted := self._should_abort()) or not self._buffer.ready():
                if aborted:
                    raise Cancelled
                if self._failure is not None:
                    raise self._failure
                awaited = self._buffer.awaited()
                sampled = bool(awaited) and self._sampling.isdisjoint(awaited)
                with timed("reward" if sampled else "rollout"):
                    self._wait_for_change()
            batch = self._buffer.take()
        if not any(len(group.rewards_G) for group in batch.groups):
            raise EmptyBatch(batch.groups)
        return batch

    def _wait_for_change(self) -> None:
        end = time.monotonic() + self._timeout_s
        while not self._changed.wait(min(POLL_S, self._timeout_s)) and not self._should_abort():
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"waited {self._timeout_s:.0f} s for a group: {len(self._in_flight)} are in "
                    f"flight, {len(self._sampling)} of them being sampled (rollout.timeout_s and "
                    "the timeouts of environments and rewards)"
                )

    def track_update(self, step: int, update: Future[None]) -> None:
        """Free the slots of the groups trained on up to `step` once this weight update is done."""

        def on_updated(done: Future[None]) -> None:
            with self._changed:
                if (error := done.exception()) is not None:
                    self._failure = self._failure or error
                else:
                    self._buffer.engines_updated(step)
                self._changed.notify_all()
            self._fill()

        self._update = update
        update.add_done_callback(on_updated)

    def wait_for_update(self) -> None:
        """Wait for the weight update passed to `track_update`, if any."""
        if self._update is not None:
            wait_for(self._update, self._should_abort)

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


@dataclass(slots=True)
class _Slot:
    prompt: Prompt
    group: ScoredGroup | None = None
    reason: str | None = None
    freed: bool = False
    """True if the slot was freed early because the group is certain to be discarded."""


class GroupBuffer:
    """Tracks submitted and finished groups, and forms batches from them. It limits how far sampling
    runs ahead of training and filters out uninformative groups, without threads or clocks.

    A group occupies a slot from the moment its prompt is submitted until the engines have weights
    trained on that group. There are slots for `max_lag` + `publish_every` batches, so with 0 and 1,
    every group is sampled from exactly the weights that its batch then updates. If a group is
    filtered out, a new prompt takes its slot. The new prompt joins the end of the queue and is
    sampled from newer weights.

    Groups are trained on in submission order, and a step waits for all its groups. Training on
    finished groups first would favor short completions and let long ones go stale. This order also
    bounds staleness without comparing versions: while the engines are at step a, only groups for
    steps up to a + `publish_every` + `max_lag` can be submitted, so none is trained on later. With
    new weights at every step, the submitted groups fill all steps up to this limit, so moving one
    group forward would push another past it.

    The same holds for multi-turn trajectories: their first token is the oldest, and it was sampled
    from weights no older than those in use when the prompt was submitted. A trajectory therefore
    spans at most (`max_lag` + `publish_every` − 1) · `updates_per_batch` new versions. None is
    dropped for being too old, since that would drop exactly the long ones. The sequence mask
    handles bad completions that are too off-policy.

    Groups are also filtered in submission order, so the result does not depend on when they finish.
    """

    def __init__(self, algorithm: AlgorithmConfig, *, steps: int, start: int = 0) -> None:
        """Create a buffer for steps `start` + 1 … `steps`."""
        self._algorithm, self._steps = algorithm, steps
        self._batch = algorithm.prompts_per_step
        self._budget = int(algorithm.max_refills * self._batch)
        """Maximum number of groups to discard per batch."""
        self._engine_step = start  # the last step whose weights the engines use
        self._submitted = start * self._batch
        """Number of prompts submitted since step 1, excluding discarded ones."""
        self._numbers = 0
        self._queue: dict[int, _Slot] = {}
        """Groups that have been neither kept nor discarded yet, keyed by number in submission
        order. The first one is still being sampled or scored."""
        self._members: list[ScoredGroup] = []
        self._discarded: list[ScoredGroup] = []
        self._counts: Counter[str] = Counter()
        self._batches: deque[Batch] = deque()

    def room(self) -> int:
        """Return how many prompts to submit now. The limit depends on the next scheduled weight
        update, so a resumed run submits the same prompts as it would have without the
        interruption."""
        every = self._algorithm.publish_every
        ahead = (self._engine_step // every + 1) * every + self._algorithm.max_lag
        return max(0, min(ahead, self._steps) * self._batch - self._submitted)

    def submitted(self, prompt: Prompt) -> int:
        """Register a submitted prompt and return its group number."""
        self._submitted += 1
        self._numbers += 1
        self._queue[self._numbers] = _Slot(prompt)
        return self._numbers

    def arrived(self, number: int, group: ScoredGroup) -> None:
        """Add a group that has been sampled and scored."""
        slot = self._queue[number]
        slot.group, slot.reason = group, filter_reason(group, self._algorithm.filter_groups)
        for first, slot in list(self._queue.items()):
            if slot.group is None:
                break
            del self._queue[first]
            self._decide(slot, slot.group)
        self._free_early()

    def awaited(self) -> list[int]:
        """Return the numbers of the unfinished groups that the next batch needs."""
        missing = 0 if self._batches else self._batch - len(self._members)
        return [n for n, slot in islice(self._queue.items(), missing) if slot.group is None]

    def ready(self) -> bool:
        return bool(self._batches)

    def take(self) -> Batch:
        """Remove and return the next batch. Call this only when `ready` returns True."""
        return self._batches.popleft()

    def engines_updated(self, step: int) -> None:
        """Free the slots of all groups that were used for training up to and including `step`. Call
        this as soon as the engines use the new weights."""
        self._engine_step = max(self._engine_step, step)

    def unfinished(self) -> tuple[Prompt, ...]:
        """Return the prompts that have not been trained on yet, in submission order. A resumed run
        submits them again."""
        groups = [*(group for batch in self._batches for group in batch.groups), *self._members]
        queue = (slot.prompt for slot in self._queue.values() if not slot.freed)
        return (*(group.group.prompt for group in groups), *queue)

    def _decide(self, slot: _Slot, group: ScoredGroup) -> None:
        if slot.reason is not None and len(self._discarded) < self._budget:
            self._free(slot)
            self._discarded.append(group)
            self._counts[f"rollout/filtered_{slot.reason}"] += 1
            return
        self._members.append(group)
        if len(self._members) == self._batch:
            metrics: dict[str, Metric] = {name: Sum(n) for name, n in self._counts.items()}
            self._batches.append(
                Batch(
                    groups=tuple(self._members), discarded=tuple(self._discarded), metrics=metrics
                )
            )
            self._members, self._discarded, self._counts = [], [], Counter()

    def _free_early(self) -> None:
        """Free the slots of filtered-out groups early, but only of those that will be discarded
        whatever happens to the undecided groups ahead of them."""
        discarded = len(self._discarded)
        for slot in self._queue.values():
            discarded += slot.group is None or slot.reason is not None
            if discarded > self._budget:
                return
            if slot.reason is not None:
                self._free(slot)

    def _free(self, slot: _Slot) -> None:
        self._submitted -= not slot.freed
        slot.freed = True


def filter_reason(
    group: ScoredGroup, by: Literal["none", "reward", "correct"]
) -> Literal["all_correct", "all_wrong", "all_equal", "empty", "lone"] | None:
    """Return why a group should be filtered out, or None to keep it. `by="reward"` filters out
    groups whose advantages are all 0. `by="correct"` filters out groups whose completions all have
    the same `correct` value, even if they differ in length or format. The reason is `empty` for
    groups with no completions and `lone` for groups with only one."""
    if by == "none":
        return None
    if len(group.parts_G) < 2:
        return "lone" if group.parts_G else "empty"
    correct = [parts.get("correct", 0.0) for parts in group.parts_G]
    equal = group.uniform if by == "reward" else max(correct) - min(correct) <= FAIL
    if not equal:
        return None
    if passed(min(correct)):
        return "all_correct"
    return "all_wrong" if max(correct) <= FAIL else "all_equal"
