"""Between sampling and training: how far ahead to sample, and what is worth training on.

No threads and no clocks: `keel.trainer.feed` brings those. All back-pressure is in
`GroupBuffer.room`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from keel.rl.metrics import Metric, Sum
from keel.rl.passing import FAIL, passed
from keel.rl.types import Prompt, ScoredGroup

Filter = Literal["none", "reward", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step trains on, and what it cost to come by."""

    groups: tuple[ScoredGroup, ...]
    """In the order that their prompts were drawn."""
    discarded: tuple[ScoredGroup, ...] = ()
    """Filtered groups that were drawn among them, and are not trained on."""
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
    """A prompt that has been drawn and whose group is in no batch yet."""

    prompt: Prompt
    group: ScoredGroup | None = None
    why: str | None = None
    """Why its group teaches nothing."""
    freed: bool = False
    """Its group will be discarded, whatever comes of those before it: its slot is free already."""


class GroupBuffer:
    """Which groups have been asked for, are there, and may be trained on.

    A group takes a slot from when its prompt is drawn until weights that were trained on it have
    been adopted by the engines. With `Lag.batches = 0` there is one batch of slots (so that each is
    sampled from the weights it trains), with n there are n + 1. A group that is filtered frees its
    slot for another prompt, drawn from newer weights, which goes to the end of the line.

    Groups train in the order that their prompts were drawn, and a step waits for each of its own:
    taking what is ready first would train on short completions and let the long ones grow old. The
    wait keeps `Lag.versions` too, without looking at a version: while the engines are at step a,
    room is for the groups of the steps up to a + `publish_every` + n alone, and so none is trained
    later than that. Nor would another order wait less. With new weights at every step, all that
    are drawn by then are due by that step and fill all steps up to it: whatever overtakes puts
    something else beyond the bound. (Between steps with the same weights there is a choice; those
    steps would get the short ones first and the long ones last.)

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
        """batch: groups a step; start, steps: the last step done, and the last to be done;
        max_refills: groups discarded for one batch at most, as a multiple of it."""
        self._batch, self._lag, self._steps = batch, lag, steps
        self._filter: Filter = filter_by
        self._budget = int(max_refills * batch)
        self._adopted = start
        self._drawn = start * batch
        """Prompts drawn and not discarded, from the first step on."""
        self._numbers = 0
        self._line: dict[int, _Place] = {}
        """In the order of their numbers. The first of it has not arrived."""
        self._members: list[ScoredGroup] = []
        self._discarded: list[ScoredGroup] = []
        self._counts: Counter[str] = Counter()
        self._batches: deque[Batch] = deque()

    def room(self) -> int:
        """Prompts to draw now."""
        ahead = self._adopted + self._lag.publish_every + self._lag.batches
        return max(0, min(ahead, self._steps) * self._batch - self._drawn)

    def drawn(self, prompt: Prompt) -> int:
        """Note a prompt whose answers are being asked for; the number of its group."""
        self._drawn += 1
        self._numbers += 1
        self._line[self._numbers] = _Place(prompt)
        return self._numbers

    def arrived(self, number: int, group: ScoredGroup) -> None:
        """A group is sampled and scored."""
        place = self._line[number]
        place.group, place.why = group, uninformative(group, self._filter)
        for first, place in list(self._line.items()):
            if place.group is None:
                break
            del self._line[first]
            self._decide(place, place.group)
        self._free_early()

    def awaited(self) -> list[int]:
        """Numbers of the groups that the next batch waits for, as far as can be told."""
        missing = 0 if self._batches else self._batch - len(self._members)
        return [n for n, place in islice(self._line.items(), missing) if place.group is None]

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
        """Prompts that were drawn and not trained on, in their order: a resumed run asks them
        again."""
        groups = [*(group for batch in self._batches for group in batch.groups), *self._members]
        line = (place.prompt for place in self._line.values() if not place.freed)
        return (*(group.group.prompt for group in groups), *line)

    def _decide(self, place: _Place, group: ScoredGroup) -> None:
        """All groups that were drawn before this one have been decided about."""
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
        for place in self._line.values():
            discarded += place.group is None or place.why is not None
            if discarded > self._budget:
                return
            if place.why is not None:
                self._free(place)

    def _free(self, place: _Place) -> None:
        self._drawn -= not place.freed
        place.freed = True


def uninformative(
    group: ScoredGroup, by: Filter
) -> Literal["all_correct", "all_wrong", "all_equal"] | None:
    """Why a group teaches nothing, or None: it does, or it has no answers, or `by` is none.

    `reward`: all advantages are 0. `correct`: all of its `correct` parts are equal, though length
    or format may tell its answers apart.
    """
    if by == "none" or not group.parts_G:
        return None
    correct = [parts.get("correct", 0.0) for parts in group.parts_G]
    equal = group.uniform if by == "reward" else max(correct) - min(correct) <= FAIL
    if not equal:
        return None
    if passed(min(correct)):
        return "all_correct"
    return "all_wrong" if max(correct) <= FAIL else "all_equal"
