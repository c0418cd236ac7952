"""The algorithm as a page: sample, score, step, publish.

Everything it drives is a Protocol, so it runs on Ray, vLLM and DeepSpeed (wired in
`commands/train.py`) or on fakes in a test, in milliseconds. How far sampling runs ahead of training
(`algorithm.max_lag`) is `keel.trainer.batch_stream`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
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
from keel.trainer.batch_stream import Abandoned, Feed, decoding_steps, never, wait_for

IDLE = ("rollout", "reward")
"""What the trainer waits for with nothing to do."""
Save = Callable[[int, Mapping[str, Any]], bool | None]
"""Writes a checkpoint of everything a run resumed after this step needs, the position in its data
among it. True if it could not, and has said so: the run goes on without."""


def nothing(*_: object) -> dict[str, Metric]:
    return {}


class Prompts(Protocol):
    """An endless, seeded order of training prompts."""

    def take(self, n: int) -> Sequence[Prompt]: ...

    def state(self, unfinished: Sequence[Prompt]) -> Mapping[str, Any]:
        """The position in it; `unfinished` prompts, taken already, come first again."""
        ...


class Rollouts(Protocol):
    """The engines that sample. Calls return at once; their futures have deadlines."""

    def submit(self, prompt: Prompt, purpose: Purpose) -> Future[Group]:
        """A late or failed group comes back with its reasons."""
        ...


class Rewards(Protocol):
    def submit(self, group: Group, purpose: Purpose) -> Future[ScoredGroup]: ...

    def metrics(self) -> Mapping[str, Metric]:
        """What scoring did since the last call, evaluations included."""
        ...


class Learner(Protocol):
    @property
    def version(self) -> int: ...

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult: ...


class Journal(Protocol):
    """Where a run is written down and shown."""

    def begin(self, activity: str) -> None: ...

    def reach(self, done: int, total: int, unit: str) -> None:
        """So much of what has begun last is done."""
        ...

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        sample: Sequence[ScoredGroup],
        discarded: Sequence[ScoredGroup] = (),
    ) -> None:
        """sample: what the step trained on; discarded: what was sampled for it besides."""
        ...

    def evaluated(self, step: int) -> bool:
        """Whether what an evaluation came to is recorded of a step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    prompts: Prompts
    rollouts: Rollouts
    rewards: Rewards
    learner: Learner
    push: Callable[[int], Future[None]]
    """Bring every engine to the learner's weights, which are this version."""
    journal: Journal
    heldout: Mapping[str, Sequence[Prompt]]
    save: Save
    """The position is that of `prompts`."""
    stop: Callable[[], bool]
    """Whether the user asked to stop after the current step."""
    keep: Callable[[int, Sequence[ScoredGroup], Sequence[str]], None]
    """Keeps the batch of a step without a finite gradient, and says what kept it from one."""
    account: Callable[[Batch, Mapping[str, Any], Sequence[Prompt]], Mapping[str, Metric]] = nothing
    """Told of each batch that has been trained on, with the position of `prompts` after it and what
    is to be discarded."""
    hurry: Callable[[], bool] = never
    """Return True to abort now and drop in-flight rollouts. Raises what makes waiting pointless,
    such as a lost process."""
    leave: Callable[[], bool] = never
    """Return True to cut evaluations short, since the user has asked to stop. One that is cut short
    is made when the run resumes; that of the last step is not cut short."""
    decoded: Callable[[], int] | None = None
    """Decoding steps of all engines so far; None if they are not counted."""
    whole: Callable[[Exception], bool] = lambda _: True
    """Whether the learner is, after what has gone wrong elsewhere: if so, the run ends with a
    checkpoint."""


