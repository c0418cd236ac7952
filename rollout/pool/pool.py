"""The driver's interface to the rollout engines.

`RolloutPool` accesses engines through a Protocol based on futures. `keel.rollout.pool.ray_engines`
implements this Protocol with Ray actors. The pool dispatches requests on its own thread, so that
engines never wait for a busy driver. `EngineSupervisor` manages the state of each engine. A group
goes to the least loaded engine and is never split across engines. A conversation goes back to the
engine that has its prefix in the KV cache.
"""

import itertools
import queue
import threading
import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.futures import settle, then
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt, Purpose
from keel.rollout.pool.engine_supervisor import (
    EngineSlot,
    EngineSupervisor,
    RolloutEngine,
    StallDetector,
    WeightUpdate,
)
from keel.rollout.spec import EngineError, GroupRequest, SampleRequest
from keel.weights.sync import Transfer

_STOP_S = 10.0
_FREED_S = 3.0  # time in seconds until the GPU memory of a killed engine is free
_MAX_HOMES = 100_000


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    sample: SampleRequest
    sampling: SamplingConfig
    purpose: Purpose
    label: str
    sequences: int
    tokens: int  # upper bound on the number of tokens sampled by all sequences
    result: Future[Any] = field(default_factory=Future[Any])
    slot: EngineSlot | None = None
    answer: Future[Any] = field(default_factory=Future[Any])
    deadline: float = 0.0  # when the engine counts as unresponsive, if the slot is ready

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key for the queue. Evaluation requests go first, because the training loop waits for
        them."""
        return self.purpose != "eval", self.number


class RolloutPool:
    """Samples groups and turns on several engines and keeps their weights in sync."""

    def __init__(
        self,
        config: RolloutConfig,
        build: Callable[[int], RolloutEngine],
        *,
        startup_timeout_s: float,
        update_timeout_s: float | None = None,
    ) -> None:
        """Create the pool without starting its engines. `build(i)` starts engine i without waiting
        for it. `update_timeout_s` is the time limit for a weight update and defaults to
        `rollout.update_timeout_s`."""
        self.say: Callable[[str], Any] = lambda _: None  # for warnings, on the pool's thread
        self._config = config
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="keel-pool", daemon=True)
        # Shared with the callers' threads, under `_lock`:
        self._lock = threading.Lock()
        self._submitted: list[_Request] = []
        self._cancelled: list[_Request] = []
        self._open: dict[int, _Request] = {}
        self._draws: Counter[str] = Counter()  # groups requested for each prompt with these weights
        self._update: WeightUpdate | None = None
        self._asleep: Future[None] | None = None  # from the last `sleep`, until the next update
        self._ended: Exception | None = None
        self._memory_freed = False  # True if the engines failed for good and were killed
        self._events: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()  # wake the thread
        # Owned by the thread:
        self._supervisor = EngineSupervisor(
            config,
            build,
            startup_s=startup_timeout_s,
            update_s=update_timeout_s or config.update_timeout_s,
        )
        self._stalls = StallDetector()
        self._watched: set[Future[Any]] = set()
        self._queue: list[_Request] = []
        self._in_flight: dict[int, _Request] = {}  # requests by number, ordered by deadline
        self._homes: OrderedDict[str, int] = OrderedDict()  # slot by conversation, oldest first

    @property
    def steps(self) -> int:
        """Total number of decoding steps across all engines. The value may be a few seconds old."""
        return sum(slot.progress.last.steps for slot in self._supervisor.slots)

    def start(self) -> tuple[str, ...]:
        """Start all engines and return their warnings. Raises EngineError or TimeoutError if one
        doesn't start."""
        warnings = self._supervisor.start()
        if self._config.time_share:
            self._asleep = Future()
            self._asleep.set_result(None)
        self._thread.start()
        return warnings

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
        sample = GroupRequest(prompt, group_size, draw)
        label, tokens = f"group of prompt {prompt.prompt_id}", group_size * sampling.max_tokens
        return self._enqueue(sample, sampling, purpose, label, group_size, tokens)

    def turn(
        self,
        request: TurnRequest,
        *,
        sampling: SamplingConfig,
        purpose: Purpose = "train",
    ) -> Future[TurnResult]:
        """Start sampling one turn of a conversation, on the engine that sampled the previous turn
        if possible. The turn is resampled if the engine dies."""
        label = f"turn of conversation {request.conversation}"
        return self._enqueue(request, sampling, purpose, label, 1, request.max_tokens)

    def _enqueue(self, sample: SampleRequest, *fields: Any) -> Future[Any]:
        with self._lock:
            request = _Request(next(self._numbers), sample, *fields)
            if (ended := self._ended) is None:
                self._submitted.append(request)
                self._open[request.number] = request
                self._events.put(None)
        if ended is not None:
            request.result.set_exception(ended)

        def on_result(result: Future[Any]) -> None:
            with self._lock:
                self._open.pop(request.number, None)
                if result.cancelled():
                    self._cancelled.append(request)
                    self._events.put(None)

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
        update = WeightUpdate(version, transfer)
        with self._lock:
            if self._ended is not None:
                update.done.set_exception(self._ended)
                return update.done
            if self._update is not None and not self._update.done.done():
                raise RuntimeError(
                    f"rollout pool: the update to version {self._update.version} is not finished. "
                    f"Wait for it before sending version {version}"
                )
            if self._update is None or self._update.version != version:
                # Open groups may still be sampled from these weights and keep their draws.
                unfinished = [one.sample for one in self._open.values() if not one.result.done()]
                groups = [one for one in unfinished if isinstance(one, GroupRequest)]
                names = {group.prompt.prompt_id for group in groups}
                self._draws = Counter({name: self._draws[name] for name in names})
            self._update, self._asleep = update, None
            self._events.put(None)
        return update.done

    def sleep(self) -> Future[None]:
        """Release the GPU memory of every engine until the next `update`. Engines that are loading
        weights finish first.

        The future also resolves if the engines have failed for good. Their memory is then free, so
        the last checkpoint can be saved.
        """
        with self._lock:
            update = self._update
            if update is None or update.done.done():
                if self._asleep is None:
                    self._asleep = Future()
                    if self._ended is not None:
                        self._end_sleep(self._asleep)
                    self._events.put(None)
                return self._asleep
        return then(update.done, lambda _: self.sleep())

    def shutdown(self) -> None:
        self._end(EngineError("the rollout pool has been shut down"))
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._supervisor.kill()

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._ended = self._ended or error
            self._events.put(None)

    # Everything below runs on the pool's thread.

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._send()
                self._handle_events()
        except Exception as error:  # every caller's future must resolve
            if self._config.time_share:  # the trainer may save a last checkpoint in their memory
                with suppress(Exception):  # from Ray; the first error is the one to report
                    self._supervisor.kill()
                    time.sleep(_FREED_S)
            with self._lock:
                self._memory_freed = self._config.time_share and self._ended is None
            self._end(error)
        with self._lock:
            requests = [*self._in_flight.values(), *self._queue, *self._submitted]
            updates = [u.done for u in (self._supervisor.target, self._update) if u is not None]
            asleep = self._asleep
        for request in self._in_flight.values():
            request.answer.cancel()
        for future in (*(request.result for request in requests), *updates):
            with suppress(InvalidStateError):  # done or cancelled
                future.set_exception(self._ended)
        if asleep is not None and not asleep.done():
            self._end_sleep(asleep)

    def _end_sleep(self, asleep: Future[None]) -> None:
        if self._memory_freed:
            asleep.set_result(None)
        else:
            asleep.set_exception(self._ended)

    def _take_calls(self) -> bool:
        """Process calls from other threads. Returns False if the thread should stop."""
        with self._lock:
            if self._ended is not None:
                return False
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            update, resting = self._update, self._asleep
        for request in submitted:
            self._add(request)
        self._supervisor.follow(update, resting)
        for request in cancelled:
            if request.number in self._in_flight:
                self._take_back(request)
                request.answer.cancel()
            self._queue = [other for other in self._queue if other is not request]
        return True

    def _add(self, request: _Request) -> None:
        insort(self._queue, request, key=lambda request: request.rank)

    def _send(self) -> None:
        slots, capacity, index = self._supervisor.slots, self._config.max_num_seqs, 0
        while index < len(self._queue):
            available = [s for s in slots if s.stage == "ready" and s.sequences < capacity]
            if not available:
                return
            request = self._queue[index]  # stays queued, and so fails with the pool, if this raises
            slot = self._choose_slot(request, slots, available)
            if slot is None:
                index += 1
                continue
            request.answer = slot.engine.sample(
                request.sample, sampling=request.sampling, record=request.purpose == "train"
            )
            request.slot, request.deadline = slot, time.monotonic() + self._config.silent_s
            del self._queue[index]
            self._in_flight[request.number] = request
            slot.sequences += request.sequences
            slot.load += request.tokens
            request.answer.add_done_callback(lambda _, request=request: self._events.put(request))

    def _choose_slot(
        self, request: _Request, slots: Sequence[EngineSlot], available: Sequence[EngineSlot]
    ) -> EngineSlot | None:
        """Choose the engine that already has the conversation's prefix, or else the least loaded
        one.

        Returns None if the conversation should wait for the engine that has its prefix, because
        that engine is full and every other available engine has at least half its load.
        """
        chosen = min(available, key=lambda slot: (slot.load, slot.index))
        if not isinstance(request.sample, TurnRequest):
            return chosen
        conversation = request.sample.conversation
        if (home := self._homes.get(conversation)) is not None:
            if slots[home] in available:
                chosen = slots[home]
            elif slots[home].stage == "ready" and 2 * chosen.load >= slots[home].load:
                return None
        self._homes[conversation] = chosen.index
        self._homes.move_to_end(conversation)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return chosen

    def _take_back(self, request: _Request) -> None:
        slot = request.slot
        assert slot is not None
        del self._in_flight[request.number]
        slot.sequences -= request.sequences
        slot.load -= request.tokens
        request.slot = None

    def _handle_events(self) -> None:
        pending = self._supervisor.pending
        for future in pending.keys() - self._watched:
            future.add_done_callback(lambda _: self._events.put(None))
        self._watched = set(pending)
        deadlines = [slot.deadline for slot in pending.values()]
        deadlines += [request.deadline for request in itertools.islice(self._sampling(), 1)]
        if deadlines:  # engines are polled only while something is pending
            deadlines.append(self._stalls.next_poll)
        for request in self._wait_events(min(deadlines, default=None)):
            if request is not None:
                self._complete(request)
        for future, slot in pending.items():
            if slot.pending is not future:
                continue  # replaced meanwhile
            over = future.done() or time.monotonic() >= slot.deadline
            if over and (error := self._supervisor.advance(slot)) is not None:
                self._replace(slot, error)
            elif over and slot.stage == "ready":
                for request in self._in_slot(slot):  # now the engine can sample again
                    request.deadline = time.monotonic() + self._config.silent_s
                    self._in_flight[request.number] = self._in_flight.pop(request.number)
        now = time.monotonic()
        for request in list(takewhile(lambda request: request.deadline <= now, self._sampling())):
            if request.slot is not None and not request.answer.done():
                error = EngineError(
                    f"fell silent: no {request.label} within {self._config.silent_s:g} s, though "
                    f"rollout.timeout_s = {self._config.timeout_s:g} cuts it"
                )
                self._replace(request.slot, error)
        for slot, error in self._stalls.poll(self._supervisor.slots, lambda line: self.say(line)):
            self._replace(slot, error)

    def _wait_events(self, until: float | None) -> list[_Request | None]:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        events: list[_Request | None] = []
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        return events

    def _complete(self, request: _Request) -> None:
        # An answer that is not done belongs to the next engine of a request sent again.
        if request.slot is None or not request.answer.done():
            return
        error = request.answer.exception()
        if isinstance(error, EngineError):
            self._replace(request.slot, error)
        else:
            self._take_back(request)
            settle(request.result, request.answer.result)

    def _sampling(self) -> Iterator[_Request]:
        for request in self._in_flight.values():
            if request.slot is not None and request.slot.stage == "ready":
                yield request

    def _in_slot(self, slot: EngineSlot) -> list[_Request]:
        return [request for request in self._in_flight.values() if request.slot is slot]

    def _replace(self, slot: EngineSlot, error: EngineError) -> None:
        """Start a new engine in a slot, and put the old engine's requests back in the queue."""
        self._supervisor.replace(slot, error)
        self.say(f"rollout engine {slot.index} is restarted: {error}")
        for request in self._in_slot(slot):
            self._take_back(request)
            answer = request.answer
            # An answer that arrived before the engine died is valid.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                settle(request.result, answer.result)
            else:
                self._add(request)
