"""The loop for supervised training: draw conversations, train on them, and evaluate on held-out
sets."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from keel.configs.schema import Config, SftConfig
from keel.rl.metrics import Mean, Metric, Sum, merge
from keel.rl.sft import SftExample, plan_sft
from keel.rl.types import StepResult
from keel.trainer.learner import Learner
from keel.trainer.loop import Clock, RunJournal, Save, Saver, evaluation_due
from keel.trainer.nonfinite import SHOWN_FINDINGS


class _SftStream(Protocol):
    def take(self, n: int) -> list[SftExample]: ...

    def position(self, unfinished: Sequence[SftExample] = ()) -> dict[str, Any]: ...

    def restore(self, position: Mapping[str, Any]) -> None: ...


class Batches:
    """The conversations or texts of a run: batches to train on, and held-out sets."""

    def __init__(
        self,
        stream: _SftStream,
        config: SftConfig,
        *,
        epoch: float,
        heldout: Mapping[str, Sequence[SftExample]],
    ) -> None:
        """`epoch` is the number of conversations in an epoch, and `heldout` has those held out, by
        source."""
        self.heldout = heldout
        self._stream, self._config, self._epoch = stream, config, epoch
        self._next: SftExample | None = None
        """A conversation drawn from the stream that did not fit into the previous batch."""
        self._drawn = 0

    def take(self) -> list[SftExample]:
        """Return the next batch. The last batch of the last epoch (`sft.epochs`) may be smaller
        than the others."""
        batch: list[SftExample] = []
        room = self._config.tokens_per_step
        remaining = self._end_of(self._config.epochs) - self._drawn
        if remaining <= 0:  # `sft.epochs` is not set or already complete
            remaining = sys.maxsize
        if not room:
            batch = self._stream.take(min(remaining, self._config.conversations_per_step))
        while room and len(batch) < remaining and (not batch or self._peek().total_tokens <= room):
            batch.append(self._peek())
            self._next, room = None, room - batch[-1].total_tokens
        self._drawn += len(batch)
        return batch

    def position(self) -> dict[str, Any]:
        return {**self._stream.position([self._next] if self._next else []), "taken": self._drawn}

    def restore(self, position: Mapping[str, Any]) -> None:
        self._stream.restore(position)
        self._next, self._drawn = None, int(position["taken"])

    def steps_of(self, epochs: float) -> int:
        before, end, steps = self.position(), self._end_of(epochs), 0
        while self._drawn < end:
            self.take()
            steps += 1
        self.restore(before)
        return steps

    def passes(self, steps: int) -> float:
        """Return how many times `steps` steps go through the data on average, or 0 if batches are
        sized in tokens and `sft.epochs` isn't set."""
        if self._config.epochs or self._config.tokens_per_step:
            return self._config.epochs
        return steps * self._config.conversations_per_step / self._epoch

    @property
    def epochs(self) -> float:
        return self._drawn / self._epoch

    def _end_of(self, epochs: float) -> int:
        return math.ceil(epochs * self._epoch - 1e-9)

    def _peek(self) -> SftExample:
        if self._next is None:
            (self._next,) = self._stream.take(1)
        return self._next


def fit(
    config: Config,
    *,
    batches: Batches,
    learner: Learner,
    journal: RunJournal,
    save: Save,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
    should_abort: Callable[[], bool],
    start: int = 0,
) -> int:
    """Run steps `start + 1` to `config.run.steps`, or until `should_stop()` returns True. Returns
    the last completed step. `should_abort()` returns True to end the run immediately, saving only a
    final checkpoint."""
    run = config.run
    planned = {
        name: plan_sft(
            examples,
            replicas=config.trainer.data_parallel,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
        )
        for name, examples in batches.heldout.items()
        if run.eval_every >= 0
    }
    plans_by_replica = [
        {name: plans[replica] for name, plans in planned.items()}
        for replica in range(config.trainer.data_parallel if planned else 0)
    ]

    def measure() -> dict[str, Metric]:
        if should_abort():
            return {}
        journal.begin("measuring")
        return _evaluation_metrics(learner.evaluate_nll(plans_by_replica, should_abort))

    # Before the first step, or if the evaluation of `start` was cut off.
    due = not start or (evaluation_due(run, start) and not journal.evaluated(start))
    if planned and due and (measured := measure()):
        journal.record(start, measured, [])
    if should_abort():
        return start
    saver = Saver(save, run, start)
    for step in range(start + 1, run.steps + 1):
        clock = Clock(seconds={})
        journal.begin("training")
        examples = batches.take()
        with clock.time("train"):
            result = learner.retry_on_oom(partial(_take_step, learner, examples))
        for line in result.findings[:SHOWN_FINDINGS]:
            say(f"step {step}: no finite gradient: {line}")
        metrics = {**result.metrics, "sft/epochs": Mean(batches.epochs, 1), **saver.metrics()}
        metrics |= clock.metrics(sum(example.learned_tokens for example in examples))
        if planned and evaluation_due(run, step):
            metrics |= measure()
        journal.record(step, metrics, [])
        if result.gave_up:
            raise RuntimeError(f"step {step}: {result.gave_up}")
        if saver.due(step) or should_stop():
            journal.begin("saving a checkpoint")
            written = saver.save(step, batches.position())
            if should_stop() and written:  # also if asked to during the save
                return step
    return max(start, run.steps)


def _take_step(learner: Learner, examples: Sequence[SftExample], config: Config) -> StepResult:
    trainer = config.trainer
    plans = plan_sft(
        examples,
        replicas=trainer.data_parallel,
        micro_batch_tokens=trainer.micro_batch_tokens,
        mean=config.sft.mean,
    )
    result = learner.step_on([[plan] for plan in plans], examples)
    rows = [sum(group.tokens for group in row) for plan in plans for row in plan.micro_batches]
    capacity = sum(max(trainer.micro_batch_tokens, row) for row in rows)
    sizes: dict[str, Metric] = {
        "sft/conversations": Sum(len(examples)),
        "sft/learned_tokens": Sum(sum(example.learned_tokens for example in examples)),
        "sft/tokens": Sum(sum(example.total_tokens for example in examples)),
        "sft/packed": Mean(sum(rows), capacity),
    }
    return replace(result, metrics={**sizes, **result.metrics})


def _evaluation_metrics(evaluated: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return `eval/<set>/loss` for each held-out set and `eval/loss` over all sets, in nats per
    token. If `evaluated` has `indexer/held`, that is returned in the same way."""
    metrics: dict[str, Metric] = {}
    for metric, name in (("nll", "loss"), ("indexer/held", "indexer/held")):
        by_set = {
            f"eval/{key.removesuffix(metric)}{name}": value
            for key, value in evaluated.items()
            if key.endswith(f"/{metric}")
        }
        metrics |= by_set | merge({f"eval/{name}": value} for value in by_set.values())
    return metrics
