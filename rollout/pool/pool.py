"""The engines of a run, from the driver's side: who samples what, and what becomes of the work of
an engine that dies.

`RolloutPool` knows engines as a Protocol of futures, so its tests use fakes and take milliseconds;
`keel.rollout.pool.ray_engines` puts Ray actors behind it. A thread of its own hands out the work,
so that engines never wait for a driver that is busy elsewhere. Which engine gets what is
`keel.rollout.pool.dispatcher`'s, what stage each engine is at
`keel.rollout.pool.engine_supervisor`'s.
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
from keel.rollout.pool.dispatcher import Work
from keel.rollout.pool.engine_supervisor import Fleet, Translate
from keel.rollout.pool.requests import Order, RolloutEngine, Slot, Update
from keel.rollout.pool.stall_detector import Pulses
from keel.rollout.spec import EngineError
from keel.weights.sync import Transfer

STOP_S = 10.0
"""Longest wait for the pool's thread to end; it never waits for an engine itself."""
FREED_S = 3.0
"""After engines that failed for good were killed: until their memory is free."""


class RolloutPool:
    """Samples groups on several engines and keeps all of them on the same weights."""

    def __init__(
        self,
        config: RolloutConfig,
        build: Callable[[int], RolloutEngine],
        *,
        startup_timeout_s: float,
        update_timeout_s: float | None = None,
        translate: Translate = lambda future: future,
    ) -> None:
        """`build(i)` begins to start engine i. `start` waits for all of them. `update_timeout_s`:
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
        """Orders without a result, by number."""
        self._given_up: list[Order] = []
        self._update: Update | None = None
        self._asleep: Future[None] | None = None
        """Of the last `sleep`, until there are new weights."""
        self._ended: Exception | None = None
        self._gone = False
        """Whether engines that failed for good have been ended: nothing of them is in the way."""
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Wakes the thread: numbers of orders that an engine is done with, None for all else."""
        # The thread's own:
        self._fleet = Fleet(
            config,
            build,
            translate,
            startup_s=startup_timeout_s,
            update_s=update_timeout_s or config.update_timeout_s,
        )
        self._work = Work(config, tell=self._events.put)
        self._pulses = Pulses()
        self._watched: set[Future[Any]] = set()

    @property
    def restarts(self) -> int:
        """How often an engine had to be started again so far."""
        return self._fleet.restarts

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Seconds of each phase of the start, of the slowest engine."""
        return self._fleet.start_seconds

    @property
    def steps(self) -> int:
        """Decoding steps of all engines so far, a few seconds old."""
        return self._pulses.steps

    def start(self) -> tuple[str, ...]:
        """Start all engines and return their warnings.

        Raises `EngineError` or `TimeoutError` if an engine does not start."""
        warnings = self._fleet.start()
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
        """Sample `group_size` completions of `prompt`. Cancelling the future gives them up.

        Its engine cuts it at `rollout.timeout_s` (`EngineThread.submit`), counted from when it
        begins: how long it waits for an engine does not count. An engine that is silent for longer
        is replaced, and its groups are sampled again. Evaluation is not recorded for replay. The
        future fails with what an engine says about the prompt, and with `EngineError` when one
        keeps dying.
        """
        how, record = sampling or self._config.sampling, purpose == "train"
        with self._gate:
            number, draw = next(self._numbers), self._draws[prompt.prompt_id]
            self._draws[prompt.prompt_id] += 1
        return self._order(
            Order(
                number=number,
                label=f"group of prompt {prompt.prompt_id}",
                purpose=purpose,
                sequences=group_size,
                tokens=group_size * how.max_tokens,
                ask=lambda engine: engine.generate(
                    prompt, group_size=group_size, sampling=how, record=record, draw=draw
                ),
                prompt_id=prompt.prompt_id,
            )
        )

    def turn(
        self,
        request: TurnRequest,
        *,
        sampling: SamplingConfig | None = None,
        purpose: Purpose = "train",
    ) -> Future[TurnResult]:
        """Sample one turn, on the engine that had the conversation's last one if it has room. As
        with `submit`, an engine that dies costs the turn, which is then sampled elsewhere."""
        how, record = sampling or self._config.sampling, purpose == "train"
        return self._order(
            Order(
                number=next(self._numbers),
                label=f"turn of conversation {request.conversation}",
                purpose=purpose,
                sequences=1,
                tokens=request.max_tokens,
                ask=lambda engine: engine.turn(request, sampling=how, record=record),
                conversation=request.conversation,
            )
        )

    def _order(self, order: Order) -> Future[Any]:
        with self._gate:
            if (ended := self._ended) is None:
                self._asked.append(order)
                self._open[order.number] = order
                self._call()
        if ended is not None:
            order.fail(ended)
        order.result.add_done_callback(partial(self._noticed, order))
        return order.result

    def update(self, version: int, transfer: Transfer) -> Future[None]:
        """Deliver weights to every engine; done once all sample from `version` or a later one.

        `transfer` is kept to deliver to engines that restart. The same version may be delivered
        again, to wake engines up. An engine that exceeds `rollout.update_timeout_s` is replaced;
        errors about the weights themselves fail the future. Raises RuntimeError while another
        update is in flight.
        """
        update = Update(version, transfer)
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
                    orders = [o for o in self._open.values() if not o.result.done()]
                    names = {order.prompt_id for order in orders}
                    self._draws = Counter({name: self._draws[name] for name in names})
                self._update, self._asleep = update, None
                self._call()
        return update.done

    def sleep(self) -> Future[None]:
        """Have every engine give up its GPU's memory until the next `update`; done when all have.

        An engine that is late (`rollout.update_timeout_s`) is replaced. Sleeping engines sleep on,
        and those that are taking weights do that first: a checkpoint may be wanted at any time, and
        also where engines have failed for good: none of them is in the way then.
        """
        with self._gate:
            update = self._update
            if update is None or update.done.done():
                if self._asleep is None:
                    self._asleep = Future()
                    if self._ended is not None:
                        self._rest(self._asleep)
                    self._call()
                return self._asleep
        return then(update.done, lambda _: self.sleep())

    def shutdown(self) -> None:
        """End all engines; what is being sampled fails."""
        self._end(EngineError("the rollout pool has been shut down"))
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._fleet.kill()

    def _call(self) -> None:
        self._events.put(None)

    def _noticed(self, order: Order, result: Future[Any]) -> None:
        with self._gate:
            self._open.pop(order.number, None)
            if result.cancelled():
                self._given_up.append(order)
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
                self._work.send(self._fleet.slots)
                self._wait()
        except Exception as error:  # callers hold futures: none may be left without a result
            if self._config.time_share:  # the trainer may yet save what it has, in their memory
                with suppress(Exception):  # of Ray's; the first error says more
                    self._fleet.kill()
                    time.sleep(FREED_S)
            with self._gate:
                self._gone = self._config.time_share and self._ended is None
            self._end(error)
        assert self._ended is not None
        with self._gate:
            orders = [*self._work.end(), *self._asked]
            updates = (self._fleet.wanted, self._update)
            asked = [update.done for update in updates if update is not None]
            resting = self._asleep
        for order in orders:
            order.fail(self._ended)
        for done in asked:
            if not done.done():
                done.set_exception(self._ended)
        if resting is not None and not resting.done():
            self._rest(resting)

    def _rest(self, asleep: Future[None]) -> None:
        """What comes of waiting for sleep once it is over."""
        if self._gone:
            asleep.set_result(None)
        else:
            asleep.set_exception(self._ended)

    def _take_calls(self) -> bool:
        """Note what callers want. False: stop."""
        with self._gate:
            if self._ended is not None:
                return False
            asked, self._asked = self._asked, []
            given_up, self._given_up = self._given_up, []
            update, resting = self._update, self._asleep
        for order in asked:
            self._work.add(order)
        self._fleet.follow(update, resting)
        for order in given_up:
            self._work.give_up(order)
        return True

    def _wait(self) -> None:
        """Sleep until something happens, and deal with it: a caller, an order that is done, a slot
        that has come a stage further, a deadline."""
        pending = self._fleet.pending
        for future in pending.keys() - self._watched:
            future.add_done_callback(lambda _: self._call())
        self._watched = set(pending)
        deadlines = [*self._work.deadline(), *(slot.deadline for slot in pending.values())]
        if deadlines:  # of work or a stage; else nobody is asked anything
            deadlines.append(self._pulses.due)
        for number in self._happened(min(deadlines, default=None)):
            if number is not None and (failed := self._work.land(number)) is not None:
                self._replace(*failed)
        for future, slot in pending.items():
            if slot.pending is not future:
                continue  # replaced meanwhile
            over = future.done() or time.monotonic() >= slot.deadline
            if over and (error := self._fleet.advance(slot)) is not None:
                self._replace(slot, error)
            elif over and slot.stage == "ready":
                self._work.resumes(slot)
        self._replace_silent_ones()
        for slot, error in self._pulses.look(self._fleet.slots, lambda line: self.say(line)):
            self._replace(slot, error)

    def _happened(self, until: float | None) -> list[int | None]:
        """All events there are; waits for one."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        events: list[int | None] = []
        try:
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def _replace_silent_ones(self) -> None:
        for flight in self._work.late():
            if not self._work.has(flight) or flight.future.done():
                continue  # gone with another of its engine
            error = EngineError(
                f"fell silent: no {flight.order.label} in {self._config.silent_s:g} s, though it "
                f"is cut after rollout.timeout_s = {self._config.timeout_s:g}"
            )
            self._replace(flight.slot, error)

    def _replace(self, slot: Slot, error: EngineError) -> None:
        """Have the engine replaced, and sample its work again."""
        self._fleet.replace(slot, error)
        self.say(f"rollout engine {slot.index} is started again: {error}")
        self._work.again(slot)
