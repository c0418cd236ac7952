"""The buffer between sampling and training, which limits how far sampling runs ahead and filters
groups.

It uses no threads or clocks, which `keel.trainer.batch_stream` adds. Sampling is held back only by
`GroupBuffer.room`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Literal

from keel.rl.evaluation import FAIL, passed
from keel.rl.metrics import Metric, Sum
from keel.rl.types import Prompt, ScoredGroup

_Filter = Literal["none", "reward", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups that one step trains on."""

    groups: tuple[ScoredGroup, ...]
    """The groups, in the order in which their prompts were submitted."""
    discarded: tuple[ScoredGroup, ...] = ()
    """Groups that were sampled for this batch but filtered out."""
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far the weights used for sampling may be behind the trainer's. `batches` is the number of
    batches sampled ahead, `publish_every` the number of steps between weight updates, and `updates`
    the number of optimizer steps on one batch. Each optimizer step creates a new version of the
    weights."""

    batches: int = 0
    publish_every: int = 1
    updates: int = 1

    @property
    def versions(self) -> int:
        """The largest number of versions by which the weights that sampled a token may be behind
        when the token is trained on."""
        return (self.batches + self.publish_every - 1) * self.updates


@dataclass(slots=True)
class _Place:
    prompt: Prompt
    group: ScoredGroup | None = None
    reason: str | None = None
    """Why the group should be filtered out, if it should."""
    freed: bool = False
    """True if the slot is already free because the group will certainly be discarded."""


class GroupBuffer:
    """Tracks submitted and finished groups, and forms batches from them.

    A group occupies a slot from the time its prompt is submitted until the engines use weights that
    were trained on it. There are slots for `Lag.batches` + 1 batches, so with a lag of 0 every
    group is sampled from the very weights that it trains. If a group is filtered out, its slot goes
    to a new prompt, which is added at the end of the queue and sampled from newer weights.

    Groups are trained on in the order of their prompts, and a step waits for all its groups. Taking
    finished groups first would favour short completions while the long ones become older. The order
    also enforces `Lag.versions` without comparing versions. While the engines are at step a, only
    groups for steps up to a + `publish_every` + `batches` can be submitted, so none is trained on
    later than that. No other order would wait less: with new weights at every step, the submitted
    groups fill all steps up to the bound, so moving one group forward would push another beyond it.

    The same rule covers trajectories with many turns, and no trajectory is dropped because of its
    age. Its oldest token is the first one, and that was sampled from weights no older than those in
    use when the prompt was submitted. A trajectory therefore spans at most `Lag.versions` new
    versions, however many turns it has, and after that the trainer waits for it. Dropping
    trajectories by their oldest token would drop exactly the long ones. The sequence mask handles
    bad completions that have become too off-policy.

    Groups are filtered in the same order, so the result does not depend on when they arrive.
    """

    def __init__(
        self,
        *,
        batch: int,
        lag: Lag,
        start: int = 0,
        steps: int,
        filter_by: _Filter = "none",
        max_refills: float = 0.0,
    ) -> None:
        """Create a buffer for steps `start` + 1 … `steps`. `batch` is the number of groups in a
        step. `max_refills` limits how many groups may be discarded for one batch, as a multiple of
        `batch`."""
        self._batch, self._lag, self._steps = batch, lag, steps
        self._filter: _Filter = filter_by
        self._budget = int(max_refills * batch)
        self._adopted = start
        self._submitted = start * batch
        """Number of prompts submitted since step 1, not counting discarded ones."""
        self._numbers = 0
        self._queue: dict[int, _Place] = {}
        """The undecided groups by number, in order. The first one has not arrived yet."""
        self._members: list[ScoredGroup] = []
        self._discarded: list[ScoredGroup] = []
        self._counts: Counter[str] = Counter()
        self._batches: deque[Batch] = deque()

    def room(self) -> int:
        """Return how many prompts to submit now. In a resumed run, the count still goes up to the
        next scheduled weight update, so the run continues as if it had not been interrupted."""
        every = self._lag.publish_every
        ahead = (self._adopted // every + 1) * every + self._lag.batches
        return max(0, min(ahead, self._steps) * self._batch - self._submitted)

    def submitted(self, prompt: Prompt) -> int:
        """Register a submitted prompt and return the number of its group."""
        self._submitted += 1
        self._numbers += 1
        self._queue[self._numbers] = _Place(prompt)
        return self._numbers

    def arrived(self, number: int, group: ScoredGroup) -> None:
        """Add the group with this number after it has been sampled and scored."""
        place = self._queue[number]
        place.group, place.reason = group, uninformative(group, self._filter)
        for first, place in list(self._queue.items()):
            if place.group is None:
                break
            del self._queue[first]
            self._decide(place, place.group)
        self._free_early()

    def awaited(self) -> list[int]:
        """Return the numbers of unfinished groups that the next batch certainly needs."""
        missing = 0 if self._batches else self._batch - len(self._members)
        return [n for n, place in islice(self._queue.items(), missing) if place.group is None]

    def ready(self) -> bool:
        """Return whether a batch is complete."""
        return bool(self._batches)

    def take(self) -> Batch:
        """Remove and return the next batch. Call this only if `ready` returns True."""
        return self._batches.popleft()

    def adopted(self, step: int) -> None:
        """Free the slots for the groups of `step`, because the engines now use the weights trained
        on them."""
        self._adopted = max(self._adopted, step)

    def unfinished(self) -> tuple[Prompt, ...]:
        """Return the prompts that have not been trained on, in order, so that a resumed run can
        submit them again."""
        groups = [*(group for batch in self._batches for group in batch.groups), *self._members]
        queue = (place.prompt for place in self._queue.values() if not place.freed)
        return (*(group.group.prompt for group in groups), *queue)

    def discarding(self) -> tuple[Prompt, ...]:
        """Return the prompts whose groups were filtered out for batches that have not been taken
        yet."""
        ready = (group for batch in self._batches for group in batch.discarded)
        groups = [*ready, *self._discarded]
        freed = (place.prompt for place in self._queue.values() if place.freed)
        return (*(group.group.prompt for group in groups), *freed)

    def _decide(self, place: _Place, group: ScoredGroup) -> None:
        if place.reason is not None and len(self._discarded) < self._budget:
            self._free(place)
            self._discarded.append(group)
            self._counts[f"rollout/filtered_{place.reason}"] += 1
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
        """Free the slots of groups that will be discarded whatever happens to the earlier ones. The
        budget must suffice even if all undecided groups before them are discarded too."""
        discarded = len(self._discarded)
        for place in self._queue.values():
            discarded += place.group is None or place.reason is not None
            if discarded > self._budget:
                return
            if place.reason is not None:
                self._free(place)

    def _free(self, place: _Place) -> None:
        self._submitted -= not place.freed
        place.freed = True


def uninformative(
    group: ScoredGroup, by: _Filter
) -> Literal["all_correct", "all_wrong", "all_equal", "empty", "lone"] | None:
    """Return the reason for filtering out a group, or None to keep it. With `by="reward"`, groups
    are filtered out if all their advantages are 0. With `by="correct"`, they are filtered out if
    their completions have the same `correct` part, even if they differ in length or format. A group
    that lost all its completions is `empty`, and one with a single completion left is `lone`."""
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


def split_updates(groups: Sequence[ScoredGroup], updates: int) -> list[list[ScoredGroup]]:
    """Split the groups for `updates` optimizer steps, so that each step gets the same number (±1).

    Groups that contribute a gradient (not `ScoredGroup.idle`) are also split evenly. If there are
    too few of them for every step, the number of steps is reduced, because momentum would move the
    weights even without a gradient. At least one step remains if there are any completions. Groups
    without completions are omitted.

    Raises `ValueError` if `updates` is below 1.
    """
    if updates < 1:
        raise ValueError(f"updates = {updates}: must be at least 1")
    sampled = [group for group in groups if group.group.trajectories]
    teaching = [group for group in sampled if not group.idle]
    updates = min(updates, max(len(teaching), bool(sampled)))
    edges = [len(teaching) * step // max(1, updates) for step in range(updates + 1)]
    shares = [teaching[a:b] for a, b in pairwise(edges)]
    for group in sampled:
        if group.idle:
            min(shares, key=len).append(group)
    return shares
