"""The buffer between sampling and training. It limits how far sampling runs ahead of training and
filters out uninformative groups. It uses no threads or clocks; `keel.trainer.batch_stream` adds
them."""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from keel.rl.metrics import Metric, Sum
from keel.rl.summary import FAIL, passed
from keel.rl.types import Prompt, ScoredGroup

_Filter = Literal["none", "reward", "correct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups for one training step."""

    groups: tuple[ScoredGroup, ...]
    """Groups to train on, in the order in which their prompts were submitted."""
    discarded: tuple[ScoredGroup, ...] = ()
    """Groups that were sampled for this batch but filtered out."""
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Limits how stale the sampling weights can get. `batches` is how many batches are sampled
    ahead of training, and `publish_every` is the number of steps between weight updates."""

    batches: int = 0
    publish_every: int = 1


@dataclass(slots=True)
class _Slot:
    prompt: Prompt
    group: ScoredGroup | None = None
    reason: str | None = None
    freed: bool = False
    """True if the slot was freed early because the group is certain to be discarded."""


class GroupBuffer:
    """Tracks submitted and finished groups, and forms batches from them.

    A group occupies a slot from the moment its prompt is submitted until the engines have weights
    trained on that group. There are slots for `Lag.batches` + `publish_every` batches, so with
    0 and 1, every group is sampled from exactly the weights that its batch then updates. If a group
    is filtered out, a new prompt takes its slot. The new prompt joins the end of the queue and is
    sampled from newer weights.

    Groups are trained on in submission order, and a step waits for all its groups. Training on
    finished groups first would favor short completions and let long ones go stale. This order also
    bounds staleness without having to compare versions. While the engines are at step a,
    only groups for steps up to a + `publish_every` + `batches` can be submitted, so none is trained
    on later than that. No other order would wait any less. With new weights at every step, the
    submitted groups fill all steps up to this limit, so moving one group forward would push another
    past it.

    Multi-turn trajectories follow the same rule and are never dropped for being too old. The first
    token of a trajectory is its oldest, and it was sampled from weights no older than those in use
    when the prompt was submitted. A trajectory therefore spans at most (`batches` + `publish_every`
    − 1) · `updates_per_batch` new versions, no matter how many turns it has; after that, the
    trainer waits. Dropping stale trajectories would drop exactly the long ones. The sequence mask
    handles bad completions that are too off-policy.

    Groups are also filtered in submission order, so the result does not depend on when they finish.
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
        """Create a buffer for steps `start` + 1 … `steps` with `batch` groups per step. Up to
        `max_refills` · `batch` groups can be discarded per batch."""
        self._batch, self._lag, self._steps = batch, lag, steps
        self._filter: _Filter = filter_by
        self._budget = int(max_refills * batch)
        self._adopted = start
        self._submitted = start * batch
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
        every = self._lag.publish_every
        ahead = (self._adopted // every + 1) * every + self._lag.batches
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
        slot.group, slot.reason = group, _filter_reason(group, self._filter)
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

    def adopted(self, step: int) -> None:
        """Free the slots of all groups that were used for training up to and including `step`. Call
        this as soon as the engines use the new weights."""
        self._adopted = max(self._adopted, step)

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


def _filter_reason(
    group: ScoredGroup, by: _Filter
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
