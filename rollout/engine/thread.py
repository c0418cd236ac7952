"""Runs an engine on a separate thread. Other threads send it commands and receive futures. The
thread steps the engine while there is work and runs commands between steps, so groups can join or
leave a running batch."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from keel.configs.schema import CUT_S, RolloutConfig, SamplingConfig
from keel.rl.futures import settle
from keel.rl.turns import TurnRequest, TurnResult
from keel.rollout.engine.conversion import Result
from keel.rollout.spec import EngineError, EngineProgress, LostTurn, RecordingError, SampleRequest
from keel.weights.buckets import Bucket
from keel.weights.channel import Begin, Finish, Mailbox, Rendezvous

if TYPE_CHECKING:
    from keel.rollout.engine.vllm_engine import VllmEngine

_STOP_S = 60.0

_When = Literal["now", "idle", "complete weights"]  # idle: no completion is being sampled


@dataclass(frozen=True, slots=True)
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
    deadline: float
    cut: bool = False  # True if the job was cut at its deadline. At the next one, it is dropped.


class EngineThread:
    """Runs an engine on a separate thread, which samples groups and turns and loads weights."""

    def __init__(self, build: Callable[[], VllmEngine], config: RolloutConfig) -> None:
        """Start the thread, build the engine on it, and wait until it is ready. Raises the engine's
        error if it fails to start."""
        self._build, self._config = build, config
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
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
    ) -> Future[Any]:
        """Start sampling a group or a turn, for at most `rollout.timeout_s` or the turn's timeout.
        Cancelling the future aborts the request.

        Routes and sampling masks are recorded only if `record` is set. A turn has no tokens if its
        deadline passed before the first token. The future raises ValueError if the prompt doesn't
        fit, RecordingError if a token was not recorded, LostTurn if a turn has a log-probability
        that is not finite, and EngineError if the engine breaks or its last update failed.
        """
        job, future, timeout_s = next(self._numbers), Future[Any](), self._config.timeout_s
        if isinstance(request, TurnRequest):
            timeout_s = min(request.timeout_s, timeout_s)

        def start(engine: VllmEngine) -> None:
            if future.cancelled():
                return
            if self._failure:
                raise EngineError(f"its weights are incomplete, an update failed: {self._failure}")
            self._in_flight[job] = _JobInFlight(future, self._busy_s, self._busy_s + timeout_s)
            try:
                engine.add(job, request, sampling=sampling, record=record)
            except BaseException:
                self._abort(engine, job)
                raise

        def on_done(done: Future[Any]) -> None:
            if done.cancelled():
                self._commands.put(_Command(lambda engine: self._abort(engine, job), Future()))

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

    def join(self, rendezvous: Rendezvous, name: str, *, shares: bool) -> None:
        """Connect to the trainer rank that sends weights. No channel is needed if `shares` is set,
        because that rank then runs on the engine's GPU."""
        # Each of the other engines may use its whole timeout first.
        timeout_s = (1 + self._config.engines) * self._config.update_timeout_s
        self._inbox = Mailbox(rendezvous, name, timeout_s=timeout_s)
        if not shares:
            joined = self._enqueue(lambda engine: engine.join(rendezvous, name))
            self._await(joined, "the channel to open")

    def receive(self) -> None:
        """Receive weights from the trainer rank and load them. The engine is unusable after an
        error.

        Raises TimeoutError if no message arrives for (1 + engines) × `rollout.update_timeout_s`, or
        if the engine takes longer than `rollout.update_timeout_s` to process one. Raises ValueError
        if a tensor is unknown or missing.
        """
        inbox = self._inbox
        assert inbox is not None
        while True:
            match inbox.next():
                case Begin():
                    self.begin_update()
                case Bucket() as bucket:
                    self.load_bucket(bucket)
                case Finish(version, checksum):
                    self.finish_update(version, checksum)
                    return inbox.taken()
            inbox.taken()

    def sleep(self) -> None:
        """Release GPU memory until the next update. `rollout.weight_updates` determines whether
        running completions are paused or finish first."""
        self._interrupt(lambda engine: engine.sleep())

    def begin_update(self) -> None:
        """Begin a weight update. `rollout.weight_updates` determines whether running completions
        are paused or finish first. Sampling continues after `finish_update`."""
        self._interrupt(lambda engine: engine.begin_update())

    def _interrupt(self, act: Callable[[VllmEngine], Iterable[tuple[int, Result]]]) -> None:
        def interrupt(engine: VllmEngine) -> None:
            for job, result in act(engine):
                self._resolve(job, result)
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
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread did not stop within {_STOP_S:.0f} s")

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
        deferred: list[_Command] = []
        ended: Exception = EngineError("the engine has been stopped")
        try:
            while self._run_commands(engine, deferred):
                if engine.busy:
                    self._step_begin = begin = time.perf_counter()
                    for job, result in chain(self._cut_overdue(engine), engine.step()):
                        self._resolve(job, result)
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
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                deferred.append(command)
        _fail([*(entry.future for entry in self._in_flight.values())], ended)
        _fail([command.future for command in deferred], ended)
        self._in_flight.clear()

    def _run_commands(self, engine: VllmEngine, deferred: list[_Command]) -> bool:
        """Run queued commands, or wait for one if the engine is idle. Returns False if the thread
        should stop."""
        while True:
            for command in list(deferred):
                if self._is_due(command, engine):
                    deferred.remove(command)
                    _execute(command, engine)
            try:
                command = self._commands.get(block=not engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            if self._is_due(command, engine):
                _execute(command, engine)
            else:
                deferred.append(command)

    def _is_due(self, command: _Command, engine: VllmEngine) -> bool:
        if command.when == "complete weights":  # after a failed update the command reports it
            return not engine.updating or bool(self._failure)
        return command.when == "now" or not engine.busy

    def _cut_overdue(self, engine: VllmEngine) -> Iterator[tuple[int, Result]]:
        # A job that is still unfinished some time after it was cut is dropped.
        for job, entry in list(self._in_flight.items()):
            if entry.deadline > self._busy_s:
                continue
            if entry.cut:
                yield from engine.drop_unfinished(job)
            else:
                entry.cut, entry.deadline = True, self._busy_s + CUT_S
                yield from engine.cut(job)

    def _abort(self, engine: VllmEngine, job: int) -> None:
        self._in_flight.pop(job, None)
        engine.abort(job)

    def _resolve(self, job: int, result: Result) -> None:
        entry = self._in_flight.pop(job, None)
        if entry is not None and entry.future.set_running_or_notify_cancel():
            if isinstance(result, LostTurn):
                entry.future.set_exception(result)
                return
            if isinstance(result, TurnResult):
                step_s = time.perf_counter() - self._step_begin if self._step_begin else 0.0
                result = replace(result, sampling_s=self._busy_s + step_s - entry.begin)
            entry.future.set_result(result)


def _fail(futures: Iterable[Future[Any]], error: BaseException) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)


def _execute(command: _Command, engine: VllmEngine) -> None:
    if command.future.set_running_or_notify_cancel():
        settle(command.future, lambda: command.run(engine))  # an error belongs to the caller
