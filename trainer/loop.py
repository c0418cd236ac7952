"""The training loop: sample, score, train, push weights, evaluate and save.

The loop depends only on protocols, so it runs on Ray, vLLM and DeepSpeed (`run_loop` in
`commands/train.py` fills `Parts`) or on fakes in tests. With `publish_every: 1`,
`BatchStream` samples and scores up to `algorithm.max_lag` batches ahead. `RunGuard` handles aborts,
errors and checkpoints.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from keel.configs.schema import Config, RunConfig
from keel.rl.futures import never_abort, then, wait_for
from keel.rl.metrics import Mean, Metric, Sum, merge
from keel.rl.summary import evaluation, sampled_tokens, summarize
from keel.rl.types import Group, Prompt, Purpose, ScoredGroup, StepResult
from keel.trainer.batch_stream import BatchStream
from keel.trainer.guard import RunGuard, RunJournal, Save

_IDLE = ("rollout", "reward")
"""Timings during which the trainer is idle, waiting for completions or rewards."""


class Prompts(Protocol):
    """An endless stream of training prompts in seeded order."""

    def take(self, n: int) -> Sequence[Prompt]: ...

    def position(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        """Return a data position that makes a resumed run start with the `unfinished` prompts."""
        ...


class Rollouts(Protocol):
    def submit(self, prompt: Prompt, purpose: Purpose) -> Future[Group]:
        """Start sampling a group of completions and return right away."""
        ...


class Rewards(Protocol):
    def submit(self, group: Group, purpose: Purpose) -> Future[ScoredGroup]: ...

    def metrics(self) -> Mapping[str, Metric]: ...


class PolicyLearner(Protocol):
    @property
    def version(self) -> int: ...

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    prompts: Prompts
    rollouts: Rollouts
    rewards: Rewards
    learner: PolicyLearner
    push: Callable[[int], Future[None]]
    """Send the learner's current weights, with this version, to every engine."""
    journal: RunJournal
    heldout: Mapping[str, Sequence[Prompt]]
    save: Save
    should_stop: Callable[[], bool]
    """Return True to end the run after the current step."""
    dump_bad_batch: Callable[[int, Sequence[ScoredGroup], Sequence[str]], None]
    """Save the batch and the findings of a step with a non-finite gradient."""
    should_abort: Callable[[], bool]
    """Return True to end the run immediately. Raises an error if a process was lost."""
    should_skip_evaluation: Callable[[], bool]
    """Return True to cut an evaluation short. A resumed run repeats it. The last evaluation is
    never cut short."""
    decoding_steps: Callable[[], int]
    """Return the total number of decoding steps of all engines."""
    handle_failure: Callable[[Exception], bool]
    """Handle an error in sampling, publishing or evaluating, which will end the run. Return True if
    the learner is intact, so that a final checkpoint can be saved."""


def train(parts: Parts, config: Config, *, start: int = 0) -> int:
    """Run steps `start + 1` to `config.run.steps` and return the last completed step.

    The run ends early, with a checkpoint, when `parts.should_stop()` or `parts.should_abort()`
    returns True. `RunGuard` says which errors end it after a checkpoint. It raises RuntimeError
    without one if a step result has `gave_up` set.
    """
    run, algorithm, learner = config.run, config.algorithm, parts.learner
    stream = BatchStream(
        config,
        next_prompts=parts.prompts.take,
        position=parts.prompts.position,
        sample=partial(parts.rollouts.submit, purpose="train"),
        score=partial(parts.rewards.submit, purpose="train"),
        start=start,
    )
    should_abort = parts.should_abort
    guard = RunGuard(
        run, start, stream, parts.journal, parts.save, should_abort, parts.handle_failure
    )
    with guard.run():
        if start:  # the engines started from the base model
            wait_for(parts.push(learner.version), should_abort)
        due = bool(parts.heldout) and evaluation_due(run, start)
        if start == 0 or (due and not parts.journal.evaluated(start)):  # the baseline, or missed
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
                    stream.wait_for_update(should_abort)
                    stream.track_update(step, parts.push(result.version))
                    if evaluating or algorithm.max_lag == 0:
                        stream.wait_for_update(should_abort)
            sampled = summarize(batch.groups, version=version, discarded=batch.discarded)
            metrics = merge([sampled, batch.metrics, result.metrics])  # both can drop completions
            metrics |= parts.rewards.metrics()
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


def evaluate(parts: Parts, config: Config, step: int) -> dict[str, Metric]:
    """Evaluate every held-out set and return `eval/<set>/pass@1`, `score` and `unscored` for each
    (see `keel.rl.summary`). Raises `Cancelled` if `parts.should_abort()` returns True or, before
    the last step, if `parts.should_skip_evaluation()` does."""
    should_skip = parts.should_skip_evaluation if step < config.run.steps else never_abort
    score = partial(parts.rewards.submit, purpose="eval")
    scored = {
        name: [then(parts.rollouts.submit(prompt, "eval"), score) for prompt in prompts]
        for name, prompts in parts.heldout.items()
    }
    every = [future for futures in scored.values() for future in futures]
    progress = _SamplingProgress(config, len(every), config.eval.samples, parts.decoding_steps)

    def tick() -> bool:
        parts.journal.show_progress(*progress.estimate(sum(future.done() for future in every)))
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


class _SamplingProgress:
    """Estimates how much of a batch has been sampled, based on the finished prompts or the engines'
    decoding steps, whichever is further along."""

    def __init__(
        self, config: Config, prompts: int, samples: int, count_steps: Callable[[], int]
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


@dataclass(slots=True)
class Clock:
    """Measures how many seconds a step spends on each activity. Nested activities are counted only
    once. Evaluating and saving aren't timed, so they don't count towards `time/step` and
    `throughput/tokens_per_second`."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_IDLE, 0.0))

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
            "time/idle_fraction": Mean(sum(self.seconds.get(name, 0.0) for name in _IDLE), total),
            "throughput/tokens_per_second": Mean(tokens, total),
        }
