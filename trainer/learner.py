"""Run the trainer's ranks as Ray actors. If ranks fail, find out which error to raise."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from keel.configs.schema import Config, ConfigError
from keel.model import ray_timeouts
from keel.model.batch_invariant import variables
from keel.model.ray_timeouts import Deadline
from keel.rl.futures import done
from keel.rl.metrics import Metric, Sum, merge
from keel.rl.packing import TrainBatch
from keel.rl.sft import SftExample
from keel.rl.types import ScoredGroup, StepResult, TokenNumbers
from keel.trainer.batch_stream import never_abort
from keel.trainer.nonfinite import describe_findings
from keel.trainer.placement import hardware
from keel.trainer.run.checkpoint import SaveError
from keel.trainer.run.folder import MARK
from keel.trainer.run.manifest import Entry
from keel.trainer.run.restarts import CollectiveTimeout, OutOfMemory, WorkerLost
from keel.trainer.run.trajectory_files import watched_segments
from keel.trainer.worker import (
    RankLocation,
    StepReport,
    TrainerWorker,
    last_lines,
    merge_tokens,
    plan_shares,
)
from keel.weights.sync import Outcome, Receiver

GRACE_S = 5.0  # seconds to wait for reports from the other ranks after one rank has failed
_LOST_S = 90.0
"""Seconds to wait for the other ranks' reports if a lost rank could have caused the failure. Ray
takes 65 s to declare an unresponsive node dead."""
STEP = "an optimizer step"
PACKING = "packing"
_GONE = "their recordings were lost with the node that sampled them"
_LOG = logging.getLogger(__name__)
_OWN_FAILURES = ("SaveError", "UpdateOutOfMemory", "OutOfMemoryError")
"""Errors of a rank that cannot be a consequence of another rank's death."""
_SLOWDOWN, _MIN_S = 10.0, 300.0
"""A repeated call is considered lost after this multiple of its expected duration, but never before
this many seconds."""


def _error_name(error: BaseException) -> str:
    """Return the class name of an error raised by a rank itself, or "" for an error raised by Ray.
    Ray has its own `OutOfMemoryError`, which means that a node ran out of host memory."""
    return "" if isinstance(error, RayError) else type(error).__name__


@dataclass(frozen=True, slots=True)
class _StepDeadline:
    """Deadline for a call to the ranks, and the knob to name in the error message if it passes."""

    what: str
    seconds: float
    knob: str
    left: Deadline | None = None  # the remaining time if several waits share one deadline


class _StepDeadlines:
    """Computes the deadline for each kind of call to the ranks."""

    def __init__(self, timeout_s: float, sending_s: float) -> None:
        """Allow `timeout_s` (`trainer.timeout_s`) per optimizer step, plus `sending_s` if weights
        are still being sent."""
        self._timeout_s, self._sending_s = timeout_s, sending_s
        self._knobs = "trainer.timeout_s"
        self._knobs += ", and rollout.update_timeout_s of engines" * (sending_s > 0)
        self._longest_s: dict[str, float] = {}

    def for_call(self, what: str, times: int = 1) -> _StepDeadline:
        return _StepDeadline(what, times * self._timeout_s + self._sending_s, self._knobs)

    def estimate(self, what: str, times: int = 1) -> _StepDeadline:
        """Estimate a deadline from how long earlier calls took. It never exceeds the configured
        deadline."""
        longest = self.for_call(what, times)
        if what not in self._longest_s:
            return longest
        expected_s = self._longest_s[what]
        seconds = max(_MIN_S, _SLOWDOWN * expected_s) + self._sending_s
        if seconds >= longest.seconds:
            return longest
        knob = f"earlier calls took up to {expected_s:.0f} s; at most {self._knobs}"
        return _StepDeadline(what, seconds, knob)

    def record_duration(self, what: str, seconds: float) -> None:
        self._longest_s[what] = max(self._longest_s.get(what, 0.0), seconds)


