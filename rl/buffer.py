"""Between sampling and training: how far ahead to sample, and what is worth training on.

No threads and no clocks: `keel.trainer.batch_stream` brings those. All back-pressure is in
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

Filter = Literal["none", "reward", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step trains on, and what it cost to come by."""

    groups: tuple[ScoredGroup, ...]
    """In the order of their prompts."""
    discarded: tuple[ScoredGroup, ...] = ()
    """Filtered groups that were sampled among them, and are not trained on."""
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How much older than the trainer's weights those that sampled may be.

    batches: batches sampled ahead; publish_every: steps between new weights; updates: optimizer
    steps, each of which makes a version, on one batch.
    """

    batches: int = 0
    publish_every: int = 1
    updates: int = 1

    @property
    def versions(self) -> int:
        """Largest difference in versions of a token that is trained on."""
        return (self.batches + self.publish_every - 1) * self.updates


@dataclass(slots=True)
class _Place:
    """A prompt that has been submitted and whose group is in no batch yet."""

    prompt: Prompt
    group: ScoredGroup | None = None
    why: str | None = None
    """Why its group teaches nothing."""
    freed: bool = False
    """Its group will be discarded, whatever comes of those before it: its slot is free already."""


class GroupBuffer:
    """Which groups have been submitted, have arrived, and may be trained on.

    A group takes a slot from when its prompt is submitted until the engines have adopted weights
    that were trained on it. With `Lag.batches = 0` there is one batch of slots (so that each is
    sampled from the weights it trains), with n there are n + 1. A group that is filtered frees its
    slot for another prompt, sampled from newer weights, which goes to the end of the queue.

    Groups train in the order of their prompts, and a step waits for each of its own: taking what is
    ready first would train on short completions and let the long ones grow old. The wait keeps
    `Lag.versions` too, without looking at a version: while the engines are at step a, there is room
    for the groups of the steps up to a + `publish_every` + n alone, and so none is trained later
    than that. Nor would another order wait less. With new weights at every step, all that are
    submitted by then are due by that step and fill all steps up to it: whatever overtakes puts
    something else beyond the bound. (Between steps with the same weights there is a choice; those
    steps would get the short ones first and the long ones last.)

    That is the whole rule for trajectories of many turns too, and nothing is ever dropped for its
    age. With weights in flight, later turns are sampled from newer weights than the first, and the
    first token is the oldest: its weights are at least those that the engines had when its prompt
    was submitted, from which the bound counts. So a trajectory sees at most `Lag.versions` new
    versions, however many turns it has; after that the trainer waits for it, as long as its
    deadlines allow. A rule by its median or mean token would promise less than `max_lag` says, and
    one that drops by its oldest would drop just the long ones. What a bad completion's age does to
    the loss is for the sequence mask, which takes the mean over all of its tokens, each against the
    weights that sampled it.

    Whether a group is filtered, with what is left of the budget, is decided in the same order, and
    so depends on nothing that arrives sooner or later.
    """

    def __init__(
        self,
        *,
        batch: int,
        lag: Lag,
        start: int = 0,
        steps: int,
        filter_by: Filter = "none",
        max_refills: float = 0.0,
    ) -> None:
        """batch: groups per step; start, steps: the last step done, and the last to be done;
        max_refills: the most groups discarded for one batch, as a multiple of it."""
        self._batch, self._lag, self._steps = batch, lag, steps
        self._filter: Filter = filter_by
        self._budget = int(max_refills * batch)
        self._adopted = start
        self._submitted = start * batch
        """Prompts submitted and not discarded, from the first step on."""
        self._numbers = 0
        self._queue: dict[int, _Place] = {}
        """In the order of their numbers. The first has not arrived."""
        self._members: list[ScoredGroup] = []
        self._discarded: list[ScoredGroup] = []
        self._counts: Counter[str] = Counter()
        self._batches: deque[Batch] = deque()

    def room(self) -> int:
        """How many prompts to submit now: up to the next of the regular publications, whose version
        a run that was not resumed would sample from."""
        every = self._lag.publish_every
        ahead = (self._adopted // every + 1) * every + self._lag.batches
        return max(0, min(ahead, self._steps) * self._batch - self._submitted)

    def submitted(self, prompt: Prompt) -> int:
        """Note a prompt whose completions are about to be sampled; the number of its group."""
        self._submitted += 1
        self._numbers += 1
        self._queue[self._numbers] = _Place(prompt)
        return self._numbers

    def arrived(self, number: int, group: ScoredGroup) -> None:
        """A group is sampled and scored."""
        place = self._queue[number]
        place.group, place.why = group, uninformative(group, self._filter)
        for first, place in list(self._queue.items()):
            if place.group is None:
                break
            del self._queue[first]
            self._decide(place, place.group)
        self._free_early()

    def awaited(self) -> list[int]:
        """Numbers of the groups that the next batch waits for, as far as can be told."""
        missing = 0 if self._batches else self._batch - len(self._members)
        return [n for n, place in islice(self._queue.items(), missing) if place.group is None]

    def ready(self) -> bool:
        """Whether there is a batch."""
        return bool(self._batches)

    def take(self) -> Batch:
        """The batch that `ready` has promised."""
        return self._batches.popleft()

    def adopted(self, step: int) -> None:
        """The engines have the weights of after `step`: the slots of its groups are free."""
        self._adopted = max(self._adopted, step)

    def unfinished(self) -> tuple[Prompt, ...]:
        """Prompts that were submitted and not trained on, in their order: a resumed run submits
        them again."""
        groups = [*(group for batch in self._batches for group in batch.groups), *self._members]
        queue = (place.prompt for place in self._queue.values() if not place.freed)
        return (*(group.group.prompt for group in groups), *queue)

    def discarding(self) -> tuple[Prompt, ...]:
        """Prompts whose groups are filtered out, of batches that have not been taken yet."""
        ready = (group for batch in self._batches for group in batch.discarded)
        groups = [*ready, *self._discarded]
        freed = (place.prompt for place in self._queue.values() if place.freed)
        return (*(group.group.prompt for group in groups), *freed)

    def _decide(self, place: _Place, group: ScoredGroup) -> None:
        """Keep or discard `group`; all groups before it have been decided about."""
        if place.why is not None and len(self._discarded) < self._budget:
            self._free(place)
            self._discarded.append(group)
            self._counts[f"rollout/filtered_{place.why}"] += 1
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
        """Free the slots of groups that the budget lasts for, even if all that may be discarded
        before them is (a batch that is full by then only brings a new budget)."""
        discarded = len(self._discarded)
        for place in self._queue.values():
            discarded += place.group is None or place.why is not None
            if discarded > self._budget:
                return
            if place.why is not None:
                self._free(place)

    def _free(self, place: _Place) -> None:
        self._submitted -= not place.freed
        place.freed = True


def uninformative(
    group: ScoredGroup, by: Filter
) -> Literal["all_correct", "all_wrong", "all_equal", "empty", "lone"] | None:
    """Why a group teaches nothing, or None: it does, or `by` is none.

    `reward`: all advantages are 0. `correct`: all of its `correct` parts are equal, though length
    or format may tell its completions apart. `empty`, `lone`: it has lost all of its completions,
    or all but one.
    """
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
    """The groups of `updates` optimizer steps, with equally many each (±1), and of those that teach
    anything (`ScoredGroup.idle`), too.

    Groups without completions are left out, so that no step is empty, and steps in which none
    teaches: an optimizer's momentum would move the weights for nothing. Then there are fewer steps,
    at least one for any completions. Raises `ValueError` for `updates` below 1.
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
