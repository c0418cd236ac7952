"""The engines of a run, from the driver's side: who samples what, and what becomes of the groups of
an engine that dies.

`RolloutPool` knows engines as a Protocol of futures, so its tests use fakes and take milliseconds;
`keel.rollout.pool.ray_engines` puts Ray actors behind it. A thread of its own hands out the groups,
so that engines never wait for a driver that is busy elsewhere. A group is never split over engines.
What stage each engine is at is `keel.rollout.pool.lifecycle`'s.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from functools import partial
from typing import Any

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Group, Prompt, Purpose
from keel.rollout.pool.lifecycle import Deliver, Fleet, settle, to_each
from keel.rollout.pool.requests import Flight, Order, RolloutEngine, Slot, Update
from keel.rollout.spec import EngineError

STOP_S = 10.0
"""Longest wait for the pool's thread to end; it never waits for an engine itself."""


class RolloutPool:
    """Samples groups on several engines and keeps all of them on the same weights."""

    def __init__(
        self,
        config: RolloutConfig,
        build: Callable[[int], RolloutEngine],
        *,
        startup_deadline_s: float,
        update_deadline_s: float | None = None,
        deliver: Deliver = to_each,
    ) -> None:
        """`build(i)` begins to start engine i. `start` waits for all of them. `update_deadline_s`:
        until an engine that has not taken its weights is replaced (default: the recipe's)."""
        self.say: Callable[[str], Any] = lambda _: None
        """Told, on the pool's thread, when an engine is replaced."""
        self._config = config
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="keel-pool", daemon=True)
        # Shared with the callers' threads, under `_gate`:
        self._gate = threading.Lock()
        self._asked: list[Order] = []
        self._draws: Counter[str] = Counter()
        """How often each prompt was asked for the current weights, and by orders still open."""
        self._open: dict[int, Order] = {}
        """Orders without a group, by number."""
        self._update: Update | None = None
        self._asleep: Future[None] | None = None
        """Of the last `sleep`, until there are new weights."""
        self._called: Future[None] = Future()
        """Done when a caller wants something: it wakes the thread."""
        self._ended: Exception | None = None
        # The thread's own:
        self._fleet = Fleet(
            config,
            build,
            deliver,
            startup_s=startup_deadline_s,
            update_s=update_deadline_s or config.update_deadline_s,
        )
        self._waiting: list[Order] = []
        self._flights: dict[Future[Group], Flight] = {}

    @property
    def restarts(self) -> int:
        """How often an engine had to be started again so far."""
        return self._fleet.restarts

    def start(self) -> tuple[str, ...]:
        """Start all engines; what they warn of. Raises `EngineError` or `TimeoutError` if one does
        not come up."""
        warnings = self._fleet.start()
        if self._config.sleep:
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
        """Sample `group_size` completions of `prompt`. Cancelling the future gives them up.

        Its engine cuts it at `rollout.deadline_s` (`EngineThread.submit`), counted from when it
        begins: how long it waits for an engine does not count. An engine that is silent for longer
        is replaced, and its groups are sampled again. Evaluation is not recorded for replay. The
        future fails with what an engine says about the prompt, and with `EngineError` when one
        keeps dying.
        """
        (group,) = self._submit([prompt], group_size, sampling, purpose)
        return group

    def _submit(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: SamplingConfig | None,
        purpose: Purpose,
    ) -> list[Future[Group]]:
        how = sampling or self._config.sampling
        orders: list[Order] = []
        with self._gate:
            for prompt in prompts:
                draw = self._draws[prompt.prompt_id]
                self._draws[prompt.prompt_id] += 1
                number = next(self._numbers)
                orders.append(Order(number, prompt, group_size, how, purpose, draw))
            if (ended := self._ended) is None:
                self._asked += orders
                self._open |= {order.number: order for order in orders}
                self._call()
        for order in orders:
            if ended is not None:
                order.fail(ended)
            order.group.add_done_callback(partial(self._noticed, order.number))
        return [order.group for order in orders]

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingConfig | None = None,
        purpose: Purpose = "train",
    ) -> Iterator[Group]:
        """`submit` of all `prompts`: groups in the order that they finish."""
        groups = self._submit(prompts, group_size, sampling, purpose)
        try:
            for group in as_completed(groups):  # each has its deadline
                yield group.result()
        finally:
            for group in groups:
                group.cancel()

    def update(self, version: int, weights: Any) -> Future[None]:
        """Bring every engine to these weights; done when all of them sample from `version` (or a
        later one).

        `weights` are kept for engines that have to be started again. The same version may come
        again, to wake engines up. An engine that is late
        (`rollout.update_deadline_s`) is replaced. Fails with what an engine says about the weights.
        Raises RuntimeError while the last update is still under way.
        """
        update = Update(version, weights)
        with self._gate:
            if self._ended is not None:
                update.done.set_exception(self._ended)
            elif self._update is not None and not self._update.done.done():
                raise RuntimeError(
                    f"rollout pool: version {self._update.version} is still on its way to the "
                    f"engines; wait for it before sending {version}"
                )
            else:
                if self._update is None or self._update.version != version:
                    # What is open may be sampled by these weights yet, and its draw is taken then.
                    orders = [o for o in self._open.values() if not o.group.done()]
                    names = {order.prompt.prompt_id for order in orders}
                    self._draws = Counter({name: self._draws[name] for name in names})
                self._update, self._asleep = update, None
                self._call()
        return update.done

    def sleep(self) -> Future[None]:
        """Have every engine give up its GPU's memory until the next `update`; done when all have.

        An engine that is late (`rollout.update_deadline_s`) is replaced. Sleeping engines sleep on.
        Raises RuntimeError while an update is under way.
        """
        with self._gate:
            if self._update is not None and not self._update.done.done():
                raise RuntimeError(
                    f"rollout pool: version {self._update.version} is still on its way to the "
                    "engines; wait for it before they sleep"
                )
            if self._asleep is None:
                self._asleep = Future()
                if self._ended is not None:
                    self._asleep.set_exception(self._ended)
                self._call()
            return self._asleep

    def shutdown(self) -> None:
        """End all engines; what is being sampled fails."""
        self._end(EngineError("the rollout pool has been shut down"))
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._fleet.kill()

    def _call(self) -> None:
        settle(self._called)

    def _noticed(self, number: int, group: Future[Group]) -> None:
        with self._gate:
            self._open.pop(number, None)
            if group.cancelled():
                self._call()

    def _end(self, error: Exception) -> None:
        with self._gate:
            if self._ended is None:
                self._ended = error
            self._call()

    # From here on: the pool's thread.

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._send()
                self._wait()
        except Exception as error:  # callers hold futures: none may be left without a result
            self._end(error)
        assert self._ended is not None
        for future in self._flights:
            future.cancel()
        flying = [flight.order for flight in self._flights.values()]
        with self._gate:
            orders = [*flying, *self._waiting, *self._asked]
            updates = (self._fleet.wanted, self._update)
            asked = [update.done for update in updates if update is not None]
            asked += [self._asleep] if self._asleep is not None else []
        for order in orders:
            order.fail(self._ended)
        for done in asked:
            if not done.done():
                done.set_exception(self._ended)

    def _take_calls(self) -> bool:
        """Note what callers want. False: stop."""
        with self._gate:
            if self._ended is not None:
                return False
            self._called = Future()
            self._waiting += self._asked
            self._asked = []
            update, resting = self._update, self._asleep
        self._waiting.sort(key=lambda order: order.rank)
        self._fleet.follow(update, resting)
        for future, flight in list(self._flights.items()):
            if flight.order.group.cancelled():
                future.cancel()
                self._take(future)
        self._waiting = [order for order in self._waiting if not order.group.cancelled()]
        return True

    def _send(self) -> None:
        """Give orders to the engines with the least to do, until all are full."""
        while self._waiting:
            able = [slot for slot in self._fleet.slots if slot.stage == "ready"]
            able = [slot for slot in able if slot.sequences < self._config.max_num_seqs]
            if not able:
                return
            slot = min(able, key=lambda slot: (slot.load, slot.index))
            order = self._waiting[0]  # and there still, to be failed, if the call raises
            future = slot.engine.generate(
                order.prompt,
                group_size=order.group_size,
                sampling=order.sampling,
                record=order.purpose == "train",
                draw=order.draw,
            )
            del self._waiting[0]
            self._flights[future] = Flight(order, slot, self._silent_at())
            slot.sequences += order.group_size
            slot.load += order.tokens

    def _wait(self) -> None:
        """Sleep until something happens, and deal with it: a caller, a group that is there, a slot
        that has come a stage further, a deadline."""
        pending = self._fleet.pending
        silent = [flight.deadline for flight in self._sampling().values()]
        until = min([*silent, *(slot.deadline for slot in pending.values())], default=None)
        timeout = None if until is None else max(0.0, until - time.monotonic())
        anything: list[Future[Any]] = [self._called, *self._flights, *pending]
        done, _ = wait(anything, timeout, FIRST_COMPLETED)
        for future in [future for future in self._flights if future in done]:
            self._land(future)
        for future, slot in pending.items():
            if slot.pending is not future:
                continue  # replaced meanwhile
            over = future in done or time.monotonic() >= slot.deadline
            if over and (error := self._fleet.advance(slot)) is not None:
                self._replace(slot, error)
            elif over and slot.stage == "ready":  # its groups resume
                for flight in self._flights.values():
                    if flight.slot is slot:
                        flight.deadline = self._silent_at()
        self._replace_silent_ones()

    def _silent_at(self) -> float:
        return time.monotonic() + self._config.silent_s

    def _sampling(self) -> dict[Future[Group], Flight]:
        """What engines are at that can sample; each other has a deadline of its own."""
        return {f: flight for f, flight in self._flights.items() if flight.slot.stage == "ready"}

    def _take(self, future: Future[Group]) -> Order:
        flight = self._flights.pop(future)
        order, slot = flight.order, flight.slot
        slot.sequences -= order.group_size
        slot.load -= order.tokens
        return order

    def _land(self, future: Future[Group]) -> None:
        """A group is there, or its engine is gone and it is sampled again."""
        if future not in self._flights:  # went down with another group of its engine
            return
        slot = self._flights[future].slot
        error = future.exception()
        if isinstance(error, EngineError):
            self._replace(slot, error)
        elif error is not None:
            self._take(future).fail(error)
        else:
            self._take(future).give(future.result())

    def _replace_silent_ones(self) -> None:
        for future, flight in self._sampling().items():
            late = flight.deadline <= time.monotonic() and not future.done()
            if late and future in self._flights:  # not gone with another of its engine
                error = EngineError(
                    f"fell silent: no group of prompt {flight.order.prompt.prompt_id} in "
                    f"{self._config.silent_s:g} s, though it is cut after rollout.deadline_s = "
                    f"{self._config.deadline_s:g}"
                )
                self._replace(flight.slot, error)

    def _replace(self, slot: Slot, error: EngineError) -> None:
        """Have the engine replaced, and sample its groups again."""
        self._fleet.replace(slot, error)
        self.say(f"rollout engine {slot.index} is started again: {error}")
        for future in [future for future, it in self._flights.items() if it.slot is slot]:
            order = self._take(future)
            # What had already arrived when the engine died is as good as any.
            if future.done() and not future.cancelled() and future.exception() is None:
                order.give(future.result())
            else:
                self._waiting.append(order)
        self._waiting.sort(key=lambda order: order.rank)
