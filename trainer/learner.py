"""The driver's handle on the trainer: ranks as Ray actors, and what to say when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from keel.configs.schema import Config, ConfigError
from keel.model import ray_timeouts
from keel.model.batch_invariant import variables
from keel.rl.futures import done
from keel.rl.metrics import Metric, merge
from keel.rl.packing import TrainBatch
from keel.rl.sft import SftExample
from keel.rl.types import ScoredGroup, StepResult, TokenNumbers
from keel.trainer.batch_stream import never
from keel.trainer.nonfinite import said_of
from keel.trainer.placement import hardware
from keel.trainer.placement.step_deadlines import StepDeadline, StepDeadlines, micro_batch_count
from keel.trainer.run.checkpoint import SaveError
from keel.trainer.run.folder import MARK
from keel.trainer.run.manifest import Entry
from keel.trainer.run.restarts import CollectiveTimeout, OutOfMemory, WorkerLost
from keel.trainer.worker import (
    StepReport,
    TrainerWorker,
    Whereabouts,
    joined_tokens,
    last_lines,
    shares,
)
from keel.weights.sync import Outcome, Receiver, sends_directly

GRACE_S, LOST_S = 5.0, 90.0
"""After one rank's failure: wait this long to learn what the others say; and where it may be that
another is gone (`maybe_of_another`), until Ray knows. It gives up a silent node after 65 s."""
STEP = "an optimizer step"


class Engine(Protocol):
    """A rollout engine that weights can be sent to."""

    @property
    def index(self) -> int: ...
    @property
    def actor(self) -> Any: ...


class Learner:
    """All ranks of the trainer. `keel.trainer.loop.PolicyLearner` is its Protocol."""

    def __init__(
        self,
        model_path: str,
        config: Config,
        *,
        gpu: bool,
        actor_options: Callable[[int], Mapping[str, Any]] | None = None,
        make_room: Callable[[], Future[None]] = done,
    ) -> None:
        """`actor_options(i)`: Ray options of rank i, over the defaults (one GPU each where `gpu`;
        half a core else, since CPU ranks and engines alternate). `make_room` is called, and
        waited for, before whatever needs the weights on the GPUs (`rollout.time_share`: engines may
        be in the way)."""
        self._model_path, self._config, self._make_room = model_path, config, make_room
        self.direct = sends_directly(config.rollout, gpu=gpu)
        """Whether ranks send weights to the engines themselves."""
        seat = {"num_cpus": 1, "num_gpus": 1} if gpu else {"num_cpus": hardware.RANK_CPUS}
        options = seat | {"runtime_env": {"env_vars": variables(config.model.batch_invariant)}}
        trainer = config.trainer
        self._ranks: list[Any] = [
            ray_timeouts.create(
                TrainerWorker,
                f"trainer rank {rank}",
                {**options, **(actor_options(rank) if actor_options else {})},
                *(rank, trainer.ranks),
                gpu=gpu,
            )
            for rank in range(trainer.ranks)
        ]
        self._prepared = [ray_timeouts.call(rank.prepare) for rank in self._ranks]
        for rank in self._ranks:  # nobody waits for that but `start`, whose calls come after it
            ray_timeouts.call(rank.read, model_path, config)
        self._warming: list[list[Any]] = []
        self._order = threading.Lock()
        """Held to call all ranks: calls from two threads reach all of them in the same order."""
        self._senders: list[threading.Thread] = []
        self._whereabouts: list[Whereabouts] = []
        self._version = 0
        sending_s = config.sending_timeout_s if self.direct else 0.0
        self._limits = StepDeadlines(trainer.timeout_s, sending_s)
        self.tokens: Mapping[int, TokenNumbers] = {}
        """What the ranks saw in the last step of the segments that `saved` chose, by number."""

    @property
    def version(self) -> int:
        """Version of the current weights; 0 for those the run started from."""
        return self._version

    def prepared(self) -> None:
        """Wait until every rank has loaded its libraries, and found in them what this run needs.

        That takes seconds and no GPU, so a run can end here before an engine is up."""
        seconds = self._config.run.startup_timeout_s
        limit = StepDeadline("loading the trainer's libraries", seconds, "run.startup_timeout_s")
        self._wait(self._prepared, limit)

    def start(self, timeout_s: float | None = None) -> list[str]:
        """Wait until every rank has loaded the model (default: `run.startup_timeout_s`).

        Returns a line for each thing that is lost with these versions of the libraries, which rank
        0 has found in looking at them (`TrainerEngine.notes`).
        """
        seconds = timeout_s or self._config.run.startup_timeout_s
        left = ray_timeouts.Deadline(seconds)
        limit = StepDeadline("the trainer's start", seconds, "run.startup_timeout_s", left)
        self._whereabouts = self._all("whereabouts", limit=limit)
        self._check_folder(limit)
        (rendezvous,) = self._wait([ray_timeouts.call(self._ranks[0].listen)], limit)
        return self._all("start", self._model_path, self._config, rendezvous, limit=limit)[0]

    def _check_folder(self, limit: StepDeadline) -> None:
        """Raises ConfigError unless all ranks see the folder of the run, if this is one: else that
        would come out with the first checkpoint."""
        mark = Path(self._config.run.dir).expanduser().absolute() / MARK
        if not mark.exists():
            return
        found: list[str] = self._all("sees", str(mark), limit=limit)
        for rank, (said, place) in enumerate(zip(found, self._whereabouts, strict=True)):
            if said != mark.read_text():
                raise ConfigError(
                    f"run.dir = {mark.parent}: trainer rank {rank} on {place.host} does not see "
                    "it. It must be on a file system that all machines of the run share"
                )

    def warm_up(self, *, whole: bool = False) -> None:
        """Have the ranks compile what steps need, beside the engines' start and first completions:
        not waited for before the first step (`TrainerEngine.warm_up`)."""
        with self._order:
            self._warming.append([ray_timeouts.call(rank.warm_up, whole) for rank in self._ranks])

    def step(self, groups: Sequence[ScoredGroup], *, examine: bool = False) -> StepResult:
        """Train on one batch of rollouts: `algorithm.updates_per_batch` optimizer steps. examine:
        `TrainerEngine.step`."""
        room = self._make_room()
        packed = shares(groups, self._config)
        ray_timeouts.awaited(room)
        return self.train(packed, groups, examine=examine)

    def train(
        self,
        shares: Sequence[Sequence[TrainBatch]],
        groups: Sequence[ScoredGroup | SftExample] = (),
        *,
        examine: bool = False,
    ) -> StepResult:
        """An optimizer step on each batch of the share of each group of ranks. groups: of which
        they were packed, to name what was found in them. examine: `TrainerEngine.step`."""
        updates = max(map(len, shares), default=1)
        reports: list[StepReport] = self._deal("step", shares, STEP, updates, examine=examine)
        if reports[0].out_of_memory:
            raise OutOfMemory(f"{STEP} did not fit: {reports[0].out_of_memory}", dropped=True)
        self._version = reports[0].version
        self.tokens = joined_tokens([report.tokens for report in reports])
        metrics = merge(report.metrics for report in reports)
        return StepResult(
            version=self._version,
            metrics=metrics,
            findings=said_of([found for report in reports for found in report.findings], groups),
            gave_up=reports[0].gave_up,
        )

    def lowered(self, config: Config) -> None:
        """Go on with the smaller micro-batches of `config`, or with activation checkpointing."""
        trainers = (self._config.trainer, config.trainer)
        before, now = ((t.activation_checkpointing, t.keeps_attention) for t in trainers)
        if now != before:
            self._all(
                "recompute", now[1], limit=self._limits.of("switching activation checkpointing")
            )
        self._config = config

    def score(
        self, shares: Sequence[Mapping[str, TrainBatch]], hurry: Callable[[], bool] = never
    ) -> dict[str, Metric]:
        """`<name>/nll` of named batches of conversations, by the current weights: a micro-batch of
        each rank at a time, since the deadline is a step's and a set may be of any size. Nothing if
        `hurry` says meanwhile that there is no time for it."""
        scored: list[dict[str, Metric]] = []
        for name in shares[0] if shares else ():
            rows = zip(*(share[name].micro_batches for share in shares), strict=True)
            for row in rows:
                if hurry():
                    return {}
                pieces = [
                    {name: replace(share[name], micro_batches=(one,))}
                    for share, one in zip(shares, row, strict=True)
                ]
                scored += self._deal("score", pieces, f"scoring conversations of {name}")
        return merge(scored)

    def _deal(
        self, method: str, shares: Sequence[Any], what: str, times: int = 1, **options: bool
    ) -> list[Any]:
        """Call a method of every rank with the share of its group. times: that it may take as long
        as one step may."""
        if self._warming:
            for refs in self._warming:
                self._wait(refs, self._limits.of("compiling kernels"))
            self._warming = []
        began, work = time.monotonic(), micro_batch_count(shares[0])
        # One object a group of ranks: each fetches its own share and nothing else.
        shipped = [ray_timeouts.put(share) for share in shares]
        with self._order:
            refs = [
                ray_timeouts.call(
                    getattr(rank, method),
                    shipped[index // self._config.trainer.sequence_parallel],
                    **options,
                )
                for index, rank in enumerate(self._ranks)
            ]
        answers = self._wait(refs, self._limits.likely(what, work, times))
        if not getattr(answers[0], "out_of_memory", ""):  # which ends it before its time
            self._limits.took(what, work, time.monotonic() - began)
        return answers

    def make_room(self) -> None:
        """Put sleeping engines out of the way of the weights (`rollout.sleep`)."""
        ray_timeouts.awaited(self._make_room())

    def put_weights(self) -> list[ray.ObjectRef[Any]]:
        """Have rank 0 put the current weights into Ray's object store, bucket by bucket."""
        return self._all("put_weights", limit=self._limits.of("the weights"))[0]

    def send(self, engines: Sequence[Engine]) -> list[Future[int]]:
        """Bring `engines` straight to the current weights, once what the ranks are doing is done.

        The futures have the version that each engine then samples from, or say why it does not; a
        rank's failure fails all of them. Rank i sends to engines i, i + ranks, …
        """
        sent = {engine.index: Future[int]() for engine in engines}
        shares = [
            [
                Receiver(engine.index, engine.actor)
                for engine in engines
                if engine.index % len(self._ranks) == rank
            ]
            for rank in range(len(self._ranks))
        ]
        with self._order:
            refs = [
                ray_timeouts.call(rank.send, share)
                for rank, share in zip(self._ranks, shares, strict=True)
            ]
        sender = threading.Thread(target=self._sending, args=(refs, sent), daemon=True)
        self._senders = [*filter(threading.Thread.is_alive, self._senders), sender]
        sender.start()
        return [sent[engine.index] for engine in engines]

    def _sending(self, refs: Sequence[ray.ObjectRef[Any]], sent: Mapping[int, Future[int]]) -> None:
        """Tell each engine's future what became of it, as soon as its rank has said so."""

        def note(outcomes: Mapping[int, Outcome]) -> None:
            for index, outcome in outcomes.items():
                with suppress(InvalidStateError):
                    if isinstance(outcome, BaseException):
                        sent[index].set_exception(outcome)
                    else:
                        sent[index].set_result(outcome)

        try:
            self._wait(refs, self._limits.of("sending weights to the engines"), note)
        except Exception as error:  # whatever it is, somebody waits for these futures
            note(dict.fromkeys(sent, error))

    def save(self, folder: Path) -> dict[str, Entry]:
        """Write what `load` needs into `folder`, which all ranks must see. Returns the files."""
        ray_timeouts.awaited(self._make_room())
        limit = self._limits.of(f"saving {folder}")
        return _joined(self._all("save", str(folder.absolute()), limit=limit))

    def load(self, folder: Path) -> None:
        """Continue from `save`, exactly. Call it right after `start`."""
        ray_timeouts.awaited(self._make_room())
        limit = self._limits.of(f"loading {folder}")
        reports: list[StepReport] = self._all("load", str(folder.absolute()), limit=limit)
        self._version = reports[0].version

    def export(self, folder: Path) -> dict[str, Entry]:
        """Write the weights and the tokenizer as a model folder for transformers or vLLM. Returns
        the files."""
        ray_timeouts.awaited(self._make_room())
        limit = self._limits.of(f"exporting to {folder}")
        return _joined(self._all("export", str(folder.absolute()), limit=limit))

    def shutdown(self) -> None:
        """End every rank. Safe to call twice, and after a failure."""
        for rank in self._ranks:
            ray_timeouts.kill(rank)
        for sender in self._senders:  # or Ray would end while they wait for it
            sender.join(GRACE_S)

    def _all(self, method: str, *arguments: object, limit: StepDeadline) -> list[Any]:
        """Call a method of every rank; the results by rank."""
        with self._order:
            refs = [ray_timeouts.call(getattr(rank, method), *arguments) for rank in self._ranks]
        return self._wait(refs, limit)

    def _wait(
        self,
        refs: Sequence[ray.ObjectRef[Any]],
        limit: StepDeadline,
        note: Callable[[Any], object] = lambda _: None,
    ) -> list[Any]:
        """Results in the order of `refs`, the first of which is rank 0's. note: told of each as
        soon as it is there.

        Raises soon after one rank fails: the others are then waiting for it in a collective.
        """
        left = limit.left or ray_timeouts.Deadline(limit.seconds)
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        failures: dict[int, RayError] = {}
        while waiting and not any(map(ray_timeouts.is_loss, failures.values())):
            before = len(waiting)
            for ref in ray_timeouts.wait(list(waiting), seconds=left)[0]:
                rank = waiting[ref]
                try:
                    results[rank] = ray_timeouts.get(ref, seconds=ray_timeouts.CALL_S)
                    note(results[rank])
                except RayError as error:
                    if type(error) is GetTimeoutError:  # Ray's own, and not what the rank raised
                        continue
                    if not failures:
                        left = ray_timeouts.Deadline(LOST_S if maybe_of_another(error) else GRACE_S)
                    failures[rank] = error
                del waiting[ref]
            if len(waiting) == before and not left.remaining():
                break
        if failures:
            raise self._failure(failures, limit.what, stuck=bool(waiting))
        if waiting:
            raise self._late(limit, list(waiting.values()))
        return [results[rank] for rank in range(len(refs))]

    def _late(self, limit: StepDeadline, ranks: Sequence[int]) -> WorkerLost:
        """Of ranks that have not answered in time."""
        places = [self._whereabouts[rank] for rank in ranks if rank < len(self._whereabouts)]
        where = ", ".join(f"process {place.pid} on {place.host}" for place in places)
        return WorkerLost(
            f"waited {limit.seconds:.0f} s for {limit.what}: no answer from trainer rank "
            f"{', '.join(map(str, ranks))}{where and f' ({where})'} ({limit.knob})"
        )

    def _failure(self, failures: Mapping[int, RayError], what: str, *, stuck: bool) -> RuntimeError:
        """One error for all: a rank that died explains the others, which lost their peer. stuck:
        some have not answered."""
        lost = [rank for rank, error in failures.items() if ray_timeouts.is_loss(error)]
        rank = lost[0] if lost else next(iter(failures))
        error = failures[rank]
        cause, dead = ray_timeouts.cause(error), isinstance(error, RayActorError)
        if isinstance(cause, SaveError):  # the ranks are well
            return SaveError(str(cause))
        text = f"trainer rank {rank} {'died' if dead else 'failed'} during {what}: {cause}"
        if dead and rank < len(self._whereabouts):
            place = self._whereabouts[rank]
            why = ray_timeouts.death_reason(error)
            text = f"trainer rank {rank} died during {what}{why and ': '}{why}"
            text += f"\n(process {place.pid} on {place.host})\n{last_lines(place.log)}"
        short = what == STEP and type(cause).__name__ == "OutOfMemoryError"  # torch's
        plain = CollectiveTimeout if stuck else RuntimeError
        failure = OutOfMemory(text) if short else WorkerLost(text) if lost else plain(text)
        failure.__cause__ = error
        return failure


def maybe_of_another(error: RayError) -> bool:
    """Whether a rank's failure may come of another's end: of that collectives raise RuntimeError,
    and sockets OSError."""
    cause = ray_timeouts.cause(error)
    own = type(cause).__name__ in ("SaveError", "UpdateOutOfMemory", "OutOfMemoryError")
    return isinstance(cause, RuntimeError | OSError) and not own


def _joined(parts: Sequence[Mapping[str, Entry]]) -> dict[str, Entry]:
    return {name: entry for part in parts for name, entry in part.items()}
