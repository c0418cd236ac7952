"""What waits for an engine, and what engines are at. Belongs to the pool's thread, and never waits.

Groups go to the engine with the least to do, and are never split; a conversation goes back to the
engine that has its prefix in its cache.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice, takewhile
from typing import Any

from keel.configs.schema import RolloutConfig
from keel.rollout.pool.requests import Flight, Order, Slot
from keel.rollout.spec import EngineError

MAX_HOMES = 100_000
"""Conversations whose engine is remembered."""


class Work:
    """Orders on their way through the engines."""

    def __init__(self, config: RolloutConfig, *, tell: Callable[[int], Any]) -> None:
        """`tell(number)` is called, on any thread, when an engine is done with an order, which then
        has to `land`."""
        self._config, self._tell = config, tell
        self._waiting: list[Order] = []
        """By rank."""
        self._flights: dict[int, Flight] = {}
        """By number of the order, the first to be late first."""
        self._homes: OrderedDict[str, int] = OrderedDict()
        """Slot of each conversation's last turn, the latest last."""

    def add(self, order: Order) -> None:
        insort(self._waiting, order, key=lambda order: order.rank)

    def give_up(self, order: Order) -> None:
        """Its caller has cancelled it."""
        if (flight := self._flights.get(order.number)) is not None:
            self._take(order.number)
            flight.future.cancel()
        self._waiting = [other for other in self._waiting if other is not order]

    def send(self, slots: Sequence[Slot]) -> None:
        """Give orders to engines, until all are full."""
        at, able = 0, self._able(slots)
        while able and at < len(self._waiting):
            order = self._waiting[at]  # and there still, to be failed, if the call raises
            slot = self._place(order, slots, able)
            if slot is None:
                at += 1
                continue
            future = order.ask(slot.engine)
            del self._waiting[at]
            self._flights[order.number] = Flight(order, slot, future, self._silent_at())
            slot.sequences += order.sequences
            slot.load += order.tokens
            future.add_done_callback(partial(self._done_with, order.number))
            able = self._able(slots)

    def _able(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those that have room."""
        most = self._config.max_num_seqs
        return [slot for slot in slots if slot.stage == "ready" and slot.sequences < most]

    def _place(self, order: Order, slots: Sequence[Slot], able: Sequence[Slot]) -> Slot | None:
        """Of the slots that are able, the one with the least to do; for a conversation the one that
        has its prefix. None: it waits for room there, since no other has less than half as much to
        do."""
        chosen = min(able, key=lambda slot: (slot.load, slot.index))
        if not order.conversation:
            return chosen
        if (home := self._homes.get(order.conversation)) is not None:
            if slots[home] in able:
                chosen = slots[home]
            elif slots[home].stage == "ready" and 2 * chosen.load >= slots[home].load:
                return None
        self._homes[order.conversation] = chosen.index
        self._homes.move_to_end(order.conversation)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        return chosen

    def _done_with(self, number: int, _: Future[Any]) -> None:
        self._tell(number)

    def land(self, number: int) -> tuple[Slot, EngineError] | None:
        """An engine is done with an order: pass on what came of it. Returns the engine if it is
        gone, and why; the order is then among what is sampled `again`."""
        flight = self._flights.get(number)
        if flight is None or not flight.future.done():  # went down with another of its engine
            return None
        error = flight.future.exception()
        if isinstance(error, EngineError):
            return flight.slot, error
        if error is not None:
            self._take(number).fail(error)
        else:
            self._take(number).give(flight.future.result())
        return None

    def again(self, slot: Slot) -> None:
        """A slot's engine is gone: what it was at is sampled elsewhere."""
        for flight in self._of(slot):
            order, future = self._take(flight.order.number), flight.future
            # What had already arrived when the engine died is as good as any.
            if future.done() and not future.cancelled() and future.exception() is None:
                order.give(future.result())
            else:
                self.add(order)

    def resumes(self, slot: Slot) -> None:
        """A slot can sample (again): time counts from now on."""
        for flight in self._of(slot):
            flight.deadline = self._silent_at()
            self._flights[flight.order.number] = self._flights.pop(flight.order.number)

    def deadline(self) -> Sequence[float]:
        """When the next engine will have been silent for too long, if there is one."""
        return [flight.deadline for flight in islice(self._sampling(), 1)]

    def late(self) -> Sequence[Flight]:
        """What engines have been silent about for too long."""
        now = time.monotonic()
        return list(takewhile(lambda flight: flight.deadline <= now, self._sampling()))

    def has(self, flight: Flight) -> bool:
        return self._flights.get(flight.order.number) is flight

    def end(self) -> list[Order]:
        """Give up everything; what was open."""
        for flight in self._flights.values():
            flight.future.cancel()
        return [*(flight.order for flight in self._flights.values()), *self._waiting]

    def _sampling(self) -> Iterator[Flight]:
        """What engines are at that can sample, the first to be late first; each other engine has a
        deadline of its own."""
        return (flight for flight in self._flights.values() if flight.slot.stage == "ready")

    def _of(self, slot: Slot) -> list[Flight]:
        return [flight for flight in self._flights.values() if flight.slot is slot]

    def _take(self, number: int) -> Order:
        flight = self._flights.pop(number)
        flight.slot.sequences -= flight.order.sequences
        flight.slot.load -= flight.order.tokens
        return flight.order

    def _silent_at(self) -> float:
        return time.monotonic() + self._config.silent_s
