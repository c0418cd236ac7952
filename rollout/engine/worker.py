"""Runs an engine in a Ray actor. This module goes from the driver's side to the engine.

`RayEngine` is the driver's handle, and `RolloutWorker` the actor. `detach` and `attach` separate
recordings from results, so that they stay in Ray's object store on the engine's node until a
trainer rank packs them. In the actor, `EngineThread` steps the engine while there is work and runs
commands from other threads between steps, so groups can join or leave a running batch.

Ray imports this module before the actor's environment variables take effect, so it imports neither
vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayActorError, RayError

from keel.configs.schema import CUT_S, SamplingConfig
from keel.model import ray_timeouts
from keel.model.imports import heavy_imports
from keel.model.ray_timeouts import GONE
from keel.rl.futures import settle
from keel.rl.recordings import Recordings, StoredRecordings
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Trajectory
from keel.rollout.spec import (
    STORED_BYTES,
    EngineError,
    EngineProgress,
    EngineSpec,
    RecordingError,
    SampleRequest,
    env_vars,
)

if TYPE_CHECKING:
    from keel.configs.schema import RolloutConfig
    from keel.rollout.engine.vllm_engine import Job, VllmEngine
    from keel.weights.channel import Bucket, Mailbox, Rendezvous

_CONCURRENT_CALLS = 10_000  # more than an engine receives, so the actor never queues a call
_STOP_S = 60.0  # vLLM shuts down and frees the GPU
_RAISED = re.compile(r"^\s*(?:\w+\.)*\w*(?:Error|Exception|Interrupt): ", re.MULTILINE)
_DIED = re.compile(r"\bpid: (\d+)\b.*its worker process has died", re.DOTALL)


class RayEngine:
    """An engine that runs in a Ray actor (`RolloutWorker`). All methods return immediately.
    Cancelling a future aborts its work.

    If the engine dies, its futures raise `EngineError` and the pool replaces it. The pool can't
    recover from any other error.
    """

    def __init__(
        self,
        spec: EngineSpec,
        index: int,
        *,
        gpu: bool,
        options: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the engine without waiting for it. `options(index)` returns extra actor
        options."""
        actor_options = {
            # On a CPU, engines share the machine with the trainer; threads bound them.
            "num_cpus": 1 if gpu else 0,
            "num_gpus": spec.config.tensor_parallel if gpu else 0,
            "max_concurrency": _CONCURRENT_CALLS,
            "runtime_env": {
                "env_vars": env_vars(spec.config, gpu=gpu, batch_invariant=spec.batch_invariant)
            },
            **(options(index) if options else {}),
        }
        if gpu and not actor_options["num_gpus"]:
            spec = replace(spec, spread=True)
        name = f"rollout engine {index}"
        self.actor = ray_timeouts.create(RolloutWorker, name, actor_options, spec)

    def _call(self, method: str) -> Future[Any]:
        return as_future(ray_timeouts.call(getattr(self.actor, method)))

    def ready(self) -> Future[tuple[str, ...]]:
        """Return a future that resolves to the engine's warnings once it is ready to sample (or
        asleep, with `rollout.time_share`)."""
        return self._call("ready")

    def sample(
        self, request: SampleRequest, *, sampling: SamplingConfig, record: bool
    ) -> Future[Any]:
        """Start sampling. The future resolves to a `Group` or a `TurnResult`."""
        method = self.actor.sample.options(num_returns=1 + request.size)
        ref, *recordings = ray_timeouts.call(method, request, sampling, record)
        return as_future(ref, lambda result: attach(result, recordings))

    def progress(self) -> Future[EngineProgress]:
        return self._call("progress")

    def sleep(self) -> Future[None]:
        return self._call("sleep")

    def kill(self) -> None:
        ray_timeouts.kill(self.actor)


