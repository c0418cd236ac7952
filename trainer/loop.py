"""The algorithm: sample, score, step, push weights, evaluate, save.

Everything it drives is a Protocol, so it runs on Ray, vLLM and DeepSpeed (`commands/train.py`) or
on fakes in a test. `BatchStream` samples and scores, up to `algorithm.max_lag` batches ahead;
`RunGuard` handles aborts, errors and checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from keel.configs.schema import Config, RunConfig
from keel.rl.buffer import Batch
from keel.rl.evaluation import evaluation
from keel.rl.futures import then
from keel.rl.metrics import Mean, Metric, Sum
from keel.rl.summary import sampled_tokens, summarize
from keel.rl.types import Group, Prompt, Purpose, ScoredGroup, StepResult
from keel.trainer.batch_stream import BatchStream, decoding_steps, never, wait_for
from keel.trainer.guard import RunGuard, RunJournal, Save

IDLE = ("rollout", "reward")
"""Timings during which the trainer idles."""


class Prompts(Protocol):
    """An endless, seeded order of training prompts."""

    def take(self, n: int) -> Sequence[Prompt]: ...

    def state(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        """The position in the data, from which `unfinished` prompts are repeated first."""
        ...


class Rollouts(Protocol):
    def submit(self, prompt: Prompt, purpose: Purpose) -> Future[Group]:
        """Sample a group. Returns at once; late or failed completions are listed in the group."""
        ...


class Rewards(Protocol):
    def submit(self, group: Group, purpose: Purpose) -> Future[ScoredGroup]: ...

    def metrics(self) -> Mapping[str, Metric]:
        """Scoring metrics since the last call, including evaluations."""
        ...


class PolicyLearner(Protocol):
    @property
    def version(self) -> int: ...

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult: ...


def _no_audit(*_: object) -> dict[str, Metric]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the loop drives."""

    prompts: Prompts
    rollouts: Rollouts
    rewards: Rewards
    learner: PolicyLearner
    push: Callable[[int], Future[None]]
    """Bring every engine to the learner's weights, which are this version."""
    journal: RunJournal
    heldout: Mapping[str, Sequence[Prompt]]
    save: Save
    should_stop: Callable[[], bool]
    """Return True to stop after the current step."""
    dump_bad_batch: Callable[[int, Sequence[ScoredGroup], Sequence[str]], None]
    """Save the batch of a step without a finite gradient, with its findings."""
    audit: Callable[[Batch, Mapping[str, Any], Sequence[Prompt]], Mapping[str, Metric]] = _no_audit
    """Called after each step with the batch, the data position and the prompts to be discarded."""
    should_abort: Callable[[], bool] = never
    """Return True to abort now and drop in-flight rollouts. Raises if a process is lost."""
    should_skip_evaluation: Callable[[], bool] = never
    """Return True to cut evaluations short, except after the last step. They are made up for when
    the run resumes."""
    decoding_steps: Callable[[], int] | None = None
    """Decoding steps of all engines so far; None if unknown."""
    can_checkpoint: Callable[[Exception], bool] = lambda _: True
    """Return True if the learner survived this error, so that a final checkpoint can be saved."""


