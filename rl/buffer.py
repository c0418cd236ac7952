"""Between sampling and training: how far ahead to sample, and what is worth training on.

No threads and no clocks: `trainer.feed` brings those. All back-pressure is in `GroupBuffer.room`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from rl.metrics import Metric, Sum
from rl.passing import FAIL, passed
from rl.types import Prompt, ScoredGroup

Filter = Literal["none", "reward", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step trains on, and what it cost to come by."""

    groups: tuple[ScoredGroup, ...]
    """In the order that their prompts were drawn."""
    discarded: tuple[ScoredGroup, ...] = ()
    """Filtered and stale groups, sampled since the last batch and not to be trained on."""
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


class GroupBuffer:
    """Which groups have been asked for, are there, and may be trained on.

    A group takes a slot from when its prompt is drawn until weights that were trained on it have
    been adopted by the engines. With `Lag.batches = 0` there is one batch of slots (so that each is
    sampled from the weights it trains), with n there are n + 1. A group that is discarded frees its
    slot at once, for another prompt.
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
        self._outstanding: dict[int, Prompt] = {}
        self._ready: dict[int, ScoredGroup] = {}
        self._discarded: list[ScoredGroup] = []
        self._counts: Counter[str] = Counter()

    def room(self) -> int:
        """Prompts to draw now."""
        ahead = self._adopted + self._lag.publish_every + self._lag.batches
        return max(0, min(ahead, self._steps) * self._batch - self._drawn)

    def drawn(self, prompt: Prompt) -> int:
        """Note a prompt whose answers are being asked for; the number of its group."""
        self._drawn += 1
        self._numbers += 1
        self._outstanding[self._numbers] = prompt
        return self._numbers

    def arrived(self, number: int, group: ScoredGroup) -> None:
        """A group is sampled and scored."""
        del self._outstanding[number]
        if len(self._discarded) < self._budget and (why := uninformative(group, self._filter)):
            self._discard(group, f"rollout/filtered_{why}")
        else:
            self._ready[number] = group

    def ready(self, version: int) -> bool:
        """Whether there is a batch for a trainer at `version`. Stale groups are discarded."""
        oldest = version - self._lag.versions
        for number, group in list(self._ready.items()):
            if (sampled_by := oldest_version(group)) is not None and sampled_by < oldest:
                self._discard(self._ready.pop(number), "rollout/stale")
        return len(self._ready) >= self._batch

    def take(self) -> Batch:
        """The batch that `ready` has promised: the groups that were drawn first."""
        numbers = sorted(self._ready)[: self._batch]
        batch = Batch(
            groups=tuple(self._ready.pop(number) for number in numbers),
            discarded=tuple(self._discarded),
            metrics={name: Sum(count) for name, count in self._counts.items()},
        )
        self._discarded, self._counts = [], Counter()
        return batch

    def adopted(self, step: int) -> None:
        """The engines have the weights of after `step`: the slots of its groups are free."""
        self._adopted = max(self._adopted, step)

    def unfinished(self) -> tuple[Prompt, ...]:
        """Prompts that were drawn and not trained on, in their order: a resumed run asks them
        again."""
        waiting = {number: group.group.prompt for number, group in self._ready.items()}
        both = {**self._outstanding, **waiting}
        return tuple(both[number] for number in sorted(both))

    def _discard(self, group: ScoredGroup, why: str) -> None:
        self._drawn -= 1
        self._discarded.append(group)
        self._counts[why] += 1


def uninformative(group: ScoredGroup, by: Filter) -> Literal["right", "wrong", "even"] | None:
    """Why a group teaches nothing, or None: it does, or it has no answers, or `by` is none.

    `reward`: all advantages are 0. `correct`: all of its `correct` parts are equal, though length
    or format may tell its answers apart.
    """
    if by == "none" or not group.parts_G:
        return None
    correct = [parts.get("correct", 0.0) for parts in group.parts_G]
    even = group.uniform if by == "reward" else max(correct) - min(correct) <= FAIL
    if not even:
        return None
    if passed(min(correct)):
        return "right"
    return "wrong" if max(correct) <= FAIL else "even"


def oldest_version(group: ScoredGroup) -> int | None:
    """Of the weights that sampled any of its tokens; None for a group without answers."""
    segments = [s for t in group.group.trajectories for s in t.segments]
    return min(
        (int(s.version_T[s.trainable_T].min()) for s in segments if s.trainable_T.any()),
        default=None,
    )