def train(parts: Parts, config: Config, *, start: int = 0) -> int:
    """Run steps `start + 1 … config.run.steps`; returns the last step done.

    Stops early, with a checkpoint, when `parts.stop()` says so. Raises what engines or rewards end
    with, and `RuntimeError` when a whole batch of rollouts comes back empty, both after a
    checkpoint; and when the learner gives up.
    """
    run, algorithm, learner, hurry = config.run, config.algorithm, parts.learner, parts.hurry
    try:
        if start == 0:
            parts.journal.begin("evaluating")
            parts.journal.record(0, evaluate(parts, config, 0), [])
            if parts.stop():
                return start
        else:  # the engines started from the base model
            wait_for(parts.push(learner.version), hurry)
            if parts.heldout and evaluation_due(run, start) and not parts.journal.evaluated(start):
                parts.journal.begin("evaluating")  # which was cut off
                parts.journal.record(start, evaluate(parts, config, start), [])
                if parts.stop():
                    return start
    except Abandoned:
        return start
    if start >= run.steps:
        return start
    feed = Feed(
        config,
        next_prompts=parts.prompts.take,
        position=parts.prompts.state,
        sample=partial(parts.rollouts.submit, purpose="train"),
        score=partial(parts.rewards.submit, purpose="train"),
        start=start,
    )
    saver = Saver(parts.save, run, start)
    with closing(feed):
        feed.open()
        for step in range(start + 1, run.steps + 1):
            clock, version = Clock(), learner.version
            taken: list[Prompt] = []
            parts.journal.begin("sampling")
            try:
                batch = feed.take(clock.time, hurry)
                taken += [scored.group.prompt for scored in batch.groups]
                require_some(batch.groups, step)
            except Abandoned:
                feed.close()  # or engines that are to make room would be waited for
                if saver.saved < step - 1:
                    saver.save(step - 1, feed.position())
                return step - 1
            except Exception as error:
                if parts.whole(error):
                    save_at_last(parts, saver, feed, step - 1, error, again=taken)
                raise
            parts.journal.begin("training")
            with clock.time("train"):
                result = learner.step(batch.groups)
            if result.findings:
                parts.keep(step, batch.groups, result.findings)
            evaluating = evaluation_due(run, step) and not result.gave_up
            publishing = step % algorithm.publish_every == 0 and not result.gave_up
            ends: list[Exception] = []
            if not hurry() and (evaluating or publishing):
                parts.journal.begin("publishing weights")
                with clock.time("sync"), put_off(parts, ends):
                    feed.wait_for_adoption(hurry)
                    feed.adopting(step, parts.push(result.version))
                    if evaluating or algorithm.max_lag == 0:
                        feed.wait_for_adoption(hurry)
            metrics = summarize(batch.groups, version=version, discarded=batch.discarded)
            metrics |= {**batch.metrics, **result.metrics, **parts.rewards.metrics()}
            metrics |= parts.account(batch, *feed.standing())
            metrics |= clock.metrics(sampled_tokens(batch.groups)) | saver.metrics()
            if evaluating and not ends and not hurry():
                parts.journal.begin("evaluating")
                with put_off(parts, ends):
                    metrics |= evaluate(parts, config, step)
            parts.journal.record(step, metrics, batch.groups, batch.discarded)
            if result.gave_up:  # a policy that gives no gradient may be broken: no checkpoint of it
                raise RuntimeError(f"step {step}: {result.gave_up}")
            if ends:
                save_at_last(parts, saver, feed, step, ends[0])
                raise ends[0]
            if saver.due(step) or parts.stop():
                parts.journal.begin("saving a checkpoint")
                if hurry():
                    feed.close()
                written = saver.save(step, feed.position())
                if parts.stop() and written:  # or was asked to meanwhile
                    return step
    return run.steps


@contextmanager
def put_off(parts: Parts, ends: list[Exception]) -> Iterator[None]:
    """What engines or rewards end with is put off until the step is recorded and saved, if the
    learner can do that."""
    try:
        yield
    except Abandoned:
        pass
    except Exception as error:
        if not parts.whole(error):
            raise
        ends.append(error)


