"""The driver's pool of rollout engines.

`RolloutPool` sends requests to the engines, updates their weights, puts them to sleep and replaces
engines that fail. Each engine is a `RayEngine`. Importing this module does not import vLLM.

All decisions are made on the pool's own thread, so that engines never wait for a busy driver. The
thread never blocks: it runs the calls in a queue, and every future that it waits for puts a call
there. A group goes to the least loaded engine and is never split across engines. A conversation
goes back to the engine that has its prefix in the KV cache.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.model.ray_timeouts import PollClock
from keel.rl.futures import POLL_S, done, failed, settle, then
from keel.rl.supervisor import JOIN_S, MAX_RESTARTS, RESTART_PERIOD_S, RestartLimit
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt, Purpose
from keel.rollout.engine.worker import RayEngine, with_engine_errors
from keel.rollout.spec import EngineError, EngineProgress, GroupRequest, SampleRequest
from keel.weights.sync import Transfer

_MEMORY_RACE = "Error in memory profiling"
"""vLLM's error when another process frees GPU memory while an engine starts."""
_FREED_S = 3.0  # seconds until a killed engine's GPU memory is free
_MAX_CONVERSATIONS = 100_000
_TASKS = {"starting": "start", "loading": "load new weights", "going to sleep": "go to sleep"}
STALL_POLL_S = 2.0
WARN_S, STUCK_S = 20.0, 60.0  # seconds without a step until a warning, and a new engine
_WARN_STEPS, _STUCK_STEPS = 4.0, 10.0  # lower bounds, as multiples of the longest step so far