def as_future(ref: ObjectRef, convert: Callable[[Any], Any] = lambda result: result) -> Future[Any]:
    """Convert an actor call to a future. Cancelling the future cancels the call. A lost actor or
    result and timeouts inside the actor become `EngineError`. The result is passed to `convert`."""
    future = with_engine_errors(ref.future(), (*GONE, ObjectLostError), convert)

    def cancelled(outer: Future[Any]) -> None:
        if outer.cancelled():
            ray.cancel(ref)

    future.add_done_callback(cancelled)
    return future


def with_engine_errors(
    inner: Future[Any],
    gone: tuple[type[RayError], ...] = GONE,
    convert: Callable[[Any], Any] = lambda result: result,
) -> Future[Any]:
    """Convert a future's errors to `EngineError` if they were caused by a dead or unresponsive
    engine."""
    outer: Future[Any] = Future()

    def done(inner: Future[Any]) -> None:
        if not outer.set_running_or_notify_cancel():
            return
        error = inner.exception()
        if error is None:
            outer.set_result(convert(inner.result()))
            return
        error = ray_timeouts.cause(error)
        if isinstance(error, (*gone, TimeoutError)):
            reason = str(error) if isinstance(error, TimeoutError) else _death_reason(error)
            engine_error = EngineError(reason)
            engine_error.__cause__ = error
            error = engine_error
        outer.set_exception(error)

    inner.add_done_callback(done)
    return outer


def _death_reason(error: BaseException) -> str:
    text = (isinstance(error, RayActorError) and ray_timeouts.death_reason(error)) or str(error)
    if died := _DIED.search(text):  # Ray then adds a page of guesses
        return f"its process {died[1]} crashed or was killed. Check dmesg for out of memory"
    raised = [match.start() for match in _RAISED.finditer(text)]
    return " ".join((text[raised[-1] :] if raised else text).split())


class RolloutWorker:
    """Runs one engine. `RayEngine` makes it an asyncio actor."""

    def __init__(self, spec: EngineSpec) -> None:
        ray_timeouts.exit_with_raylet()
        # Triton's default. Otherwise torch moves its cache to a folder that vLLM deletes at exit,
        # and every start compiles again.
        kernels = Path(os.environ.get("TRITON_HOME", "~"), ".triton", "cache").expanduser()
        os.environ.setdefault("TRITON_CACHE_DIR", str(kernels))
        # vLLM is loaded in the actor's process only, under its environment.
        with heavy_imports():
            from keel.rollout.engine.vllm_engine import VllmEngine  # noqa: PLC0415

        # Warnings are collected because an actor's log does not reach the terminal.
        handler, logger = BufferingHandler(1000), logging.getLogger("keel")
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
        self._failure: EngineError | None = None
        try:
            self._engine = EngineThread(lambda: VllmEngine(spec), spec.config)
        except Exception as error:
            if not spec.spread:
                raise
            # Raised by `ready`: Ray would not report it before the engine's workers end.
            error = ray_timeouts.cause(error)
            self._failure = EngineError(f"{type(error).__name__}: {error}")
        logger.removeHandler(handler)
        self._warnings = tuple(dict.fromkeys(record.getMessage() for record in handler.buffer))

    async def ready(self) -> tuple[str, ...]:
        """Return the warnings logged during engine startup."""
        if self._failure is not None:
            raise self._failure
        return self._warnings

    async def sample(
        self, request: SampleRequest, sampling: SamplingConfig, record: bool
    ) -> list[Any]:
        """Sample a group or a turn. Returns the result and, as separate objects, the recordings of
        each completion (see `detach`). Cancelling the call aborts sampling."""
        future = self._engine.sample(request, sampling=sampling, record=record)
        result = (await asyncio.wrap_future(future)).result()
        if isinstance(result, Group):
            result = replace(result, node=ray.get_runtime_context().get_node_id())
        return detach(request, result)

    async def update_from_store(self, version: int, buckets: Sequence[Any]) -> int:
        """Load new weights, one bucket at a time. `buckets` contains object references."""
        await asyncio.to_thread(self._engine.begin_update)
        for bucket in buckets:
            await asyncio.to_thread(self._engine.load_bucket, await bucket)
        await asyncio.to_thread(self._engine.finish_update, version)
        return version

    async def sleep(self) -> None:
        await asyncio.to_thread(self._engine.sleep)

    async def gpus(self) -> list[str]:
        return await asyncio.to_thread(self._engine.gpus)

    async def connect(self, rendezvous: Rendezvous, name: str, shares_gpu: bool) -> None:
        await asyncio.to_thread(self._engine.connect, rendezvous, name, shares_gpu=shares_gpu)

    async def update_from_rank(self) -> None:
        await asyncio.to_thread(self._engine.update_from_rank)

    async def progress(self) -> EngineProgress:
        return self._engine.progress()


