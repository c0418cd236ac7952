"""An engine on a thread of its own: commands from any thread in, futures out.

The thread steps the engine while it has work and takes commands between steps, so groups join and
leave a running batch. Nothing here knows vLLM: `keel.rollout.engine.vllm_engine.VllmEngine` does.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from keel.configs.schema import CUT_S, RolloutConfig, SamplingConfig
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt
from keel.rollout.engine.jobs import Result, SamplingEngine
from keel.rollout.spec import EngineError, LostTurn, Progress, RecordingError
from keel.weights.buckets import Bucket
from keel.weights.channel import Rendezvous
from keel.weights.control_channel import Begin, Finish, Inbox

STOP_S = 60.0
"""Longest wait for the thread to stop: one step of the engine, at most."""


Late = Literal["cut", "give up"]
When = Literal["now", "idle", "whole"]
"""At once, once no completion is being sampled, or once the weights are whole."""


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do on the engine's thread; the future gets its result or its error."""

    run: Callable[[SamplingEngine], Any]
    future: Future[Any]
    when: When = "now"


@dataclass(slots=True)
class _Flight:
    """What is being sampled. Its times are seconds that the engine has been busy: those in which
    nothing can be sampled (updates, sleep) do not count."""

    future: Future[Any]
    begun: float
    due: float
    """When something is done about it."""
    late: Late = "cut"
    """What."""