def save_at_last(
    parts: Parts,
    saver: Saver,
    feed: Feed,
    step: int,
    error: Exception,
    again: Sequence[Prompt] = (),
) -> None:
    """A checkpoint of the last step, unless there is one, before a run ends with this error, which
    is told what came of it. again: as in `Feed.position`."""
    feed.close()
    try:
        if saver.saved < step:
            parts.journal.begin("saving a checkpoint")
            if not saver.save(step, feed.position(again)):
                return
        if step:
            error.add_note(
                f"Started again in the same way, the run goes on from step {step}, whose "
                "checkpoint is there"
            )
    except Exception as second:
        error.add_note(f"No checkpoint could be written: {second}")


def evaluation_due(run: RunConfig, step: int) -> bool:
    return step == run.steps or (run.eval_every > 0 and step % run.eval_every == 0)


def evaluate(parts: Parts, config: Config, step: int) -> dict[str, Metric]:
    """Return `eval/<set>/pass@1`, `score` and `unscored` of every held-out set
    (`keel.rl.evaluation`).

    Raises `Abandoned` once `parts.hurry()`, and before the last step once `parts.leave()`.
    """
    leave = parts.leave if step < config.run.steps else never
    score = partial(parts.rewards.submit, purpose="eval")
    scored = {
        name: [then(parts.rollouts.submit(prompt, "eval"), score) for prompt in prompts]
        for name, prompts in parts.heldout.items()
    }
    every = [future for futures in scored.values() for future in futures]
    # An episode's turns have no limit in common, so decoding steps say little there.
    decoded = None if config.with_agents else parts.decoded
    before, most = (
        decoded() if decoded else 0,
        decoding_steps(config, len(every) * config.eval.samples),
    )

    def tick() -> bool:
        """Show the count that is further on: all prompts may be at work before any is done."""
        done = sum(future.done() for future in every)
        steps = min(decoded() - before, most) if decoded else 0
        if every and done * most >= steps * len(every):
            parts.journal.reach(done, len(every), "prompts")
        elif every:
            parts.journal.reach(steps, most, "decoding steps")
        return parts.hurry() or leave()

    try:
        found = {
            f"eval/{name}/{metric}": value
            for name, futures in scored.items()
            for metric, value in evaluation([wait_for(f, tick) for f in futures]).items()
        }
        tick()
        return found
    finally:
        for future in every:
            future.cancel()


def require_some(scored: Sequence[ScoredGroup], step: int) -> None:
    """Refuse to step on nothing, and say what happened to the completions."""
    if not any(len(group.rewards_G) for group in scored):
        reasons = {reason for group in scored for reason in group.group.dropped}
        raise RuntimeError(
            f"step {step}: none of {len(scored)} groups has a completion to learn from; "
            f"reasons given: {'; '.join(sorted(reasons)) or 'none'}"
        )


@dataclass(slots=True)
class Saver:
    """Writes checkpoints, and counts those that could not be."""

    write: Save
    run: RunConfig
    saved: int
    """The last step that is saved, or that the run began with."""
    tried_at: float = field(default_factory=lambda: time.monotonic())
    unwritten: int = 0

    def due(self, step: int) -> bool:
        run, since_s = self.run, time.monotonic() - self.tried_at
        by_steps = run.checkpoint_every > 0 and step % run.checkpoint_every == 0
        return step == run.steps or by_steps or 0 < run.checkpoint_minutes * 60 <= since_s

    def save(self, step: int, position: Mapping[str, Any]) -> bool:
        """Whether it is written."""
        failed = bool(self.write(step, position))
        self.saved, self.tried_at = self.saved if failed else step, time.monotonic()
        self.unwritten += failed
        return not failed

    def metrics(self) -> dict[str, Metric]:
        return {"checkpoint/unwritten": Sum(self.unwritten)} if self.unwritten else {}


@dataclass(slots=True)
class Clock:
    """Where a step's seconds went. Inner timings are not counted twice."""

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