Stage = Literal["starting", "loading", "ready", "going to sleep", "asleep"]


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    sample: SampleRequest
    sampling: SamplingConfig
    purpose: Purpose
    result: Future[Any] = field(default_factory=Future[Any])  # for the caller
    slot: _EngineSlot | None = None
    reply: Future[Any] = field(default_factory=Future[Any])  # from the engine in `slot`
    sent: float = 0.0  # when its engine got the request, or last became ready

    @property
    def priority(self) -> tuple[bool, int]:
        """Sort key for the queue. Evaluation requests go first, because the training loop waits for
        them."""
        return self.purpose != "eval", self.number

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in all completions together."""
        return self.sample.size * self.sampling.max_tokens


@dataclass(slots=True)
class _Progress:
    poll: Future[EngineProgress] | None = None
    last: EngineProgress = field(default_factory=EngineProgress)
    stalled_s: float = 0.0
    warned: bool = False


@dataclass(slots=True, eq=False)
class _EngineSlot:
    """A slot for one engine in the pool. If the engine dies, a new one takes its place."""

    index: int
    engine: RayEngine
    stage: Stage = "starting"
    pending: Future[Any] | None = None  # awaited until `deadline`. None if ready or asleep.
    deadline: float = 0.0
    version: int = 0  # weight version that the engine samples from or is loading
    restarts: RestartLimit = field(default_factory=RestartLimit)
    requests: dict[int, _Request] = field(default_factory=dict[int, _Request])  # oldest first
    sequences: int = 0
    load: int = 0  # upper bound on the number of tokens that the engine still has to sample
    progress: _Progress = field(default_factory=_Progress)


@dataclass(slots=True)
class _WeightUpdate:
    version: int
    transfer: Transfer
    done: Future[None] = field(default_factory=Future[None])


class RolloutPool:
    """Samples groups and turns on several engines and keeps their weights in sync."""

    def __init__(
        self,
        config: RolloutConfig,
        build: Callable[[int], RayEngine],
        *,
        startup_timeout_s: float,
        update_timeout_s: float | None = None,
    ) -> None:
        """Create the pool without starting its engines. `build(i)` starts engine i without waiting
        for it. `update_timeout_s` is the time limit for updating an engine's weights and for
        putting an engine to sleep. It defaults to `rollout.update_timeout_s`."""
        self._warnings: list[str] = []
        self.say: Callable[[str], Any] = self._warnings.append  # for warnings, on the pool's thread
        self.slots: list[_EngineSlot] = []
        self._config, self._build, self._startup_s = config, build, startup_timeout_s
        self._update_s = update_timeout_s or config.update_timeout_s
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="keel-pool", daemon=True)
        self._started: Future[tuple[str, ...]] = Future()
        # Shared with the callers' threads, under `_lock`:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[int, _Request] = {}
        # Groups requested for each prompt with these weights. `EpisodeRunner` counts its own.
        self._draws: Counter[str] = Counter()
        self._requested_update: _WeightUpdate | None = None
        self._requested_sleep: Future[None] | None = None  # None again after an update
        self._ended: Exception | None = None
        # Owned by the thread: the update or sleep in progress.
        self._current_update: _WeightUpdate | None = None
        self._current_sleep: Future[None] | None = None
        self._stalls = _StallDetector()
        self._queue: list[_Request] = []
        self._prefix_slots: OrderedDict[str, int] = OrderedDict()
        """Index of the slot that has each conversation's prefix, least recently used first."""

    @property
    def steps(self) -> int:
        """Total number of decoding steps across all engines. The value may be a few seconds old."""
        return sum(slot.progress.last.steps for slot in self.slots)

    def start(self) -> tuple[str, ...]:
        """Start all engines and return their distinct warnings. Raises TimeoutError if one doesn't
        start in time, and EngineError if one fails or `shutdown` is called in the meantime."""
        self._thread.start()
        return self._started.result()

    def submit(
        self,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingConfig,
        purpose: Purpose = "train",
    ) -> Future[Group]:
        """Start sampling `group_size` completions of `prompt`. Cancelling the future aborts them.

        The engine ends completions `rollout.timeout_s` after it starts sampling them. If an engine
        dies or stops responding, its groups are resampled. Evaluation samples are not recorded. The
        future raises the engine's error if the prompt is invalid, and EngineError if engines keep
        dying.
        """
        with self._lock:
            draw = self._draws[prompt.prompt_id]
            self._draws[prompt.prompt_id] += 1
        return self._enqueue(GroupRequest(prompt, group_size, draw), sampling, purpose)

    def turn(
        self, request: TurnRequest, *, sampling: SamplingConfig, purpose: Purpose = "train"
    ) -> Future[TurnResult]:
        """Start sampling one turn of a conversation, on the engine that sampled the previous turn
        if possible. The turn is resampled if the engine dies."""
        return self._enqueue(request, replace(sampling, max_tokens=request.max_tokens), purpose)

    def _enqueue(
        self, sample: SampleRequest, sampling: SamplingConfig, purpose: Purpose
    ) -> Future[Any]:
        with self._lock:
            if self._ended is not None:
                return failed(self._ended)
            request = _Request(next(self._numbers), sample, sampling, purpose)
            self._open[request.number] = request
            self._calls.put(lambda: self._add(request))

        def on_result(result: Future[Any]) -> None:
            with self._lock:
                self._open.pop(request.number, None)
            if result.cancelled():
                self._calls.put(lambda: self._cancel(request))

        request.result.add_done_callback(on_result)
        return request.result

    def update(self, version: int, transfer: Transfer) -> Future[None]:
        """Send new weights to every engine, including engines that restart later. The same version
        can be sent again to wake sleeping engines.

        The future resolves once all running engines sample from `version` or a later one. It waits
        for restarting engines only with `rollout.time_share`. An engine that takes longer than
        `update_timeout_s` is replaced. The future fails if the weights are invalid. Raises
        RuntimeError if another update is in flight.
        """
        update = _WeightUpdate(version, transfer)
        with self._lock:
            if self._ended is not None:
                return failed(self._ended)
            last = self._requested_update
            if last is not None and not last.done.done():
                raise RuntimeError(
                    f"rollout pool: the update to version {last.version} is not finished. Wait for "
                    f"it before sending version {version}"
                )
            if last is None or last.version != version:
                # Open groups may still be sampled from these weights and keep their draws.
                open_samples = [request.sample for request in self._open.values()]
                groups = [sample for sample in open_samples if isinstance(sample, GroupRequest)]
                names = {group.prompt.prompt_id for group in groups}
                self._draws = Counter({name: self._draws[name] for name in names})
            self._requested_update, self._requested_sleep = update, None
            self._calls.put(lambda: self._begin_update(update))
        return update.done

    def sleep(self) -> Future[None]:
        """Release the GPU memory of every engine until the next `update`. Engines that are loading
        weights finish first.

        The future also resolves if the engines have failed for good. Their memory is then free, so
        the last checkpoint can be saved.
        """
        with self._lock:
            update = self._requested_update
            if update is None or update.done.done():
                if (asleep := self._requested_sleep) is None:
                    asleep = self._requested_sleep = done() if self._ended is not None else Future()
                    self._calls.put(lambda: self._put_to_sleep(asleep))
                return asleep
        return then(update.done, lambda _: self.sleep())

    def shutdown(self) -> None:
        self._end(EngineError("the rollout pool has been shut down"))
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self._kill()

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._ended = self._ended or error
            self._calls.put(lambda: None)

    def _kill(self) -> None:
        for slot in list(self.slots):
            slot.engine.kill()
        self.slots.clear()

    # Everything below runs on the pool's thread.

    def _run(self) -> None:
        try:
            # Long enough for an engine to start and become unresponsive several times.
            least_s = (MAX_RESTARTS + 2) * (self._config.silent_s + self._startup_s)
            period_s = max(RESTART_PERIOD_S, least_s)
            for index in range(self._config.engines):
                if self._ended is None:
                    engine, restarts = self._build(index), RestartLimit(period_s=period_s)
                    self.slots.append(_EngineSlot(index, engine, restarts=restarts))
                    self._await_start(self.slots[-1])
            while self._ended is None:
                self._run_calls()
                self._check_engines()
                self._send()
        except Exception as error:  # every caller's future must resolve
            if self._config.time_share:  # the trainer may save a last checkpoint in their memory
                with suppress(Exception):  # from Ray; the first error is the one to report
                    self._kill()
                    time.sleep(_FREED_S)
            self._end(error)
        with self._lock:
            ended, requests = self._ended, list(self._open.values())
            update, asleep = self._requested_update, self._requested_sleep
        assert ended is not None
        for request in requests:
            request.reply.cancel()
        results = [request.result for request in requests]
        for future in (*results, self._started, *([update.done] if update else ())):
            with suppress(InvalidStateError):  # done or cancelled
                future.set_exception(ended)
        if asleep is not None:
            settle(asleep, lambda: None)

    def _run_calls(self) -> None:
        with suppress(queue.Empty):
            self._calls.get(timeout=POLL_S)()
            while self._ended is None:
                self._calls.get_nowait()()

    def _add(self, request: _Request) -> None:
        insort(self._queue, request, key=lambda request: request.priority)

    def _cancel(self, request: _Request) -> None:
        if request.slot is not None:
            self._take_back(request)
            request.reply.cancel()
        self._queue = [other for other in self._queue if other is not request]

    def _send(self) -> None:
        capacity, index = self._config.max_num_seqs, 0
        while index < len(self._queue):
            available = [s for s in self.slots if s.stage == "ready" and s.sequences < capacity]
            if not available:
                return
            request = self._queue[index]
            slot = self._choose_slot(request, available)
            if slot is None:
                index += 1
                continue
            record = request.purpose == "train"
            reply = slot.engine.sample(request.sample, sampling=request.sampling, record=record)
            request.slot, request.reply, request.sent = slot, reply, time.monotonic()
            del self._queue[index]
            slot.requests[request.number] = request
            slot.sequences += request.sample.size
            slot.load += request.max_tokens
            reply.add_done_callback(
                lambda reply, request=request: self._calls.put(
                    lambda: self._complete(request, reply)
                )
            )

    def _choose_slot(
        self, request: _Request, available: Sequence[_EngineSlot]
    ) -> _EngineSlot | None:
        """Choose the engine that already has the conversation's prefix, or else the least loaded
        one.

        Returns None if the conversation should wait for the engine that has its prefix, because
        that engine is full and every other available engine has at least half its load.
        """
        chosen = min(available, key=lambda slot: (slot.load, slot.index))
        if not isinstance(request.sample, TurnRequest):
            return chosen
        conversation = request.sample.conversation
        if (index := self._prefix_slots.get(conversation)) is not None:
            cached = self.slots[index]
            if cached in available:
                chosen = cached
            elif cached.stage == "ready" and 2 * chosen.load >= cached.load:
                return None
        self._prefix_slots[conversation] = chosen.index
        self._prefix_slots.move_to_end(conversation)
        if len(self._prefix_slots) > _MAX_CONVERSATIONS:
            self._prefix_slots.popitem(last=False)
        return chosen

    def _complete(self, request: _Request, reply: Future[Any]) -> None:
        if request.slot is None or request.reply is not reply:  # cancelled, or sent again
            return
        error = reply.exception()
        if isinstance(error, EngineError):
            self._replace(request.slot, error)
        else:
            self._take_back(request)
            settle(request.result, reply.result)

    def _take_back(self, request: _Request) -> None:
        slot, request.slot = request.slot, None
        assert slot is not None
        del slot.requests[request.number]
        slot.sequences -= request.sample.size
        slot.load -= request.max_tokens

    def _await(self, slot: _EngineSlot, stage: Stage, pending: Future[Any], seconds: float) -> None:
        slot.stage, slot.pending = stage, pending
        slot.deadline = time.monotonic() + seconds
        pending.add_done_callback(lambda _: self._calls.put(lambda: self._advance(slot, pending)))

    def _await_start(self, slot: _EngineSlot) -> None:
        self._await(slot, "starting", slot.engine.ready(), self._startup_s)

    def _advance(self, slot: _EngineSlot, pending: Future[Any]) -> None:
        """Move a slot to its next stage, or replace its engine if `pending` failed."""
        if slot.pending is not pending:  # the engine was replaced
            return
        try:
            result = pending.result()
        except EngineError as error:
            self._replace(slot, error)
            return
        slot.pending = None
        if slot.stage == "loading":
            slot.version = result
        if slot.stage == "starting" and not self._started.done():
            self._warnings += result
        asleep = slot.stage == "starting" and self._config.time_share
        slot.stage = "asleep" if asleep or slot.stage == "going to sleep" else "ready"
        for request in slot.requests.values():  # now the engine samples them again
            request.sent = time.monotonic()
        if all(slot.pending is None for slot in self.slots):
            settle(self._started, lambda: tuple(dict.fromkeys(self._warnings)))
        update = self._current_update
        if self._current_sleep is not None:
            self._put_to_sleep(self._current_sleep)
        elif update is not None:
            if slot.stage == "asleep" or update.version > slot.version:
                self._load(update, [slot])
            self._check_updated()

    def _put_to_sleep(self, asleep: Future[None]) -> None:
        self._current_sleep = asleep
        for slot in self.slots:
            if slot.stage == "ready":
                self._await(slot, "going to sleep", slot.engine.sleep(), self._update_s)
        if all(slot.stage == "asleep" for slot in self.slots):
            settle(asleep, lambda: None)

    def _begin_update(self, update: _WeightUpdate) -> None:
        self._current_update, self._current_sleep = update, None
        self._load(update, [slot for slot in self.slots if slot.stage in ("ready", "asleep")])

    def _load(self, update: _WeightUpdate, slots: Sequence[_EngineSlot]) -> None:
        if not slots:
            return
        loaded = update.transfer({slot.index: slot.engine.actor for slot in slots})
        for slot in slots:
            slot.version = update.version
            self._await(slot, "loading", with_engine_errors(loaded[slot.index]), self._update_s)

    def _check_updated(self) -> None:
        """Resolve the update once all running engines have the new weights. Engines that are still
        restarting load the weights later.

        With `rollout.time_share`, the update also waits for restarting engines, because the trainer
        needs the GPU memory that they use to start.
        """
        waited_for = self._config.time_share
        rest = [slot for slot in self.slots if slot.stage != "starting" or waited_for]
        update = self._current_update
        if update is not None and rest and all(slot.stage == "ready" for slot in rest):
            settle(update.done, lambda: None)

    def _check_engines(self) -> None:
        """Replace engines that missed a deadline or hang."""
        now, silent_s = time.monotonic(), self._config.silent_s
        for slot in self.slots:
            oldest = next(iter(slot.requests.values()), None)
            if slot.pending is not None:
                if now >= slot.deadline and not slot.pending.done():
                    self._replace(slot, EngineError(f"did not {_TASKS[slot.stage]} in time"))
            elif slot.stage == "ready" and oldest and now >= oldest.sent + silent_s:
                error = EngineError(
                    f"returned no {oldest.sample.label} within {silent_s:g} s, although "
                    f"rollout.timeout_s = {self._config.timeout_s:g} cuts it"
                )
                self._replace(slot, error)
        for slot, error in self._stalls.poll(self.slots, lambda line: self.say(line)):
            self._replace(slot, error)

    def _replace(self, slot: _EngineSlot, error: EngineError) -> None:
        """Start a new engine in a slot, and put the old engine's requests back in the queue. Raises
        an error if the pool is still starting or the slot has been restarted too many times."""
        slot.engine.kill()
        name = f"rollout engine {slot.index}"
        if not self._started.done() and _MEMORY_RACE not in str(error):
            if time.monotonic() >= slot.deadline:
                raise TimeoutError(
                    f"{name} was not ready within {self._startup_s:g} s (run.startup_timeout_s)"
                )
            raise EngineError(f"{name} did not start: {error}") from error
        if times := slot.restarts.count():
            raise EngineError(f"{name} failed {times}. The last error: {error}") from error
        slot.engine, slot.version, slot.progress = self._build(slot.index), 0, _Progress()
        self._await_start(slot)
        self._check_updated()
        self.say(f"restarted {name}: {error}")
        for request in list(slot.requests.values()):
            self._take_back(request)
            reply = request.reply
            # A reply that arrived before the engine died is valid.
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                settle(request.result, reply.result)
            else:
                self._add(request)