# Recordings, which stay on the engine's node.


def detach(request: SampleRequest, result: Group | TurnResult) -> list[Any]:
    """Return the result without its recordings, followed by the `Recordings` of each completion, or
    None for recordings that are so small that they stay in the result. `attach` adds the references
    to the recordings."""
    detached: list[Recordings | None] = [None] * request.size

    def without_part(stored: StoredRecordings, sibling: int) -> StoredRecordings:
        ((start, part),) = stored.parts
        if part.nbytes < STORED_BYTES:
            return stored
        detached[sibling] = part
        return replace(stored, parts=((start, None),))

    return [_change_stored(result, without_part), *detached]


def attach(result: Group | TurnResult, refs: Sequence[Any]) -> Group | TurnResult:
    """Add the `refs` to the stored recordings, one per completion, to a result from `detach`."""

    def with_ref(stored: StoredRecordings, sibling: int) -> StoredRecordings:
        ((start, part),) = stored.parts
        return replace(stored, parts=((start, refs[sibling]),)) if part is None else stored

    return _change_stored(result, with_ref)


def _change_stored(
    result: Group | TurnResult, change: Callable[[StoredRecordings, int], StoredRecordings]
) -> Group | TurnResult:
    """Replace the stored recordings of each completion by `change(stored, sibling)`."""
    if isinstance(result, TurnResult):
        stored = result.recordings
        return result if stored is None else replace(result, recordings=change(stored, 0))
    trajectories: list[Trajectory] = []
    for one in result.trajectories:
        (segment,) = one.segments
        if segment.stored is not None:
            segment = replace(segment, stored=change(segment.stored, one.sibling))
        trajectories.append(replace(one, segments=(segment,)))
    return replace(result, trajectories=tuple(trajectories))


# The engine's thread.

_When = Literal["now", "idle", "complete weights"]  # idle: no completion is being sampled


@dataclass(frozen=True, slots=True, eq=False)
class _Command:
    run: Callable[[VllmEngine], Any]
    future: Future[Any]
    when: _When = "now"


@dataclass(slots=True)
class _JobInFlight:
    """A job that is being sampled. Only time during which the engine is busy counts toward the
    job's limits."""

    future: Future[Any]
    begin: float
    deadline: float  # after which the engine cuts the job, and at the next one drops it


