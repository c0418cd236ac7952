"""Assigns requests to engines and tracks them until they complete.

A group goes to the least loaded engine and is never split across engines. A conversation goes back
to the engine that has its prefix in the KV cache. This module runs on the pool's thread and never
blocks.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from keel.configs.schema import RolloutConfig
from keel.rl.types import Purpose
from keel.rollout.pool.engine_supervisor import EngineSlot, RolloutEngine
from keel.rollout.spec import EngineError

_MAX_HOMES = 100_000
"""Maximum number of conversations whose engine the dispatcher remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to sample a group or a turn."""

    number: int
    label: str
    """Name of the prompt or conversation, for log messages."""
    purpose: Purpose
    sequences: int
    tokens: int
    """Upper bound on the total number of tokens sampled by the request's sequences."""
    call: Callable[[RolloutEngine], Future[Any]]
    prompt_id: str = ""
    """Id of the prompt, if this request samples a group."""
    conversation: str = ""
    """Id of the conversation, if this request samples a turn. The dispatcher prefers the engine
    that holds the conversation's prefix."""
    result: Future[Any] = field(default_factory=Future[Any])

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key for the queue. Evaluation requests come first, because the training loop waits
        for them."""
        return self.purpose != "eval", self.number

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # the caller has cancelled it
            self.result.set_exception(error)


@dataclass(slots=True)
class _InFlight:
    """A request that was sent to an engine and has not completed yet."""

    request: Request
    slot: EngineSlot
    future: Future[Any]
    deadline: float
    """Time at which the engine counts as unresponsive. Ignored while the slot is not ready."""


class Dispatcher:
    """Assigns requests to engines and tracks them until they complete."""

    def __init__(self, config: RolloutConfig, *, on_done: Callable[[int], Any]) -> None:
        """Create a dispatcher without any requests.

        `on_done(number)` is called when an engine finishes a request, possibly on another thread.
        The pool must then call `complete`.
        """
        self._config, self._on_done = config, on_done
        self._queue: list[Request] = []
        """Waiting requests, sorted by rank."""
        self._in_flight: dict[int, _InFlight] = {}
        """Requests by number, ordered by deadline."""
        self._homes: OrderedDict[str, int] = OrderedDict()
        """Slot that sampled each conversation's last turn, least recently used first."""

    def add(self, request: Request) -> None:
        insort(self._queue, request, key=lambda request: request.rank)

    def cancel(self, request: Request) -> None:
        """Drop a request that the caller has cancelled."""
        if (entry := self._in_flight.get(request.number)) is not None:
            self._remove(request.number)
            entry.future.cancel()
        self._queue = [other for other in self._queue if other is not request]

    def send(self, slots: Sequence[EngineSlot]) -> None:
        """Send queued requests to engines until all the engines are full."""
        capacity, index = self._config.max_num_seqs, 0
        while index < len(self._queue):
            available = [s for s in slots if s.stage == "ready" and s.sequences < capacity]
            if not available:
                return
            request = self._queue[index]  # stays queued, and so fails with the pool, if this raises
            slot = self._choose_slot(request, slots, available)
            if slot is None:
                index += 1
                continue
            future = request.call(slot.engine)
            del self._queue[index]
            self._in_flight[request.number] = _InFlight(request, slot, future, self._deadline())
            slot.sequences += request.sequences
            slot.load += request.tokens
            future.add_done_callback(lambda _, number=request.number: self._on_done(number))

    def _choose_slot(
        self, request: Request, slots: Sequence[EngineSlot], available: Sequence[EngineSlot]
    ) -> EngineSlot | None:
        """Choose the engine for a request.

        A conversation goes to the engine that has its prefix, if possible. All other requests go to
        the least loaded engine. Returns None if the conversation should wait for its own engine.
        This is the case if that engine is full and no available engine has less than half of its
        load.
        """
        chosen = min(available, key=lambda slot: (slot.load, slot.index))
        if not request.conversation:
            return chosen
        if (home := self._homes.get(request.conversation)) is not None:
            if slots[home] in available:
                chosen = slots[home]
            elif slots[home].stage == "ready" and 2 * chosen.load >= slots[home].load:
                return None
        self._homes[request.conversation] = chosen.index
        self._homes.move_to_end(request.conversation)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return chosen

    def complete(self, number: int) -> tuple[EngineSlot, EngineError] | None:
        """Pass the result of a finished request to the caller.

        If the engine died, return its slot and the error instead. The request then stays in flight
        until `requeue` is called.
        """
        entry = self._in_flight.get(number)
        if entry is None or not entry.future.done():  # requeued with its engine
            return None
        error = entry.future.exception()
        if isinstance(error, EngineError):
            return entry.slot, error
        _finish(self._remove(number), entry.future)
        return None

    def requeue(self, slot: EngineSlot) -> None:
        """Put all requests of a dead engine back into the queue."""
        for entry in self._in_slot(slot):
            request, future = self._remove(entry.request.number), entry.future
            # A result that arrived before the engine died is valid.
            if future.done() and not future.cancelled() and future.exception() is None:
                _finish(request, future)
            else:
                self.add(request)

    def restart_deadlines(self, slot: EngineSlot) -> None:
        """Restart the deadlines of a slot's requests, once its engine can sample again."""
        for entry in self._in_slot(slot):
            entry.deadline = self._deadline()
            self._in_flight[entry.request.number] = self._in_flight.pop(entry.request.number)

    def next_deadline(self) -> float | None:
        return next((entry.deadline for entry in self._sampling()), None)

    def overdue(self) -> _InFlight | None:
        """Return a request that has passed its deadline without a result, if there is one."""
        now = time.monotonic()
        late = takewhile(lambda entry: entry.deadline <= now, self._sampling())
        return next((entry for entry in late if not entry.future.done()), None)

    def close(self) -> list[Request]:
        """Cancel the requests in flight. Returns all unfinished requests."""
        for entry in self._in_flight.values():
            entry.future.cancel()
        return [*(entry.request for entry in self._in_flight.values()), *self._queue]

    def _sampling(self) -> Iterator[_InFlight]:
        return (entry for entry in self._in_flight.values() if entry.slot.stage == "ready")

    def _in_slot(self, slot: EngineSlot) -> list[_InFlight]:
        return [entry for entry in self._in_flight.values() if entry.slot is slot]

    def _remove(self, number: int) -> Request:
        entry = self._in_flight.pop(number)
        entry.slot.sequences -= entry.request.sequences
        entry.slot.load -= entry.request.tokens
        return entry.request

    def _deadline(self) -> float:
        return time.monotonic() + self._config.silent_s


def _finish(request: Request, future: Future[Any]) -> None:
    """Pass an engine's result to the caller, unless the request was cancelled."""
    with suppress(InvalidStateError):
        if (error := future.exception()) is not None:
            request.result.set_exception(error)
        else:
            request.result.set_result(future.result())