class _StallDetector:
    """Detects engines that have work but don't finish any steps.

    A process keeps responding when its GPU hangs, so the pool polls the number of finished steps.
    Time spent idle, asleep or in weight updates doesn't count, nor does the first step, which may
    compile kernels.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next = clock, clock() + STALL_POLL_S
        self._polls = PollClock(STALL_POLL_S, clock)

    def poll(
        self, slots: Sequence[_EngineSlot], warn: Callable[[str], object]
    ) -> list[tuple[_EngineSlot, EngineError]]:
        """Return the slots of hung engines, with an error for each. Calls `warn` for engines that
        have stalled, but not yet for long enough to count as hung."""
        if self._clock() < self._next:
            return []
        self._next, elapsed_s = self._clock() + STALL_POLL_S, self._polls.elapsed()
        stuck: list[tuple[_EngineSlot, EngineError]] = []
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
            longest_s = progress.last.longest_s
            message = (
                f"has finished no step for {progress.stalled_s:.0f} s with {slot.sequences} "
                f"completions to sample; its longest step took {longest_s:.2g} s"
            )
            stuck_s = max(STUCK_S, _STUCK_STEPS * longest_s)
            if not progress.last.steps or progress.stalled_s < max(WARN_S, _WARN_STEPS * longest_s):
                continue
            if progress.stalled_s >= stuck_s:
                stuck.append((slot, EngineError(f"hung: it {message}")))
            elif not progress.warned:
                progress.warned = True
                warn(
                    f"rollout engine {slot.index} {message}. It will be restarted after "
                    f"{stuck_s:.0f} s"
                )
        return stuck
