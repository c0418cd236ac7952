"""Supervised fine-tuning as a page: take conversations, step, measure those held out.

Everything it drives is a Protocol, as in `keel.trainer.loop`; `wiring.py` beside it wires it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from keel.configs.schema import Config, SftConfig
from keel.rl.metrics import Mean, Metric, Sum, merge
from keel.rl.packing import TrainBatch
from keel.rl.sft import SftExample, pack_sft
from keel.rl.types import StepResult
from keel.trainer.batch_stream import never
from keel.trainer.loop import Clock, Journal, Save, Saver, evaluation_due
from keel.trainer.nonfinite import SAID

MEASURED = {"nll": "loss", "indexer/held": "indexer/held"}
"""What the ranks measure of a held-out set, and what it is called under `eval/`."""


class Stream(Protocol):
    """An endless, seeded order of conversations."""

    def take(self, n: int) -> list[SftExample]: ...

    def state(self, unfinished: Sequence[SftExample] = ()) -> dict[str, Any]:
        """The position in it; `unfinished` ones, taken already, come first again."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Learner(Protocol):
    @property
    def version(self) -> int: ...

    def train(
        self, shares: Sequence[Sequence[TrainBatch]], lessons: Sequence[SftExample], /
    ) -> StepResult:
        """lessons: of which they were packed, to name what is found in them."""
        ...

    def score(
        self, shares: Sequence[Mapping[str, TrainBatch]], hurry: Callable[[], bool], /
    ) -> dict[str, Metric]:
        """`<name>/nll` of named batches, and `<name>/indexer/held` in a warm-up of indexers;
        nothing if `hurry` says meanwhile that there is no time for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    batches: Batches
    learner: Learner
    journal: Journal
    heldout: Mapping[str, Sequence[SftExample]]
    save: Save
    stop: Callable[[], bool]
    """Whether the user asked to stop after the current step."""
    say: Callable[[str], None]
    hurry: Callable[[], bool] = never
    """Whether there is no time for anything but a checkpoint."""
    attempt: Callable[[Callable[[Config], StepResult]], StepResult] | None = None
    """Takes a step by the recipe as it is by now, and once more by a smaller one where it did not
    fit (`keel.trainer.placement.oom_recovery.RetryOnOom`)."""


class Batches:
    """The conversations of each step."""

    def __init__(self, stream: Stream, config: SftConfig, *, epoch: float) -> None:
        """epoch: conversations in one."""
        self._stream, self._config, self._epoch = stream, config, epoch
        self._next: SftExample | None = None
        """Taken, and too long for the step before."""
        self._drawn = 0

    def take(self) -> list[SftExample]:
        """The last step of `sft.epochs` has what is left of them."""
        taken: list[SftExample] = []
        room, left = self._config.tokens_per_step, self._left
        if not room:
            taken = self._stream.take(min(left, self._config.conversations_per_step))
        while room and len(taken) < left and (not taken or self._peek().total_tokens <= room):
            taken.append(self._peek())
            self._next, room = None, room - taken[-1].total_tokens
        self._drawn += len(taken)
        return taken

    def position(self) -> dict[str, Any]:
        own = {"taken": self._drawn}
        return {**self._stream.state([self._next] if self._next else []), **own}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stream.restore(state)
        self._next, self._drawn = None, int(state["taken"])

    def steps_of(self, epochs: float) -> int:
        """Steps that it takes from here to see the conversations so often. Stays where it is."""
        before, most, steps = self.position(), self._of(epochs), 0
        while self._drawn < most:
            self.take()
            steps += 1
        self.restore(before)
        return steps

    def passes(self, steps: int) -> float:
        """How often so many steps see the conversations, on average; 0 where a step has as many as
        its tokens hold, and no `sft.epochs` says it."""
        if self._config.epochs or self._config.tokens_per_step:
            return self._config.epochs
        return steps * self._config.conversations_per_step / self._epoch

    def _of(self, epochs: float) -> int:
        """Conversations; a part of one counts as a whole."""
        return math.ceil(epochs * self._epoch - 1e-9)

    @property
    def _left(self) -> int:
        """Conversations until the end of `sft.epochs`; any number without them, or after it."""
        left = self._of(self._config.epochs) - self._drawn
        return left if left > 0 else sys.maxsize

    @property
    def epochs(self) -> float:
        """How often the conversations have been seen, on average."""
        return self._drawn / self._epoch

    def _peek(self) -> SftExample:
        if self._next is None:
            (self._next,) = self._stream.take(1)
        return self._next


def fit(parts: Parts, config: Config, *, start: int = 0) -> int:
    """Run steps `start + 1 … config.run.steps`; returns the last step done.

    Stops early, with a checkpoint, when `parts.stop()` says so.
    """
    run, learner = config.run, parts.learner
    heldout = packed_apart(parts.heldout, config)

    def measure() -> dict[str, Metric]:
        if parts.hurry():
            return {}
        parts.journal.begin("measuring")
        return measured(learner.score(heldout, parts.hurry))

    # Before the first step, or an evaluation that the run missed before it was resumed.
    due = not start or (evaluation_due(run, start) and not parts.journal.evaluated(start))
    if heldout and due and (found := measure()):
        parts.journal.record(start, found, [])
    if parts.hurry():  # nothing is there to be saved
        return start
    saver = Saver(parts.save, run, start)
    for step in range(start + 1, run.steps + 1):
        clock = Clock(seconds={})
        parts.journal.begin("training")
        lessons = parts.batches.take()

        def learn(config: Config, lessons: Sequence[SftExample] = lessons) -> StepResult:
            trainer = config.trainer
            shares = pack_sft(
                lessons,
                ranks=trainer.groups,
                micro_batch_tokens=trainer.micro_batch_tokens,
                mean=config.sft.mean,
            )
            result = learner.train([[share] for share in shares], lessons)
            own = seen(lessons, shares, trainer.micro_batch_tokens)
            return replace(result, metrics={**own, **result.metrics})

        with clock.time("train"):
            result = parts.attempt(learn) if parts.attempt else learn(config)
        for line in result.findings[:SAID]:
            parts.say(f"step {step}: no finite gradient: {line}")
        metrics = {**result.metrics, "sft/epochs": Mean(parts.batches.epochs, 1), **saver.metrics()}
        metrics |= clock.metrics(sum(lesson.learned_tokens for lesson in lessons))
        if heldout and evaluation_due(run, step):
            metrics |= measure()
        parts.journal.record(step, metrics, [])
        if result.gave_up:
            raise RuntimeError(f"step {step}: {result.gave_up}")
        if saver.due(step) or parts.stop():
            parts.journal.begin("saving a checkpoint")
            written = saver.save(step, parts.batches.position())
            if parts.stop() and written:  # or was asked to meanwhile
                return step
    return max(start, run.steps)


def packed_apart(
    heldout: Mapping[str, Sequence[SftExample]], config: Config
) -> list[dict[str, TrainBatch]]:
    """The share of each group of ranks in the held-out sets, by name; none without any."""
    trainer = config.trainer
    packed = {
        name: pack_sft(lessons, ranks=trainer.groups, micro_batch_tokens=trainer.micro_batch_tokens)
        for name, lessons in heldout.items()
    }
    return [
        {name: batches[group] for name, batches in packed.items()}
        for group in range(trainer.groups if packed else 0)
    ]


def measured(scored: Mapping[str, Metric]) -> dict[str, Metric]:
    """`eval/<set>/loss` of each held-out set, in nats a token, and `eval/loss` of all tokens; the
    same of `indexer/held`, where indexers are warmed up."""
    found: dict[str, Metric] = {}
    for metric, name in MEASURED.items():
        own = {
            f"eval/{key.removesuffix(metric)}{name}": value
            for key, value in scored.items()
            if key.endswith(f"/{metric}")
        }
        found |= own | merge({f"eval/{name}": value} for value in own.values())
    return found


def seen(
    lessons: Sequence[SftExample], shares: Sequence[TrainBatch], capacity: int
) -> dict[str, Metric]:
    """What a step is made of. `sft/packed` is how full its micro-batches are."""
    rows = [len(row.token_ids_N) for share in shares for row in share.micro_batches]
    return {
        "sft/conversations": Sum(len(lessons)),
        "sft/learned_tokens": Sum(sum(lesson.learned_tokens for lesson in lessons)),
        "sft/tokens": Sum(sum(lesson.total_tokens for lesson in lessons)),
        "sft/packed": Mean(sum(rows), sum(max(capacity, row) for row in rows)),
    }