def train(parts: Parts, config: Config, *, start: int = 0) -> int:
    """Run steps `start + 1 … config.run.steps` and return the last step done.

    Stops early, with a checkpoint, once `parts.should_stop()` or `parts.should_abort()`. Raises
    errors of engines, rewards and batches without completions after a checkpoint, and errors of
    the learner without one.
    """
    run, algorithm, learner = config.run, config.algorithm, parts.learner
    stream = BatchStream(
        config,
        next_prompts=parts.prompts.take,
        position=parts.prompts.state,
        sample=partial(parts.rollouts.submit, purpose="train"),
        score=partial(parts.rewards.submit, purpose="train"),
        start=start,
    )
    should_abort = parts.should_abort
    guard = RunGuard(
        *(run, start, stream, parts.journal, parts.save, should_abort, parts.can_checkpoint)
    )
    with guard.run():
        if start:  # the engines started from the base model
            wait_for(parts.push(learner.version), should_abort)
        if _evaluation_missing(parts, run, start):
            parts.journal.begin("evaluating")
            parts.journal.record(start, evaluate(parts, config, start), [])
            if parts.should_stop():
                return start
        stream.open()
        for step in range(start + 1, run.steps + 1):
            clock, version = Clock(), learner.version
            with guard.sampling():
                batch = stream.take(clock.time, should_abort)
            parts.journal.begin("training")
            with clock.time("train"):
                result = learner.step(batch.groups)
            if result.findings:
                parts.dump_bad_batch(step, batch.groups, result.findings)
            evaluating = evaluation_due(run, step)
            publishing = evaluating or step % algorithm.publish_every == 0
            if publishing and guard.continues(result):
                with clock.time("sync"), guard.deferred_errors("publishing weights"):
                    stream.wait_for_adoption(should_abort)
                    stream.adopting(step, parts.push(result.version))
                    if evaluating or algorithm.max_lag == 0:
                        stream.wait_for_adoption(should_abort)
            metrics = summarize(batch.groups, version=version, discarded=batch.discarded)
            metrics |= {**batch.metrics, **result.metrics, **parts.rewards.metrics()}
            metrics |= parts.audit(batch, *stream.snapshot())
            metrics |= clock.metrics(sampled_tokens(batch.groups)) | guard.saver.metrics()
            if evaluating and guard.continues(result):
                with guard.deferred_errors("evaluating"):
                    metrics |= evaluate(parts, config, step)
            guard.finish(step, metrics, batch, result)
            if guard.saver.due(step) or parts.should_stop():
                written = guard.save(step)
                if parts.should_stop() and written:  # also if asked to during the save
                    return step
    return guard.reached


def evaluation_due(run: RunConfig, step: int) -> bool:
    return step == run.steps or (run.eval_every > 0 and step % run.eval_every == 0)


def _evaluation_missing(parts: Parts, run: RunConfig, start: int) -> bool:
    """Return True if a run must evaluate before its first step: it is new, or was cut off."""
    due = bool(parts.heldout) and evaluation_due(run, start)
    return start == 0 or (due and not parts.journal.evaluated(start))


def evaluate(parts: Parts, config: Config, step: int) -> dict[str, Metric]:
    """Return `eval/<set>/pass@1`, `score` and `unscored` of every held-out set
    (`keel.rl.evaluation`).

    Raises `Cancelled` once `parts.should_abort()` or, before the last step,
    `parts.should_skip_evaluation()`.
    """
    should_skip = parts.should_skip_evaluation if step < config.run.steps else never
    score = partial(parts.rewards.submit, purpose="eval")
    scored = {
        name: [then(parts.rollouts.submit(prompt, "eval"), score) for prompt in prompts]
        for name, prompts in parts.heldout.items()
    }
    every = [future for futures in scored.values() for future in futures]
    # Episodes have turns without a common limit, so decoding steps say little about them.
    count = None if config.with_agents else parts.decoding_steps
    before = count() if count else 0
    most = decoding_steps(config, len(every) * config.eval.samples)

    def tick() -> bool:
        """Show whichever count is further; all prompts may be in flight before any is done."""
        done = sum(future.done() for future in every)
        steps = min(count() - before, most) if count else 0
        if every and done * most >= steps * len(every):
            parts.journal.reach(done, len(every), "prompts")
        elif every:
            parts.journal.reach(steps, most, "decoding steps")
        return parts.should_abort() or should_skip()

    try:
        metrics = {
            f"eval/{name}/{metric}": value
            for name, futures in scored.items()
            for metric, value in evaluation([wait_for(f, tick) for f in futures]).items()
        }
        tick()
        return metrics
    finally:
        for future in every:
            future.cancel()


@dataclass(slots=True)
class Clock:
    """Seconds of a step by activity. Nested timings are not counted twice."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(IDLE, 0.0))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        began, inner = time.perf_counter(), sum(self.seconds.values())
        yield
        spent = time.perf_counter() - began - (sum(self.seconds.values()) - inner)
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def metrics(self, tokens: int) -> dict[str, Metric]:
        total = sum(self.seconds.values())
        times = {f"time/{name}": Sum(spent) for name, spent in self.seconds.items()}
        return {
            **times,
            "time/step": Sum(total),
            "time/idle_fraction": Mean(sum(self.seconds.get(name, 0.0) for name in IDLE), total),
            "throughput/tokens_per_second": Mean(tokens, total),
        }
