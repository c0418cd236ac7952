"""The engines of a run, from the driver's side: who samples what, and what happens when one dies.

`RolloutPool` knows engines as a Protocol of futures, so its tests use fakes and take milliseconds;
`rollout.ray_engines` puts Ray actors behind it. A thread of its own hands out the groups, so that
engines never wait for a driver that is busy elsewhere. A group is never split over engines.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, as_completed, wait
from contextlib import suppress
from typing import Any

from configs.schema import RolloutConfig, SamplingConfig
from rl.types import Group, Prompt
from rollout.orders import Order, Purpose, RolloutEngine, Slot, Stage, Update
from rollout.spec import EngineError

MAX_RESTARTS = 3
"""Times that an engine is started again before the run is given up."""
STOP_S = 10.0
"""Longest wait for the pool's thread to end; it never waits for an engine itself."""


TASKS = {"starting": "start", "loading": "take new weights", "dozing off": "fall asleep"}

_NUMBER = re.compile(r"\b(?:[0-9a-f]{8,}|\d+)\b")
"""Process and actor ids, which differ from one start to the next."""


class RolloutPool:
    """Samples groups on several engines and keeps all of them on the same weights."""

    def __init__(
        self,
        config: RolloutConfig,
        build: Callable[[int], RolloutEngine],
        *,
        startup_deadline_s: float,
        update_deadline_s: float | None = None,
    ) -> None:
        """`build(i)` begins to start engine i. `start` waits for all of them. `update_deadline_s`:
        until an engine that has not taken its weights is replaced (default: the recipe's)."""
        self._config = config
        self._build = build
        self._startup_s = startup_deadline_s
        self._update_s = update_deadline_s or config.update_deadline_s
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="keel-pool", daemon=True)
        # Shared with the callers' threads, under `_gate`:
        self._gate = threading.Lock()
        self._asked: list[Order] = []
        self._draws: Counter[str] = Counter()
        self._update: Update | None = None
        self._asleep: Future[None] | None = None
        """Of the last `sleep`, until there are new weights."""
        self._called: Future[None] = Future()
        """Done when a caller wants something: it wakes the thread."""
        self._ended: Exception | None = None
        # The thread's own:
        self._slots: list[Slot] = []
        self._waiting: list[Order] = []
        self._flights: dict[Future[Group], tuple[Order, Slot]] = {}
        self._weights: Update | None = None
        self._resting: Future[None] | None = None

    @property
    def _started(self) -> Stage:
        """What an engine that has started is: with `rollout.sleep` it waits for weights."""
        return "asleep" if self._config.sleep else "ready"

    @property
    def restarts(self) -> int:
        """How often an engine had to be started again so far."""
        return sum(slot.restarts for slot in self._slots)

    def start(self) -> None:
        """Start all engines. Raises `EngineError` or `TimeoutError` if one does not come up."""
        for index in range(self._config.engines):
            engine = self._build(index)
            deadline = time.monotonic() + self._startup_s
            self._slots.append(Slot(index, engine, "starting", engine.ready(), deadline))
        for slot in self._slots:
            assert slot.pending is not None
            try:
                slot.pending.result(timeout=max(0.0, slot.deadline - time.monotonic()))
            except TimeoutError:
                raise TimeoutError(
                    f"rollout engine {slot.index} was not ready within {self._startup_s:g} s "
                    "(run.startup_deadline_s)"
                ) from None
            except EngineError as error:
                raise EngineError(f"rollout engine {slot.index} did not start: {error}") from error
            slot.stage, slot.pending = self._started, None
        if self._config.sleep:
            self._asleep = Future()
            self._asleep.set_result(None)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingConfig | None = None,
        purpose: Purpose = "train",
    ) -> Future[Group]:
        """Sample `group_size` answers to `prompt`. Cancelling the future gives them up.

        A group that is not there after `rollout.deadline_s` is given up and comes without answers,
        its reason in `dropped`. Evaluation is not recorded for replay. The future fails with what
        an engine says about the prompt, and with `EngineError` when one keeps dying.
        """
        (answer,) = self._submit([prompt], group_size, sampling, purpose)
        return answer

    def _submit(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: SamplingConfig | None,
        purpose: Purpose,
    ) -> list[Future[Group]]:
        deadline = time.monotonic() + self._config.deadline_s
        how = sampling or self._config.sampling
        orders: list[Order] = []
        with self._gate:
            for prompt in prompts:
                draw = self._draws[prompt.prompt_id]
                self._draws[prompt.prompt_id] += 1
                number = next(self._numbers)
                orders.append(Order(number, prompt, group_size, how, purpose, draw, deadline))
            if (ended := self._ended) is None:
                self._asked += orders
                self._call()
        for order in orders:
            if ended is not None:
                order.fail(ended)
            order.answer.add_done_callback(self._noticed)
        return [order.answer for order in orders]

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingConfig | None = None,
        purpose: Purpose = "train",
    ) -> Iterator[Group]:
        """`submit` of all `prompts`: groups in the order that they finish."""
        answers = self._submit(prompts, group_size, sampling, purpose)
        try:
            for answer in as_completed(answers):  # each has its deadline
                yield answer.result()
        finally:
            for answer in answers:
                answer.cancel()

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
                    self._draws.clear()
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
        for slot in self._slots:
            slot.engine.kill()
        self._slots.clear()

    def _call(self) -> None:
        _settle(self._called)

    def _noticed(self, answer: Future[Group]) -> None:
        if answer.cancelled():
            with self._gate:
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
        except Exception as error:  # callers hold futures: none may be left without an answer
            self._end(error)
        assert self._ended is not None
        for future in self._flights:
            future.cancel()
        flying = [order for order, _ in self._flights.values()]
        with self._gate:
            orders = [*flying, *self._waiting, *self._asked]
            asked = [update.done for update in (self._weights, self._update) if update is not None]
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
            update, self._resting = self._update, self._asleep
        self._waiting.sort(key=lambda order: order.rank)
        if update is not None and update is not self._weights:
            self._weights = update
            self._load([slot for slot in self._slots if slot.stage in ("ready", "asleep")])
        if self._resting is not None:
            self._put_to_sleep([slot for slot in self._slots if slot.stage == "ready"])
        for future, (order, _) in list(self._flights.items()):
            if order.answer.cancelled():
                future.cancel()
                self._take(future)
        self._waiting = [order for order in self._waiting if not order.answer.cancelled()]
        return True

    def _send(self) -> None:
        """Give orders to the engines with the least to do, until all are full."""
        while self._waiting:
            able = [slot for slot in self._slots if slot.stage == "ready"]
            able = [slot for slot in able if slot.sequences < self._config.max_concurrent]
            if not able:
                return
            slot = min(able, key=lambda slot: (slot.load, slot.index))
            order = self._waiting.pop(0)
            future = slot.engine.generate(
                order.prompt,
                group_size=order.group_size,
                sampling=order.sampling,
                record=order.purpose == "train",
                draw=order.draw,
            )
            self._flights[future] = (order, slot)
            slot.sequences += order.group_size
            slot.load += order.tokens

    def _wait(self) -> None:
        """Sleep until something happens, and deal with it: a caller, a group that is there, a slot
        that has come a stage further, a deadline."""
        pending = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        late = [order.deadline for order in (*self._waiting, *self._flying())]
        until = min([*late, *(slot.deadline for slot in pending.values())], default=None)
        timeout = None if until is None else max(0.0, until - time.monotonic())
        anything: list[Future[Any]] = [self._called, *self._flights, *pending]
        done, _ = wait(anything, timeout, FIRST_COMPLETED)
        for future in [future for future in self._flights if future in done]:
            self._land(future)
        for future, slot in pending.items():
            if slot.pending is not future:
                continue  # replaced meanwhile
            if future in done:
                self._advance(slot)
            elif time.monotonic() >= slot.deadline:
                self._revive(slot, EngineError(f"did not {TASKS[slot.stage]} in time"))
        self._give_up_late_ones()

    def _flying(self) -> list[Order]:
        return [order for order, _ in self._flights.values()]

    def _take(self, future: Future[Group]) -> Order:
        order, slot = self._flights.pop(future)
        slot.sequences -= order.group_size
        slot.load -= order.tokens
        return order

    def _land(self, future: Future[Group]) -> None:
        """A group is there, or its engine is gone and it is sampled again."""
        if future not in self._flights:  # went down with another group of its engine
            return
        _, slot = self._flights[future]
        error = future.exception()
        if isinstance(error, EngineError):
            self._revive(slot, error)
        elif error is not None:
            self._take(future).fail(error)
        else:
            self._take(future).give(future.result())

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        reason = f"late: not finished in {self._config.deadline_s:g} s"
        flights = [future for future, (order, _) in self._flights.items() if order.deadline <= now]
        for future in flights:
            future.cancel()
        late = [self._take(future) for future in flights]
        late += [order for order in self._waiting if order.deadline <= now]
        self._waiting = [order for order in self._waiting if order.deadline > now]
        for order in late:
            nothing = Group(
                prompt=order.prompt, trajectories=(), dropped=(reason,) * order.group_size
            )
            order.give(nothing)

    def _advance(self, slot: Slot) -> None:
        """A stage of a slot has ended: go to the next."""
        assert slot.pending is not None
        error = slot.pending.exception()
        if isinstance(error, EngineError):
            self._revive(slot, error)
            return
        if error is not None:
            raise error
        if slot.stage == "loading":
            if slot.pending.result() < slot.version:
                raise RuntimeError(
                    f"rollout engine {slot.index}: reports weights {slot.pending.result()} after "
                    f"an update to {slot.version}"
                )
            slot.version = slot.pending.result()
        stages: dict[Stage, Stage] = {"starting": self._started, "dozing off": "asleep"}
        slot.stage, slot.pending = stages.get(slot.stage, "ready"), None
        slot.start_failure = ""
        if self._resting is not None:
            if slot.stage == "ready":
                self._put_to_sleep([slot])
        elif self._weights is not None:
            if slot.stage == "asleep" or self._weights.version > slot.version:
                self._load([slot])
            elif all(slot.stage == "ready" for slot in self._slots):
                _settle(self._weights.done)
        if self._resting is not None and all(slot.stage == "asleep" for slot in self._slots):
            _settle(self._resting)

    def _put_to_sleep(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.stage, slot.pending = "dozing off", slot.engine.sleep()
            slot.deadline = time.monotonic() + self._update_s

    def _load(self, slots: Sequence[Slot]) -> None:
        assert self._weights is not None
        if not slots:
            return
        version, weights = self._weights.version, self._weights.weights
        pending = self._deliver(version, weights, [slot.engine for slot in slots])
        for slot, future in zip(slots, pending, strict=True):
            slot.stage, slot.version, slot.pending = "loading", version, future
            slot.deadline = time.monotonic() + self._update_s

    def _deliver(
        self, version: int, weights: Any, engines: Sequence[RolloutEngine]
    ) -> Sequence[Future[int]]:
        """Futures of the version that each engine then samples from."""
        return [engine.update(version, weights) for engine in engines]

    def _revive(self, slot: Slot, error: EngineError) -> None:
        """Replace an engine and sample its groups again, or give up: if that has been done too
        often, or if the last start failed in the same way."""
        slot.engine.kill()
        if slot.stage == "starting":
            failure = _NUMBER.sub("#", str(error))
            if failure == slot.start_failure:
                raise EngineError(
                    f"rollout engine {slot.index} failed to start twice in the same way: {error}"
                ) from error
            slot.start_failure = failure
        if slot.restarts == MAX_RESTARTS:
            raise EngineError(
                f"rollout engine {slot.index} failed {MAX_RESTARTS + 1} times, the last time with: "
                f"{error}"
            ) from error
        for future in [future for future, (_, on) in self._flights.items() if on is slot]:
            order = self._take(future)
            # What had already arrived when the engine died is as good as any.
            if future.done() and not future.cancelled() and future.exception() is None:
                order.give(future.result())
            else:
                self._waiting.append(order)
        self._waiting.sort(key=lambda order: order.rank)
        slot.restarts += 1
        slot.engine = self._build(slot.index)
        slot.stage, slot.pending, slot.version = "starting", slot.engine.ready(), 0
        slot.deadline = time.monotonic() + self._startup_s


def _settle(future: Future[None]) -> None:
    with suppress(InvalidStateError):  # done already
        future.set_result(None)
