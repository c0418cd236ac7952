"""The driver's interface to the rollout engines.

`RolloutPool` accesses engines through a Protocol based on futures. `keel.rollout.pool.ray_engines`
implements this Protocol with Ray actors. The pool dispatches requests on its own thread, so that
engines never wait for a busy driver. `Dispatcher` chooses the engine for each request, and
`EngineSupervisor` manages the state of each engine.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.futures import then
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt, Purpose
from keel.rollout.pool.dispatcher import Dispatcher, Request
from keel.rollout.pool.engine_supervisor import (
    EngineSlot,
    EngineSupervisor,
    RolloutEngine,
    Translate,
    WeightUpdate,
)
from keel.rollout.pool.stall_detector import StallDetector
from keel.rollout.spec import EngineError
from keel.weights.sync import Transfer

_STOP_S = 10.0
"""Time limit for the pool's thread to stop, in seconds. The thread never blocks on an engine."""
_FREED_S = 3.0
"""Time in seconds until the GPU memory of a killed engine is free."""


class RolloutPool:
    """Samples groups and turns on several engines and keeps their weights in sync."""

    def __init__(
        self,
        config: RolloutConfig,
        build: Callable[[int], RolloutEngine],
        *,
        startup_timeout_s: float,
        update_timeout_s: float | None = None,
        translate: Translate = lambda future: future,
    ) -> None:
        """Create a pool without starting its engines.

        `build(i)` begins to start engine i. `update_timeout_s` is the time limit for a weight
        update and defaults to `rollout.update_timeout_s`.
        """
        self.say: Callable[[str], Any] = lambda _: None
        """Callback for messages about warnings and restarts. Called on the pool's thread."""
        self._config = config
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="keel-pool", daemon=True)
        # Shared with the callers' threads, under `_lock`:
        self._lock = threading.Lock()
        self._submitted: list[Request] = []
        self._cancelled: list[Request] = []
        self._open: dict[int, Request] = {}
        """Requests that have no result yet, by request number."""
        self._draws: Counter[str] = Counter()
        """Number of groups requested for each prompt with the current weights."""
        self._update: WeightUpdate | None = None
        self._asleep: Future[None] | None = None
        """Future returned by the last `sleep`. The next update clears it."""
        self._ended: Exception | None = None
        self._memory_freed = False
        """True if the engines failed permanently and were killed. Their GPU memory is then free."""
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Events that wake the thread: the number of a finished request, or None for any other
        event."""
        # Owned by the thread:
        self._supervisor = EngineSupervisor(
            config,
            build,
            translate,
            startup_s=startup_timeout_s,
            update_s=update_timeout_s or config.update_timeout_s,
        )
        self._dispatcher = Dispatcher(config, on_done=self._events.put)
        self._stalls = StallDetector()
        self._watched: set[Future[Any]] = set()

    @property
    def restarts(self) -> int:
        """Number of engine restarts so far."""
        return self._supervisor.restarts

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Duration of each startup phase in seconds, for the slowest engine."""
        return self._supervisor.start_seconds

    @property
    def steps(self) -> int:
        """Total number of decoding steps of all engines. The value may be a few seconds old."""
        return self._stalls.steps

    def start(self) -> tuple[str, ...]:
        """Start all engines and return their warnings.

        Raises EngineError or TimeoutError if an engine does not start.
        """
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
        sampling: SamplingConfig | None = None,
        purpose: Purpose = "train",
    ) -> Future[Group]:
        """Sample `group_size` completions of `prompt`. Returns a future for the group.

        Cancelling the future aborts the completions. The engine stops them after
        `rollout.timeout_s`, counted from the start of sampling. If an engine dies or stops
        responding, its groups are sampled again. Evaluation groups are sampled without recording
        routes and sampling masks. The future fails with the engine's error if the prompt is
        invalid, and with EngineError if engines keep dying.
        """
        options: dict[str, Any] = {"group_size": group_size, "record": purpose == "train"}
        options["sampling"] = sampling = sampling or self._config.sampling
        with self._lock:
            options["draw"] = self._draws[prompt.prompt_id]
            self._draws[prompt.prompt_id] += 1
        return self._enqueue(
            label=f"group of prompt {prompt.prompt_id}",
            purpose=purpose,
            sequences=group_size,
            tokens=group_size * sampling.max_tokens,
            call=lambda engine: engine.generate(prompt, **options),
            prompt_id=prompt.prompt_id,
        )

    def turn(
        self,
        request: TurnRequest,
        *,
        sampling: SamplingConfig | None = None,
        purpose: Purpose = "train",
    ) -> Future[TurnResult]:
        """Sample one turn of a conversation and return a future for it.

        If possible, the turn runs on the engine that sampled the conversation's previous turn. If
        that engine dies, the turn is sampled again.
        """
        options = sampling or self._config.sampling
        record = purpose == "train"
        return self._enqueue(
            label=f"turn of conversation {request.conversation}",
            purpose=purpose,
            sequences=1,
            tokens=request.max_tokens,
            call=lambda engine: engine.turn(request, sampling=options, record=record),
            conversation=request.conversation,
        )

    def _enqueue(self, **fields: Any) -> Future[Any]:
        with self._lock:
            request = Request(number=next(self._numbers), **fields)
            if (ended := self._ended) is None:
                self._submitted.append(request)
                self._open[request.number] = request
                self._wake()
        if ended is not None:
            request.fail(ended)
        request.result.add_done_callback(partial(self._on_result, request))
        return request.result

    def update(self, version: int, transfer: Transfer) -> Future[None]:
        """Send new weights to every engine, including engines that restart later.

        The future resolves once all running engines sample from `version` or a later one. It waits
        for restarting engines only with `rollout.time_share`. The same version may be sent again to
        wake sleeping engines. An engine that takes longer than the pool's `update_timeout_s` is
        replaced. The future fails if the weights themselves are invalid. Raises RuntimeError if
        another update is in flight.
        """
        update = WeightUpdate(version, transfer)
        with self._lock:
            if self._ended is not None:
                update.done.set_exception(self._ended)
            elif self._update is not None and not self._update.done.done():
                raise RuntimeError(
                    f"rollout pool: the update to version {self._update.version} is not finished. "
                    f"Wait for it before sending version {version}"
                )
            else:
                if self._update is None or self._update.version != version:
                    # Open groups may still be sampled from these weights and keep their draws.
                    pending = [o for o in self._open.values() if not o.result.done()]
                    names = {request.prompt_id for request in pending}
                    self._draws = Counter({name: self._draws[name] for name in names})
                self._update, self._asleep = update, None
                self._wake()
        return update.done

    def sleep(self) -> Future[None]:
        """Release the GPU memory of every engine until the next `update`.

        Engines that are loading weights finish loading first. If the engines failed permanently,
        the future resolves as well, so that the last checkpoint can use their memory.
        """
        with self._lock:
            update = self._update
            if update is None or update.done.done():
                if self._asleep is None:
                    self._asleep = Future()
                    if self._ended is not None:
                        self._end_sleep(self._asleep)
                    self._wake()
                return self._asleep
        return then(update.done, lambda _: self.sleep())

    def shutdown(self) -> None:
        """Stop all engines. Unfinished requests fail."""
        self._end(EngineError("the rollout pool has been shut down"))
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._supervisor.kill()

    def _wake(self) -> None:
        self._events.put(None)

    def _on_result(self, request: Request, result: Future[Any]) -> None:
        with self._lock:
            self._open.pop(request.number, None)
            if result.cancelled():
                self._cancelled.append(request)
                self._wake()

    def _end(self, error: Exception) -> None:
        with self._lock:
            self._ended = self._ended or error
            self._wake()

    # Everything below runs on the pool's thread.

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._dispatcher.send(self._supervisor.slots)
                self._handle_events()
        except Exception as error:  # every caller's future must resolve
            if self._config.time_share:  # the trainer may save a last checkpoint in their memory
                with suppress(Exception):  # from Ray; the first error is the one to report
                    self._supervisor.kill()
                    time.sleep(_FREED_S)
            with self._lock:
                self._memory_freed = self._config.time_share and self._ended is None
            self._end(error)
        assert self._ended is not None
        with self._lock:
            requests = [*self._dispatcher.close(), *self._submitted]
            updates = [u.done for u in (self._supervisor.target, self._update) if u is not None]
            asleep = self._asleep
        for request in requests:
            request.fail(self._ended)
        for done in updates:
            if not done.done():
                done.set_exception(self._ended)
        if asleep is not None and not asleep.done():
            self._end_sleep(asleep)

    def _end_sleep(self, asleep: Future[None]) -> None:
        if self._memory_freed:
            asleep.set_result(None)
        else:
            asleep.set_exception(self._ended)

    def _take_calls(self) -> bool:
        """Process the calls that other threads have queued.

        Returns False if the thread should stop.
        """
        with self._lock:
            if self._ended is not None:
                return False
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            update, resting = self._update, self._asleep
        for request in submitted:
            self._dispatcher.add(request)
        self._supervisor.follow(update, resting)
        for request in cancelled:
            self._dispatcher.cancel(request)
        return True

    def _handle_events(self) -> None:
        pending = self._supervisor.pending
        for future in pending.keys() - self._watched:
            future.add_done_callback(lambda _: self._wake())
        self._watched = set(pending)
        deadlines = [slot.deadline for slot in pending.values()]
        if (deadline := self._dispatcher.next_deadline()) is not None:
            deadlines.append(deadline)
        if deadlines:  # engines are polled only while something is pending
            deadlines.append(self._stalls.next_poll)
        for number in self._wait_events(min(deadlines, default=None)):
            if number is not None and (failure := self._dispatcher.complete(number)) is not None:
                self._replace(*failure)
        for future, slot in pending.items():
            if slot.pending is not future:
                continue  # replaced meanwhile
            over = future.done() or time.monotonic() >= slot.deadline
            if over and (error := self._supervisor.advance(slot)) is not None:
                self._replace(slot, error)
            elif over and slot.stage == "ready":
                self._dispatcher.restart_deadlines(slot)
        while (entry := self._dispatcher.overdue()) is not None:
            error = EngineError(
                f"fell silent: no {entry.request.label} within {self._config.silent_s:g} s, though "
                f"rollout.timeout_s = {self._config.timeout_s:g} cuts it"
            )
            self._replace(entry.slot, error)
        for slot, error in self._stalls.poll(self._supervisor.slots, lambda line: self.say(line)):
            self._replace(slot, error)

    def _wait_events(self, until: float | None) -> list[int | None]:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        events: list[int | None] = []
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        return events

    def _replace(self, slot: EngineSlot, error: EngineError) -> None:
        self._supervisor.replace(slot, error)
        self.say(f"rollout engine {slot.index} is restarted: {error}")
        self._dispatcher.requeue(slot)