class EngineThread:
    """Runs an engine on a separate thread, which samples groups and turns and loads weights."""

    def __init__(self, build: Callable[[], VllmEngine], config: RolloutConfig) -> None:
        """Start the thread, build the engine on it, and wait until it is ready. Raises the engine's
        error if it fails to start."""
        self._build, self._config = build, config
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._deferred: list[_Command] = []  # commands that are not due yet
        self._in_flight: dict[int, _JobInFlight] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # held while a command is queued or the queue is closed
        self._inbox: Mailbox | None = None
        self._ended: Exception | None = None
        self._busy_s = 0.0
        self._step_begin: float | None = None
        self._steps, self._longest_s = 0, 0.0
        self._failure = ""  # error of the last update, if it failed and left the weights incomplete
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="keel-engine", daemon=True
        )
        self._thread.start()
        ready.result()  # unbounded here; the pool has a timeout for all engines

    def sample(
        self, request: SampleRequest, *, sampling: SamplingConfig, record: bool
    ) -> Future[Job]:
        """Start sampling a group or a turn, for at most `rollout.timeout_s` or the turn's timeout.
        Returns a future of the finished job (see `Job.result`). Cancelling it aborts the request.

        The future raises ValueError if the prompt doesn't fit, RecordingError if a token was not
        recorded, and EngineError if the engine breaks or its last update failed.
        """
        number, future, timeout_s = next(self._numbers), Future[Any](), self._config.timeout_s
        if isinstance(request, TurnRequest):
            timeout_s = min(request.timeout_s, timeout_s)

        def start(engine: VllmEngine) -> None:
            if future.cancelled():
                return
            if self._failure:
                raise EngineError(f"its weights are incomplete, an update failed: {self._failure}")
            self._in_flight[number] = _JobInFlight(future, self._busy_s, self._busy_s + timeout_s)
            try:
                engine.add(number, request, sampling=sampling, record=record)
            except BaseException:
                self._abort(number, engine)
                raise

        def on_done(done: Future[Any]) -> None:
            if done.cancelled():
                self._commands.put(_Command(partial(self._abort, number), Future()))

        def on_started(started: Future[Any]) -> None:
            if (error := started.exception()) is not None:
                _fail([future], error)

        future.add_done_callback(on_done)
        # Calls of an actor may overtake each other: a job that arrives during sleep or an update
        # begins when that is over.
        self._enqueue(start, when="complete weights").add_done_callback(on_started)
        return future

    def gpus(self) -> list[str]:
        return self._await(self._enqueue(lambda engine: engine.gpus()), "the engine's GPUs")

    def connect(self, rendezvous: Rendezvous, name: str, *, shares_gpu: bool) -> None:
        """Connect to the trainer rank that sends weights. No channel is needed if the rank shares
        the engine's GPU."""
        from keel.weights.channel import Mailbox  # noqa: PLC0415

        # Each of the other engines may use its whole timeout first.
        timeout_s = (1 + self._config.engines) * self._config.update_timeout_s
        self._inbox = Mailbox(rendezvous, name, timeout_s=timeout_s)
        if not shares_gpu:
            opened = self._enqueue(lambda engine: engine.connect(rendezvous, name))
            self._await(opened, "the channel to open")

    def update_from_rank(self) -> None:
        """Receive weights from the trainer rank and load them. The engine is unusable after an
        error, such as a TimeoutError or, for an unknown or missing tensor, a ValueError."""
        from keel.weights.channel import BeginUpdate, FinishUpdate  # noqa: PLC0415

        assert self._inbox is not None
        finished = False
        while not finished:
            match self._inbox.receive():
                case BeginUpdate():
                    self.begin_update()
                case FinishUpdate(version, checksum):
                    self.finish_update(version, checksum)
                    finished = True
                case bucket:
                    self.load_bucket(bucket)
            self._inbox.acknowledge()

    def sleep(self) -> None:
        """Release GPU memory until the next update."""
        self._interrupt(lambda engine: engine.sleep())

    def begin_update(self) -> None:
        """Begin a weight update. Sampling continues after `finish_update`."""
        self._interrupt(lambda engine: engine.begin_update())

    def _interrupt(self, act: Callable[[VllmEngine], Iterable[tuple[int, Job]]]) -> None:
        """Call `act` after running completions have been paused, or have finished if
        `rollout.weight_updates` is "drain"."""

        def interrupt(engine: VllmEngine) -> None:
            for number, job in act(engine):
                self._resolve(number, job)
            self._failure = ""

        when = "idle" if self._config.weight_updates == "drain" else "now"
        self._await(self._enqueue(interrupt, when=when), "running completions to pause or finish")

    def load_bucket(self, bucket: Bucket) -> None:
        self._update_step(lambda engine: engine.load_bucket(bucket), "a bucket of weights")

    def finish_update(self, version: int, checksum: int | None = None) -> None:
        self._update_step(lambda engine: engine.finish_update(version, checksum), "the new weights")

    def _update_step(self, act: Callable[[VllmEngine], None], what: str) -> None:
        def run(engine: VllmEngine) -> None:
            try:
                act(engine)
            except BaseException as error:
                # Text only: a traceback's frames would hold buckets in GPU memory.
                self._failure = f"{type(error).__name__}: {error}"
                raise

        self._await(self._enqueue(run), what)

    def progress(self) -> EngineProgress:
        """Return the engine's progress without waiting, even if a step hangs."""
        return EngineProgress(self._steps, self._longest_s, len(self._in_flight))

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(timeout=_STOP_S)

    def _enqueue(self, run: Callable[[VllmEngine], Any], *, when: _When = "now") -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is None:
                self._commands.put(_Command(run, future, when))
                return future
        future.set_exception(self._ended)
        return future

    def _await(self, future: Future[Any], what: str) -> Any:
        timeout_s = self._config.update_timeout_s
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            if future.done():  # the command's own error, or it has just finished
                return future.result()
            future.cancel()
            raise TimeoutError(
                f"waited {timeout_s:.0f} s (rollout.update_timeout_s) for {what}"
            ) from None

    # Everything below runs on the engine's thread.

    def _run(self, ready: Future[None]) -> None:
        try:
            engine = self._build()
        except Exception as error:  # the constructor raises it
            ready.set_exception(error)
            return
        ready.set_result(None)
        ended: Exception = EngineError("the engine has been stopped")
        try:
            while self._run_commands(engine):
                self._step_begin = begin = time.perf_counter()
                for number, job in chain(self._cut_overdue(engine), engine.step()):
                    self._resolve(number, job)
                step_s = time.perf_counter() - begin
                self._busy_s += step_s
                self._longest_s = max(self._longest_s, step_s)
                self._step_begin, self._steps = None, self._steps + 1
        except RecordingError as error:
            ended = error
        except Exception as error:  # every caller's future must resolve
            ended = EngineError(f"the engine broke: {type(error).__name__}: {error}")
            ended.__cause__ = error
        with self._lock:
            self._ended = ended
        commands = self._deferred
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                commands.append(command)
        _fail([entry.future for entry in self._in_flight.values()], ended)
        _fail([command.future for command in commands], ended)
        self._in_flight.clear()

    def _run_commands(self, engine: VllmEngine) -> bool:
        """Run commands until the engine should take a step. Waits for commands while the engine is
        idle. Returns False if the thread should stop."""
        while True:
            due = (command for command in self._deferred if self._is_due(command, engine))
            if (command := next(due, None)) is not None:
                self._deferred.remove(command)
                if command.future.set_running_or_notify_cancel():  # errors are the caller's
                    settle(command.future, partial(command.run, engine))
                continue
            try:
                command = self._commands.get(block=not engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._deferred.append(command)

    def _is_due(self, command: _Command, engine: VllmEngine) -> bool:
        if command.when == "complete weights":  # after a failed update the command reports it
            return not engine.updating or bool(self._failure)
        return command.when == "now" or not engine.busy

    def _cut_overdue(self, engine: VllmEngine) -> Iterator[tuple[int, Job]]:
        for number, entry in list(self._in_flight.items()):
            if entry.deadline <= self._busy_s:
                entry.deadline = self._busy_s + CUT_S
                yield from engine.cut(number)

    def _abort(self, number: int, engine: VllmEngine) -> None:
        self._in_flight.pop(number, None)
        engine.abort(number)

    def _resolve(self, number: int, job: Job) -> None:
        entry = self._in_flight.pop(number, None)
        if entry is None or not entry.future.set_running_or_notify_cancel():
            return
        step_s = time.perf_counter() - self._step_begin if self._step_begin else 0.0
        job.sampling_s = self._busy_s + step_s - entry.begin
        entry.future.set_result(job)


def _fail(futures: Iterable[Future[Any]], error: BaseException) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