class EngineThread:
    """Samples groups and takes weights."""

    def __init__(self, build: Callable[[], SamplingEngine], config: RolloutConfig) -> None:
        """`build` runs on the engine's thread. Returns when it has; raises what it raises."""
        self._build = build
        self._config = config
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._flights: dict[int, _Flight] = {}
        self._numbers = itertools.count()
        self._gate = threading.Lock()
        """Held to give a command and to say that no more are taken, so that none is lost."""
        self._inbox: Inbox | None = None
        self._ended: Exception | None = None
        self._busy_s = 0.0
        self._stepping: float | None = None
        """When the step that runs began."""
        self._steps, self._longest_s = 0, 0.0
        self._failure = ""
        """Of the last update: the weights stay incomplete for good."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="keel-engine", daemon=True
        )
        self._thread.start()
        ready.result()  # loading a model has no natural bound; the pool bounds it for all engines

    def submit(
        self,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingConfig | None = None,
        record: bool = True,
        draw: int = 0,
    ) -> Future[Group]:
        """Sample `group_size` completions of `prompt`. Cancelling the future aborts them. After
        `rollout.timeout_s` they are cut where they are.

        `sampling` differs from the recipe's for evaluation, where `record` is False: routes and
        sampling masks are then left out (log-probabilities never are). The future fails with
        `ValueError` for a prompt that does not fit, `RecordingError` for a gap in what was recorded
        and `EngineError` if the engine breaks or an update of its weights has failed.
        """
        options: dict[str, Any] = {
            "group_size": group_size,
            "sampling": sampling or self._config.sampling,
            "record": record,
            "draw": draw,
        }
        return self._begin(
            lambda engine, job: engine.add(job, prompt, **options), self._config.timeout_s
        )

    def turn(
        self, request: TurnRequest, *, sampling: SamplingConfig | None = None, record: bool = True
    ) -> Future[TurnResult]:
        """Sample one turn, as `submit` does a group. It has no token if its time was up before the
        first one. The future fails with `LostTurn` if a log-probability is not finite."""
        how = sampling or self._config.sampling
        return self._begin(
            lambda engine, job: engine.add_turn(job, request, sampling=how, record=record),
            min(request.timeout_s, self._config.timeout_s),
        )

    def _begin(self, add: Callable[[SamplingEngine, int], None], timeout_s: float) -> Future[Any]:
        job, future = next(self._numbers), Future[Any]()

        def start(engine: SamplingEngine) -> None:
            if future.cancelled():
                return
            if self._failure:
                raise EngineError(f"its weights are incomplete, an update failed: {self._failure}")
            self._flights[job] = _Flight(future, self._busy_s, self._busy_s + timeout_s)
            try:
                add(engine, job)
            except BaseException:
                self._abort(engine, job)
                raise

        def cancelled(done: Future[Any]) -> None:
            if done.cancelled():
                self._commands.put(_Command(lambda engine: self._abort(engine, job), Future()))

        future.add_done_callback(cancelled)
        # Calls of an actor may overtake each other: what was asked before a sleep or an update, and
        # comes after it, begins when that is over.
        asked = self._ask(start, when="whole")
        asked.add_done_callback(lambda done: _pass_error(done, future))
        return future

    def gpus(self) -> list[str]:
        """Which GPUs the engine is on; see `keel.weights.channel.gpu_id`."""
        return self._wait(self._ask(lambda engine: engine.gpus()), "the engine's GPUs")

    def join(self, rendezvous: Rendezvous, name: str, *, shares: bool) -> None:
        """Meet the trainer's rank that weights will come from; `shares`: on the engine's own GPU,
        so that their bytes need no channel."""
        # Each of the other engines may have its whole deadline first.
        timeout_s = (1 + self._config.engines) * self._config.update_timeout_s
        self._inbox = Inbox(rendezvous, name, timeout_s=timeout_s)
        if not shares:
            asked = self._ask(lambda engine: engine.join(rendezvous, name))
            self._wait(asked, "the channel to open")

    def receive(self) -> None:
        """Do an update as the rank says it.

        Raises `TimeoutError` after `rollout.update_timeout_s` and `ValueError` naming a tensor
        that is unknown or missing; the engine is then unusable.
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
        """Give up the GPU's memory until the next update. Running completions: as for that."""
        self._interrupt(lambda engine: engine.sleep())

    def begin_update(self) -> None:
        """Begin a weight update: nothing is sampled until `finish_update`. Running completions
        pause, or are finished first (`rollout.weight_updates`)."""
        self._interrupt(lambda engine: engine.begin_update())

    def _interrupt(self, act: Callable[[SamplingEngine], Iterable[tuple[int, Result]]]) -> None:
        def interrupt(engine: SamplingEngine) -> None:
            for job, result in act(engine):
                self._resolve(job, result)
            self._failure = ""

        when = "idle" if self._config.weight_updates == "drain" else "now"
        self._wait(self._ask(interrupt, when=when), "running completions to pause or finish")

    def load_bucket(self, bucket: Bucket) -> None:
        asked = self._ask(self._part_of_update(lambda engine: engine.load_bucket(bucket)))
        self._wait(asked, "a bucket of weights")

    def finish_update(self, version: int, checksum: int | None = None) -> None:
        """Check that everything came; sample from the new weights from now on."""
        finish = self._part_of_update(lambda engine: engine.finish_update(version, checksum))
        self._wait(self._ask(finish), "the new weights")

    def _part_of_update(
        self, act: Callable[[SamplingEngine], None]
    ) -> Callable[[SamplingEngine], None]:
        def run(engine: SamplingEngine) -> None:
            try:
                act(engine)
            except BaseException as error:
                # Its text alone: frames of a traceback hold buckets in the GPU's memory.
                self._failure = f"{type(error).__name__}: {error}"
                raise

        return run

    def stats(self) -> dict[str, float]:
        """Sampled tokens, steps and busy seconds so far; unfinished groups and turns, and
        recordings, held now."""

        def read(engine: SamplingEngine) -> dict[str, float]:
            return {
                "version": engine.version,
                "sampled_tokens": engine.sampled_tokens,
                "steps": engine.steps,
                "fast_steps": engine.fast_steps,
                "busy_s": self._busy_s,
                "groups": len(self._flights),
                "recordings": engine.recordings,
            }

        return self._wait(self._ask(read), "the engine's statistics")

    def progress(self) -> Progress:
        """Answered whatever the engine is at, even where a step of it hangs."""
        return Progress(self._steps, self._longest_s, len(self._flights))

    def close(self) -> None:
        """Stop; unfinished groups fail."""
        self._commands.put(None)
        self._thread.join(timeout=STOP_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread did not stop within {STOP_S:.0f} s")

    def _ask(self, run: Callable[[SamplingEngine], Any], *, when: When = "now") -> Future[Any]:
        future: Future[Any] = Future()
        with self._gate:
            if self._ended is None:
                self._commands.put(_Command(run, future, when))
                return future
        future.set_exception(self._ended)
        return future

    def _wait(self, future: Future[Any], what: str) -> Any:
        deadline = self._config.update_timeout_s
        try:
            return future.result(timeout=deadline)
        except TimeoutError:
            if future.done():  # the command's own error, or it was done just now
                return future.result()
            future.cancel()
            raise TimeoutError(
                f"waited {deadline:.0f} s (rollout.update_timeout_s) for {what}"
            ) from None

    # From here on: the engine's thread.

    def _run(self, ready: Future[None]) -> None:
        try:
            engine = self._build()
        except Exception as error:  # whatever it is, the constructor is waiting for it
            ready.set_exception(error)
            return
        ready.set_result(None)
        waiting: list[_Command] = []
        ended: Exception = EngineError("the engine has been stopped")
        try:
            while self._take_commands(engine, waiting):
                if engine.busy:
                    self._stepping = began = time.perf_counter()
                    for job, result in chain(self._hurry(engine), engine.step()):
                        self._resolve(job, result)
                    took = time.perf_counter() - began
                    self._busy_s += took
                    self._longest_s = max(self._longest_s, took)
                    self._stepping, self._steps = None, self._steps + 1
        except RecordingError as error:
            ended = error
        except Exception as error:  # callers hold futures: none may be left without a result
            ended = EngineError(f"the engine broke: {type(error).__name__}: {error}")
            ended.__cause__ = error
        with self._gate:
            self._ended = ended
        self._fail_all(waiting, ended)

    def _take_commands(self, engine: SamplingEngine, waiting: list[_Command]) -> bool:
        """Run what has been asked for; sleeps if there is nothing else to do. False: stop."""
        while True:
            for command in list(waiting):
                if self._due(command, engine):
                    waiting.remove(command)
                    _execute(command, engine)
            try:
                command = self._commands.get(block=not engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            if self._due(command, engine):
                _execute(command, engine)
            else:
                waiting.append(command)

    def _due(self, command: _Command, engine: SamplingEngine) -> bool:
        if command.when == "whole":  # or will never be, which the command says
            return engine.whole or bool(self._failure)
        return command.when == "now" or not engine.busy

    def _hurry(self, engine: SamplingEngine) -> Iterator[tuple[int, Result]]:
        """See to the groups whose time is up."""
        late = [(job, it) for job, it in self._flights.items() if it.due <= self._busy_s]
        for job, flight in late:
            if flight.late == "cut":
                flight.late, flight.due = "give up", self._busy_s + CUT_S
                yield from engine.cut(job)
            else:
                yield from engine.give_up(job)

    def _abort(self, engine: SamplingEngine, job: int) -> None:
        self._flights.pop(job, None)
        engine.abort(job)

    def _resolve(self, job: int, result: Result) -> None:
        flight = self._flights.pop(job, None)
        if flight is not None and flight.future.set_running_or_notify_cancel():
            if isinstance(result, LostTurn):
                flight.future.set_exception(result)
                return
            if isinstance(result, TurnResult):
                step_s = time.perf_counter() - self._stepping if self._stepping else 0.0
                result = replace(result, sampling_s=self._busy_s + step_s - flight.begun)
            flight.future.set_result(result)

    def _fail_all(self, waiting: list[_Command], error: Exception) -> None:
        futures = [flight.future for flight in self._flights.values()]
        futures += [command.future for command in waiting]
        while not self._commands.empty():
            command = self._commands.get()
            futures += [] if command is None else [command.future]
        self._flights.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _execute(command: _Command, engine: SamplingEngine) -> None:
    if not command.future.set_running_or_notify_cancel():
        return
    try:
        command.future.set_result(command.run(engine))
    except Exception as error:  # belongs to the caller, who holds the future
        command.future.set_exception(error)


def _pass_error(done: Future[Any], future: Future[Any]) -> None:
    """A group whose command could not even be run fails with it."""
    if (error := done.exception()) is not None and future.set_running_or_notify_cancel():
        future.set_exception(error)
