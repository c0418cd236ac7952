"""Starts the pool's engines, updates their weights, puts them to sleep and replaces dead ones.

This module runs on the pool's thread and never blocks, except while the engines start for the first
time. Each slot waits for a future until a deadline. When the future resolves or the deadline
passes, the pool calls `advance`. `StallDetector` finds engines that answer but make no progress.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.model.ray_timeouts import POLL_S
from keel.rl.futures import settle
from keel.rollout.spec import EngineError, EngineProgress, SampleRequest
from keel.weights.sync import Receiver, Transfer

MAX_RESTARTS = 3
"""Maximum number of restarts of an engine within three hours. The period is longer if starts and
stalls take so long that an engine could not fail this often (see `replace`)."""
_WINDOW_S = 3 * 3600.0
_MEMORY_RACE, _START_TRIES = "Error in memory profiling", 3
"""vLLM's error when another process frees GPU memory during its memory profiling, and how often to
try to start an engine after this error."""
_TASKS = {"starting": "start", "loading": "take new weights", "going to sleep": "fall asleep"}
_NUMBER = re.compile(r"\b(?:[0-9a-f]{8,}|\d+)\b")  # such as process and actor ids
PROGRESS_POLL_S = 2.0
WARN_S, STUCK_S = 20.0, 60.0  # seconds without a step until a warning, and a new engine
_WARN_STEPS, _STUCK_STEPS = 4.0, 10.0  # lower bounds, as multiples of the longest step so far


class RolloutEngine(Protocol):
    """Interface for an engine in the pool. All methods return immediately. Cancelling a future
    aborts its work.

    If the engine dies, its futures raise `EngineError` and the pool replaces it. The pool can't
    recover from any other error.
    """

    @property
    def receiver(self) -> Receiver: ...

    def ready(self) -> Future[tuple[str, ...]]:
        """Return a future that resolves to the engine's warnings once it is ready to sample (or
        asleep, with `rollout.time_share`)."""
        ...

    def sample(
        self, request: SampleRequest, *, sampling: SamplingConfig, record: bool
    ) -> Future[Any]:
        """Start sampling. The future resolves to a `Group` or a `TurnResult`."""
        ...

    def translate(self, delivery: Future[int]) -> Future[int]:
        """Return a future for a delivery of weights that raises `EngineError` if the engine is
        lost."""
        ...

    def sleep(self) -> Future[None]: ...
    def progress(self) -> Future[EngineProgress]: ...
    def kill(self) -> None: ...


Stage = Literal["starting", "loading", "ready", "going to sleep", "asleep"]


@dataclass(slots=True)
class _Progress:
    poll: Future[EngineProgress] | None = None
    last: EngineProgress = field(default_factory=EngineProgress)
    stalled_s: float = 0.0
    warned: bool = False


@dataclass(slots=True, eq=False)
class EngineSlot:
    """A slot for one engine in the pool. If the engine dies, a new one takes its place."""

    index: int
    engine: RolloutEngine
    stage: Stage
    pending: Future[Any] | None  # awaited until `deadline`. None if ready or asleep.
    deadline: float
    version: int = 0  # weight version that the engine samples from or is loading
    restarts: list[float] = field(default_factory=list[float])
    start_failure: str = ""  # error message of the last failed start, with numbers removed
    sequences: int = 0
    load: int = 0  # upper bound on the number of tokens that the engine still has to sample
    progress: _Progress = field(default_factory=_Progress)

    def wait_for(self, stage: Stage, pending: Future[Any], seconds: float) -> None:
        self.stage, self.pending = stage, pending
        self.deadline = time.monotonic() + seconds


@dataclass(slots=True)
class WeightUpdate:
    version: int
    transfer: Transfer
    done: Future[None] = field(default_factory=Future[None])


class EngineSupervisor:
    """Keeps all engines on the weights in `target`, or puts them to sleep if `resting` is set."""

    def __init__(
        self,
        config: RolloutConfig,
        build: Callable[[int], RolloutEngine],
        *,
        startup_s: float,
        update_s: float,
    ) -> None:
        """Create the supervisor without starting any engines. `build(i)` starts engine i without
        waiting for it. `update_s` is the time limit for updating an engine's weights and for
        putting an engine to sleep."""
        self.slots: list[EngineSlot] = []
        self.update_s = update_s
        self.target: WeightUpdate | None = None
        self.resting: Future[None] | None = None
        self._config, self._build, self._startup_s = config, build, startup_s
        self._started: Stage = "asleep" if config.time_share else "ready"
        """Stage of an engine that has just started. With `rollout.time_share`, it is asleep."""
        self._closed = False  # set by `kill`, which may run on a different thread than `start`

    @property
    def pending(self) -> Mapping[Future[Any], EngineSlot]:
        return {slot.pending: slot for slot in self.slots if slot.pending is not None}

    def start(self) -> tuple[str, ...]:
        """Start all engines and return their distinct warnings. Raises TimeoutError if one doesn't
        start in time, and EngineError if one fails or `kill` is called in the meantime."""
        for index in range(self._config.engines):
            engine = self._build(index)
            deadline = time.monotonic() + self._startup_s
            self.slots.append(EngineSlot(index, engine, "starting", engine.ready(), deadline))
            self._check_open(engine)  # `kill` may have missed it
        warnings: dict[str, None] = {}
        for slot in list(self.slots):
            warnings |= dict.fromkeys(self._await_start(slot))
            slot.stage, slot.pending = self._started, None
        return tuple(warnings)

    def _await_start(self, slot: EngineSlot) -> Iterator[str]:
        name = f"rollout engine {slot.index}"
        for attempt in range(1, _START_TRIES + 1):
            assert slot.pending is not None
            while not slot.pending.done() and (rest := slot.deadline - time.monotonic()) > 0:
                self._check_open(slot.engine)
                wait([slot.pending], min(rest, POLL_S))
            try:
                yield from slot.pending.result(timeout=0)
                return
            except TimeoutError:
                raise TimeoutError(
                    f"{name} was not ready within {self._startup_s:g} s (run.startup_timeout_s)"
                ) from None
            except EngineError as error:
                if attempt == _START_TRIES or _MEMORY_RACE not in str(error):
                    raise EngineError(f"{name} did not start: {error}") from error
                slot.engine.kill()
                slot.engine = self._build(slot.index)
                slot.pending = slot.engine.ready()
                yield f"{name} was restarted: another process freed GPU memory during its start"

    def follow(self, target: WeightUpdate | None, resting: Future[None] | None) -> None:
        """Make each engine load the new weights, or go to sleep, once it has finished its current
        stage."""
        self.resting = resting
        if target is not None and target is not self.target:
            self.target = target
            self._load([slot for slot in self.slots if slot.stage in ("ready", "asleep")])
        if resting is not None:
            for slot in self.slots:
                self._put_to_sleep(slot)

    def kill(self) -> None:
        """Kill all engines, even while another thread is starting them."""
        self._closed = True
        for slot in self.slots:
            slot.engine.kill()
        self.slots.clear()

    def _check_open(self, engine: RolloutEngine) -> None:
        if self._closed:
            engine.kill()
            raise EngineError("the engines were killed while they started")

    def advance(self, slot: EngineSlot) -> EngineError | None:
        """Move a slot to its next stage, once its pending future has resolved or its deadline has
        passed. Returns an error if the engine must be replaced."""
        assert slot.pending is not None
        if not slot.pending.done():
            return EngineError(f"did not {_TASKS[slot.stage]} in time")
        try:
            result = slot.pending.result()
        except EngineError as error:
            return error
        if slot.stage == "loading":
            slot.version = result
        stages: dict[Stage, Stage] = {"starting": self._started, "going to sleep": "asleep"}
        slot.stage, slot.pending = stages.get(slot.stage, "ready"), None
        slot.start_failure = ""
        if self.resting is not None:
            self._put_to_sleep(slot)
            if all(slot.stage == "asleep" for slot in self.slots):
                settle(self.resting, lambda: None)
        elif self.target is not None:
            if slot.stage == "asleep" or self.target.version > slot.version:
                self._load([slot])
            self._check_updated()
        return None

    def replace(self, slot: EngineSlot, error: EngineError) -> None:
        """Start a new engine in this slot. Raises EngineError if the slot has been restarted too
        many times, or if two starts in a row failed with the same error."""
        slot.engine.kill()
        if slot.stage == "starting":
            failure = _NUMBER.sub("#", str(error))
            if failure == slot.start_failure and _MEMORY_RACE not in failure:
                raise EngineError(
                    f"rollout engine {slot.index} failed to start twice in the same way: {error}"
                ) from error
            slot.start_failure = failure
        now = time.monotonic()
        # Long enough for an engine to start and become unresponsive several times.
        least_s = (MAX_RESTARTS + 2) * (self._config.silent_s + self._startup_s)
        window_s = max(_WINDOW_S, least_s)
        if sum(now - restart < window_s for restart in slot.restarts) >= MAX_RESTARTS:
            raise EngineError(
                f"rollout engine {slot.index} failed {MAX_RESTARTS + 1} times within "
                f"{window_s / 3600:.3g} hours, the last time with: {error}"
            ) from error
        slot.restarts.append(now)
        slot.engine, slot.version, slot.progress = self._build(slot.index), 0, _Progress()
        slot.wait_for("starting", slot.engine.ready(), self._startup_s)
        self._check_updated()

    def _check_updated(self) -> None:
        """Resolve the update once all running engines have the new weights. Engines that are still
        restarting load the weights later.

        With `rollout.time_share`, the update also waits for restarting engines, because the trainer
        needs the GPU memory that they use to start.
        """
        waited_for = self._config.time_share
        rest = [slot for slot in self.slots if slot.stage != "starting" or waited_for]
        if self.target is not None and rest and all(slot.stage == "ready" for slot in rest):
            settle(self.target.done, lambda: None)

    def _put_to_sleep(self, slot: EngineSlot) -> None:
        if slot.stage == "ready":
            slot.wait_for("going to sleep", slot.engine.sleep(), self.update_s)

    def _load(self, slots: Sequence[EngineSlot]) -> None:
        assert self.target is not None
        if not slots:
            return
        deliveries = self.target.transfer([slot.engine.receiver for slot in slots])
        for slot, delivery in zip(slots, deliveries, strict=True):
            slot.version = self.target.version
            slot.wait_for("loading", slot.engine.translate(delivery), self.update_s)


class StallDetector:
    """Detects engines that have work but don't finish any steps.

    A process keeps responding when its GPU hangs, so the pool polls the number of finished steps.
    Time spent idle, asleep or in weight updates doesn't count, nor does the first step, which may
    compile kernels.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()

    @property
    def next_poll(self) -> float:
        return self._last + PROGRESS_POLL_S

    def poll(
        self, slots: Sequence[EngineSlot], warn: Callable[[str], object]
    ) -> list[tuple[EngineSlot, EngineError]]:
        """Return the slots of hung engines, with an error for each. Calls `warn` for engines that
        have stalled, but not yet for long enough to count as hung."""
        now = self._clock()
        if now < self.next_poll:
            return []
        # Time in which the driver itself was stopped does not count.
        elapsed_s, self._last = min(now - self._last, 2 * PROGRESS_POLL_S), now
        stuck: list[tuple[EngineSlot, EngineError]] = []
        for slot in slots:
            progress = slot.progress
            if slot.stage != "ready" or not slot.sequences:
                progress.stalled_s, progress.warned = 0.0, False
                continue
            progress.stalled_s += elapsed_s
            if (poll := progress.poll) is not None and poll.done():
                progress.poll = None
                # The pool replaces an engine that died.
                if not poll.cancelled() and poll.exception() is None:
                    last, progress.last = progress.last, poll.result()
                    if progress.last.steps != last.steps or not progress.last.requests:
                        progress.stalled_s, progress.warned = 0.0, False
            if progress.poll is None:
                progress.poll = slot.engine.progress()
            message = (
                f"has finished no step for {progress.stalled_s:.0f} s with {slot.sequences} "
                f"completions to sample; its longest step took {progress.last.longest_s:.2g} s"
            )
            warn_s = max(WARN_S, _WARN_STEPS * progress.last.longest_s)
            stuck_s = max(STUCK_S, _STUCK_STEPS * progress.last.longest_s)
            if not progress.last.steps or progress.stalled_s < warn_s:
                continue
            if progress.stalled_s >= stuck_s:
                stuck.append((slot, EngineError(f"hangs: it {message}")))
            elif not progress.warned:
                progress.warned = True
                warn(f"rollout engine {slot.index} {message}. It is restarted at {stuck_s:.0f} s")
        return stuck