class Learner:
    """Controls the trainer ranks from the driver."""

    def __init__(
        self,
        model_path: str,
        config: Config,
        *,
        gpu: bool,
        actor_options: Callable[[int], Mapping[str, Any]] | None = None,
        put_to_sleep: Callable[[], Future[None]] = done,
    ) -> None:
        """Create one Ray actor per rank. `actor_options(i)` returns the Ray options for rank i. By
        default, each rank reserves one GPU, or half a core if there are no GPUs. `put_to_sleep`
        starts putting the engines to sleep (`rollout.time_share`), and is called before every
        operation that needs the weights on the GPUs."""
        self._model_path, self._config, self._put_to_sleep = model_path, config, put_to_sleep
        transfer = config.rollout.weight_transfer
        self.direct = transfer == "direct" or (transfer == "auto" and gpu)
        """True if the ranks send weights directly to the engines."""
        seat = {"num_cpus": 1, "num_gpus": 1} if gpu else {"num_cpus": hardware.RANK_CPUS}
        options = seat | {"runtime_env": {"env_vars": variables(config.model.batch_invariant)}}
        trainer = config.trainer
        self._ranks: list[Any] = [
            ray_timeouts.create(
                TrainerWorker,
                f"trainer rank {rank}",
                {**options, **(actor_options(rank) if actor_options else {})},
                rank,
                trainer.ranks,
                gpu=gpu,
            )
            for rank in range(trainer.ranks)
        ]
        self._prepared = [ray_timeouts.call(rank.prepare) for rank in self._ranks]
        for rank in self._ranks:  # not waited for: the calls of `start` queue behind it
            ray_timeouts.call(rank.read, model_path, config)
        self._order = threading.Lock()
        """Lock held while calling all ranks, so that every rank receives its calls in the same
        order."""
        self._senders: list[threading.Thread] = []
        self._locations: list[RankLocation] = []
        self._version = 0
        sending_s = config.sending_timeout_s if self.direct else 0.0
        self._deadlines = _StepDeadlines(trainer.timeout_s, sending_s)
        self.say: Callable[[str], object] = _LOG.warning
        """Receives messages about groups that are left out."""
        self.tokens: Mapping[int, TokenNumbers] = {}
        """Per-token values from the last step for the segments to be saved, keyed by segment."""

    @property
    def version(self) -> int:
        return self._version

    def wait_until_prepared(self) -> None:
        """Wait until every rank has imported and checked its libraries. Doesn't need a GPU."""
        seconds = self._config.run.startup_timeout_s
        what = "loading the trainer's libraries"
        self._wait(self._prepared, _StepDeadline(what, seconds, "run.startup_timeout_s"))

    def start(self, timeout_s: float | None = None) -> list[str]:
        """Load the model on every rank within `timeout_s`. Returns the notes from rank 0."""
        seconds = timeout_s or self._config.run.startup_timeout_s
        shared = ray_timeouts.Deadline(seconds)
        deadline = _StepDeadline("the trainer's start", seconds, "run.startup_timeout_s", shared)
        self._locations = self._call_all("location", deadline=deadline)
        mark = Path(self._config.run.dir).expanduser().absolute() / MARK
        texts = self._call_all("read_text", str(mark), deadline=deadline) if mark.exists() else []
        for rank, text in enumerate(texts):
            if text != mark.read_text():
                raise ConfigError(
                    f"run.dir = {mark.parent}: trainer rank {rank} on {self._locations[rank].host} "
                    "does not see it. It must be on a file system that all machines share"
                )
        (rendezvous,) = self._wait([ray_timeouts.call(self._ranks[0].listen)], deadline)
        arguments = (self._model_path, self._config, rendezvous)
        return self._call_all("start", *arguments, deadline=deadline)[0]

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult:
        """Take the optimizer steps for a batch. Each rank fetches and packs the recordings of its
        share. Groups whose recordings are lost are left out and counted as dropped."""
        asleep = self._put_to_sleep()
        watched, kept = watched_segments(groups, self._config.run), groups
        shares = plan_shares(groups, self._config, watched)
        while True:
            lost = set[Any]().union(*self._call_with_shares("pack", shares, PACKING))
            if not lost:
                break
            kept = [group for group in kept if lost.isdisjoint(group.keys)]
            self.say(f"{len(groups) - len(kept)} of {len(groups)} groups are left out: {_GONE}")
            if not any(group.group.trajectories for group in kept):
                raise WorkerLost(f"no group is left: {_GONE}")
            shares = plan_shares(kept, self._config, watched)
        ray_timeouts.await_future(asleep)
        reports = self._call_with_shares("step_packed", (), STEP, len(shares[0]))
        result = self._combine_reports(reports, kept)
        before, after = (sum(len(g.group.trajectories) for g in each) for each in (groups, kept))
        dropped = {"rollout/dropped_completions": Sum(before - after)}
        return replace(result, metrics={**result.metrics, **dropped}) if after < before else result

    def train(
        self,
        shares: Sequence[Sequence[TrainBatch]],
        groups: Sequence[ScoredGroup | SftExample] = (),
    ) -> StepResult:
        """Take one optimizer step per batch. `shares` has a list of batches for each group of
        ranks. `groups` are the completion groups in these batches, used only in messages about
        non-finite values. Raises OutOfMemory if a step doesn't fit on a rank's GPU."""
        reports = self._call_with_shares("step", shares, STEP, max(map(len, shares)))
        return self._combine_reports(reports, groups)

    def _combine_reports(
        self, reports: Sequence[StepReport], groups: Sequence[ScoredGroup | SftExample]
    ) -> StepResult:
        if reports[0].out_of_memory:
            raise OutOfMemory(f"{STEP} did not fit: {reports[0].out_of_memory}", dropped=True)
        self._version = reports[0].version
        self.tokens = merge_tokens([report.tokens for report in reports])
        findings = [finding for report in reports for finding in report.findings]
        return StepResult(
            version=self._version,
            metrics=merge(report.metrics for report in reports),
            findings=describe_findings(findings, groups),
            gave_up=reports[0].gave_up,
        )

    def apply_config(self, config: Config) -> None:
        trainers = (self._config.trainer, config.trainer)
        before, now = ((t.activation_checkpointing, t.keeps_attention) for t in trainers)
        if now != before:
            deadline = self._deadlines.for_call("switching activation checkpointing")
            self._call_all("recompute", now[1], deadline=deadline)
        self._config = config

    def score(
        self,
        shares: Sequence[Mapping[str, TrainBatch]],
        should_abort: Callable[[], bool] = never_abort,
    ) -> dict[str, Metric]:
        """Score named batches of conversations and return `<name>/nll` for each batch, or an empty
        dict if `should_abort()` returns True. Each call to the ranks scores a single micro-batch,
        so that it finishes within the timeout for a step."""
        scored: list[dict[str, Metric]] = []
        for name in shares[0] if shares else ():
            rows = zip(*(share[name].micro_batches for share in shares), strict=True)
            for row in rows:
                if should_abort():
                    return {}
                pieces = [
                    {name: replace(share[name], micro_batches=(one,))}
                    for share, one in zip(shares, row, strict=True)
                ]
                what = f"scoring conversations of {name}"
                scored += self._call_with_shares("score", pieces, what)
        return merge(scored)

    def put_engines_to_sleep(self) -> None:
        ray_timeouts.await_future(self._put_to_sleep())

    def put_weights(self) -> list[ray.ObjectRef[Any]]:
        return self._call_all("put_weights", deadline=self._deadlines.for_call("the weights"))[0]

    def send(self, receivers: Sequence[Receiver]) -> list[Future[int]]:
        """Send the current weights to the engines once the ranks are idle. Rank i sends to engines
        i, i + ranks, and so on. Returns a future for each engine, which resolves to the engine's
        new weight version or raises an error from the engine or rank."""
        sent = {engine.index: Future[int]() for engine in receivers}
        ranks = len(self._ranks)
        served = [[one for one in receivers if one.index % ranks == n] for n in range(ranks)]
        with self._order:
            pairs = zip(self._ranks, served, strict=True)
            refs = [ray_timeouts.call(rank.send, engines) for rank, engines in pairs]

        def settle(outcomes: Mapping[int, Outcome]) -> None:
            for index, outcome in outcomes.items():
                with suppress(InvalidStateError):
                    if isinstance(outcome, BaseException):
                        sent[index].set_exception(outcome)
                    else:
                        sent[index].set_result(outcome)

        def wait() -> None:
            try:
                self._wait(refs, self._deadlines.for_call("sending weights to the engines"), settle)
            except Exception as error:  # the futures' waiters handle it
                settle(dict.fromkeys(sent, error))

        sender = threading.Thread(target=wait, daemon=True)
        self._senders = [*filter(threading.Thread.is_alive, self._senders), sender]
        sender.start()
        return [sent[engine.index] for engine in receivers]

    def save(self, folder: Path) -> dict[str, Entry]:
        parts = self._with_folder("save", folder, f"saving {folder}")
        return {name: entry for part in parts for name, entry in part.items()}

    def load(self, folder: Path) -> None:
        self._version = self._with_folder("load", folder, f"loading {folder}")[0]

    def export(self, folder: Path) -> dict[str, Entry]:
        parts = self._with_folder("export", folder, f"exporting to {folder}")
        return {name: entry for part in parts for name, entry in part.items()}

    def _with_folder(self, method: str, folder: Path, what: str) -> list[Any]:
        self.put_engines_to_sleep()
        return self._call_all(
            method, str(folder.absolute()), deadline=self._deadlines.for_call(what)
        )

    def shutdown(self) -> None:
        for rank in self._ranks:
            ray_timeouts.kill(rank)
        for sender in self._senders:  # these threads wait on Ray, which ends next
            sender.join(GRACE_S)

    def _call_all(self, method: str, *arguments: object, deadline: _StepDeadline) -> list[Any]:
        with self._order:
            refs = [ray_timeouts.call(getattr(rank, method), *arguments) for rank in self._ranks]
        return self._wait(refs, deadline)

    def _call_with_shares(
        self, method: str, shares: Sequence[Any], what: str, times: int = 1
    ) -> list[Any]:
        began, trainer = time.monotonic(), self._config.trainer
        # One object per group of ranks: each rank fetches its own share only.
        shipped = [(ray_timeouts.put(share),) for share in shares] or [()] * trainer.groups
        with self._order:
            refs = [
                ray_timeouts.call(
                    getattr(rank, method), *shipped[index // trainer.sequence_parallel]
                )
                for index, rank in enumerate(self._ranks)
            ]
        answers = self._wait(refs, self._deadlines.estimate(what, times))
        if not getattr(answers[0], "out_of_memory", ""):  # such a step ended early
            self._deadlines.record_duration(what, time.monotonic() - began)
        return answers

    def _wait(
        self,
        refs: Sequence[ray.ObjectRef[Any]],
        deadline: _StepDeadline,
        note: Callable[[Any], object] = lambda _: None,
    ) -> list[Any]:
        """Wait for one call on each rank and return the results in rank order. If a rank fails, its
        error is raised without waiting long for the other ranks, which are then stuck in a
        collective."""
        remaining = deadline.left or ray_timeouts.Deadline(deadline.seconds)
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        failures: dict[int, RayError] = {}
        while waiting and not any(map(ray_timeouts.is_loss, failures.values())):
            before = len(waiting)
            for ref in ray_timeouts.wait(list(waiting), seconds=remaining)[0]:
                rank = waiting[ref]
                try:
                    results[rank] = ray_timeouts.get(ref, seconds=ray_timeouts.CALL_S)
                    note(results[rank])
                except RayError as error:
                    if type(error) is GetTimeoutError:  # of our own call, not raised by the rank
                        continue
                    if not failures:
                        # The death of another rank first shows as an error of collectives
                        # (RuntimeError) or sockets (OSError).
                        cause = ray_timeouts.cause(error)
                        own = _error_name(cause) in _OWN_FAILURES
                        lost = isinstance(cause, RuntimeError | OSError) and not own
                        remaining = ray_timeouts.Deadline(_LOST_S if lost else GRACE_S)
                    failures[rank] = error
                del waiting[ref]
            if len(waiting) == before and not remaining.remaining():
                break
        if failures:
            raise self._combine_failures(failures, deadline.what, stuck=bool(waiting))
        if waiting:
            late = ", ".join(str(rank) + self._describe_rank(rank) for rank in waiting.values())
            raise WorkerLost(
                f"waited {deadline.seconds:.0f} s for {deadline.what}: no answer from trainer rank "
                f"{late} ({deadline.knob})"
            )
        return [results[rank] for rank in range(len(refs))]

    def _describe_rank(self, rank: int) -> str:
        if rank >= len(self._locations):  # not known before the start
            return ""
        return f" (process {self._locations[rank].pid} on {self._locations[rank].host})"

    def _combine_failures(
        self, failures: Mapping[int, RayError], what: str, *, stuck: bool
    ) -> RuntimeError:
        """Combine failures of several ranks into one error. If a rank died, its death is reported
        as the cause of the others. Set `stuck` if some ranks haven't answered."""
        lost = [rank for rank, error in failures.items() if ray_timeouts.is_loss(error)]
        rank = lost[0] if lost else next(iter(failures))
        error = failures[rank]
        cause, dead = ray_timeouts.cause(error), isinstance(error, RayActorError)
        if isinstance(cause, SaveError):  # the ranks are intact
            return SaveError(str(cause))
        text = f"trainer rank {rank} {'died' if dead else 'failed'} during {what}: {cause}"
        if dead and rank < len(self._locations):
            why = ray_timeouts.death_reason(error)
            place = self._describe_rank(rank)
            text = f"trainer rank {rank} died during {what}{why and ': '}{why}{place}\n"
            text += last_lines(self._locations[rank].log)
        if what == STEP and _error_name(cause) == "OutOfMemoryError":
            kind: type[RuntimeError] = OutOfMemory
        elif lost:
            kind = WorkerLost
        else:
            kind = CollectiveTimeout if stuck else RuntimeError
        failure = kind(text)
        failure.__cause__ = error
        return failure
