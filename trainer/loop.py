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
from keel.rl.futures import Cancelled, never_abort, then, wait_for
from keel.rl.metrics import Mean, Metric, Sum, merge
from keel.rl.summary import evaluation, sampled_tokens, summarize
from keel.rl.types import Group, Prompt, Purpose, ScoredGroup, StepResult
from keel.trainer.batch_stream import Batch, BatchStream, EmptyBatch

_IDLE = ("rollout", "reward")
"""Timings during which the trainer is idle, waiting for completions or rewards."""
Save = Callable[[int, Mapping[str, Any]], bool]
"""Writes a checkpoint for a step and a data position. Returns True if it was written, and False if
writing failed but the run should continue."""


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


class RunJournal(Protocol):
    """Records a run's results and displays its progress."""

    def begin(self, activity: str) -> None: ...

    def show_progress(self, done: int, total: int, unit: str) -> None: ...

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        groups: Sequence[ScoredGroup],
        discarded: Sequence[ScoredGroup] = (),
    ) -> None: ...

    def evaluated(self, step: int) -> bool: ...


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
    """Return True to end the run after the current step, and to cut evaluations but the last short.
    """
    dump_bad_batch: Callable[[int, Sequence[ScoredGroup], Sequence[str]], None]
    """Save the batch and the findings of a step with a non-finite gradient."""
    should_abort: Callable[[], bool]
    """Return True to end the run immediately. Raises an error if a process was lost."""
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
        should_abort=parts.should_abort,
        start=start,
    )
    guard = RunGuard(parts, run, stream, start)
    with guard.run():
        if start:  # the engines started from the base model
            wait_for(parts.push(learner.version), parts.should_abort)
        due = bool(parts.heldout) and evaluation_due(run, start)
        if start == 0 or (due and not parts.journal.evaluated(start)):  # the first, or missed
            parts.journal.begin("evaluating")
            parts.journal.record(start, evaluate(parts, config, start), [])
            if parts.should_stop():
                return start
        stream.open()
        for step in range(start + 1, run.steps + 1):
            clock, version = Clock(), learner.version
            with guard.sampling():
                batch = stream.take(clock.time)
            parts.journal.begin("training")
            with clock.time("train"):
                result = learner.step(batch.groups)
            if result.findings:
                parts.dump_bad_batch(step, batch.groups, result.findings)
            evaluating = evaluation_due(run, step)
            publishing = evaluating or step % algorithm.publish_every == 0
            if publishing and guard.continues(result):
                with clock.time("sync"), guard.deferred_errors("publishing weights"):
                    stream.wait_for_update()
                    stream.track_update(step, parts.push(result.version))
                    if evaluating or algorithm.max_lag == 0:
                        stream.wait_for_update()
            sampled = summarize(batch.groups, version=version, discarded=batch.discarded)
            metrics = merge([sampled, batch.metrics, result.metrics])  # both may count drops
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
    the last step, if `parts.should_stop()` does. A resumed run repeats the evaluation."""
    should_skip = parts.should_stop if step < config.run.steps else never_abort
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


class RunGuard:
    """Saves a final checkpoint when a run ends early.

    This happens if the run is aborted, or if sampling, scoring, publishing or evaluating fails and
    `handle_failure(error)` returns True. If an optimizer step fails, no checkpoint is saved,
    because the learner's state is lost.
    """

    def __init__(self, parts: Parts, run: RunConfig, stream: BatchStream, start: int) -> None:
        self.reached = start  # the last completed step
        self.saver = Saver(parts.save, run, start)
        self._stream, self._journal = stream, parts.journal
        self._should_abort, self._handle_failure = parts.should_abort, parts.handle_failure
        self._deferred: Exception | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        try:
            yield
        except Cancelled:
            self._stream.close()  # first; otherwise saving waits for engines to free memory
            if self.saver.saved < self.reached:
                self.saver.save(self.reached, self._stream.position())
        finally:
            self._stream.close()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        self._journal.begin("sampling")
        try:
            yield
        except Cancelled:
            raise
        except Exception as error:
            if self._handle_failure(error):
                self.final_checkpoint(error)
            raise

    @contextmanager
    def deferred_errors(self, activity: str) -> Iterator[None]:
        """Return a context for an activity after a step. Errors inside it are held back and raised
        by `finish`."""
        self._journal.begin(activity)
        try:
            yield
        except Cancelled:
            pass
        except Exception as error:
            if not self._handle_failure(error):
                raise
            self._deferred = error

    def continues(self, result: StepResult) -> bool:
        return not (result.gave_up or self._deferred or self._should_abort())

    def finish(
        self, step: int, metrics: Mapping[str, Metric], batch: Batch, result: StepResult
    ) -> None:
        """Record a step. Raises the error deferred by `deferred_errors`, if any, or RuntimeError if
        the learner gave up."""
        self._journal.record(step, metrics, batch.groups, batch.discarded)
        if result.gave_up:  # without a checkpoint: the policy may be broken
            raise RuntimeError(f"step {step}: {result.gave_up}")
        self.reached = step
        if self._deferred is not None:
            self.final_checkpoint(self._deferred)
            raise self._deferred

    def save(self, step: int) -> bool:
        self._journal.begin("saving a checkpoint")
        if self._should_abort():
            self._stream.close()
        return self.saver.save(step, self._stream.position())

    def final_checkpoint(self, error: Exception) -> None:
        """Save the last completed step before `error` ends the run, and add a note to the error
        explaining how to resume."""
        self._stream.close()
        untrained = error.prompts if isinstance(error, EmptyBatch) else ()
        try:
            if self.saver.saved < self.reached:
                self._journal.begin("saving a checkpoint")
                if not self.saver.save(self.reached, self._stream.position(untrained)):
                    return
            if self.reached:
                error.add_note(f"Rerun the same command to resume from step {self.reached}")
        except Exception as second:
            error.add_note(f"No checkpoint could be written: {second}")


@dataclass(slots=True)
class Saver:
    """Decides when a checkpoint is due, writes it, and keeps track of failed writes."""

    write: Save
    run: RunConfig
    saved: int  # the step of the newest checkpoint, or the step at which the run started
    tried_at: float = field(default_factory=lambda: time.monotonic())
    unwritten: int = 0

    def due(self, step: int) -> bool:
        run, since_s = self.run, time.monotonic() - self.tried_at
        by_steps = run.checkpoint_every > 0 and step % run.checkpoint_every == 0
        return step == run.steps or by_steps or 0 < run.checkpoint_minutes * 60 <= since_s

    def save(self, step: int, position: Mapping[str, Any]) -> bool:
        written = self.write(step, position)
        self.saved, self.tried_at = step if written else self.saved, time.monotonic()
        self.unwritten += not written
        return written

    def metrics(self) -> dict[str, Metric]:
        return {"checkpoint/unwritten": Sum(self.unwritten)} if self.unwritten else {}


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


class _SamplingProgress:
    """Estimates how much of a batch has been sampled, based on the finished prompts or the engines'
    decoding steps, whichever is further along."""

    def __init__(
        self, config: Config, prompts: int, samples: int, count_steps: Callable[[], int]
    ) -> None:
        """`count_steps` returns the number of decoding steps so far. It is ignored if the run has
        environments, because the number of turns in an episode can't be predicted."""
        rollout, completions = config.rollout, prompts * samples
        waves = -(-completions // rollout.capacity)
        self._most = min(rollout.engines, completions) * waves * rollout.sampling.max_tokens
        self._prompts, self._count = prompts, None if config.with_agents else count_steps
        self._before = self._count() if self._count else 0

    def estimate(self, finished: int) -> tuple[int, int, str]:
        steps = min(self._count() - self._before, self._most) if self._count else 0
        if steps * self._prompts > finished * self._most:
            return steps, self._most, "decoding steps"
        return finished, self._prompts, "prompts"
