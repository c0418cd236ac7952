"""What the pool keeps account of: engines in their slots, groups and turns that were ordered,
weights on their way. `RolloutEngine` is all that it knows of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from keel.configs.schema import SamplingConfig
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt, Purpose
from keel.rollout.spec import Progress, Started
from keel.weights.sync import Transfer


class RolloutEngine(Protocol):
    """One engine. Every call returns at once; cancelling a future tells the engine to stop.

    Futures fail with `EngineError` if the engine died or broke, which the pool repairs, and with
    anything else for what the pool cannot repair.
    """

    def ready(self) -> Future[Started]:
        """Done when the engine can sample, or is asleep (`rollout.time_share`)."""
        ...

    def generate(
        self, prompt: Prompt, *, group_size: int, sampling: SamplingConfig, record: bool, draw: int
    ) -> Future[Group]:
        """`draw`: how often the same prompt has been asked since the last weights."""
        ...

    def turn(
        self, request: TurnRequest, *, sampling: SamplingConfig, record: bool
    ) -> Future[TurnResult]: ...

    def update(self, version: int, buckets: Sequence[Any]) -> Future[int]:
        """Load, and report the version that is sampled from now on. What becomes of running
        completions: `rollout.weight_updates`."""
        ...

    def sleep(self) -> Future[None]:
        """Give up the GPU's memory until the next update."""
        ...

    def progress(self) -> Future[Progress]:
        """Answered at once, whatever the engine is at."""
        ...

    def kill(self) -> None:
        """End the engine's process, whatever it is doing."""
        ...


Stage = Literal["starting", "loading", "ready", "going to sleep", "asleep"]


@dataclass(slots=True, eq=False)
class Slot:
    """A place for an engine, which may be replaced."""

    index: int
    engine: RolloutEngine
    stage: Stage
    pending: Future[Any] | None
    """What a slot that is neither ready nor asleep waits for, until `deadline`."""
    deadline: float
    version: int = 0
    """Version that the engine samples from, or is to load."""
    restarts: list[float] = field(default_factory=list[float])
    """When (by the monotonic clock) an engine was started again here."""
    start_failure: str = ""
    """Why the last start failed, numbers aside."""
    sequences: int = 0
    """Completions it is working on."""
    load: int = 0
    """Tokens it may still have to sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A group or a turn that has been asked for."""

    number: int
    label: str
    """For messages: of what prompt or conversation."""
    purpose: Purpose
    sequences: int
    tokens: int
    """To sample at most, over all its sequences."""
    ask: Callable[[RolloutEngine], Future[Any]]
    prompt_id: str = ""
    """Of a group."""
    conversation: str = ""
    """Of a turn: the engine that has its prefix is preferred."""
    result: Future[Any] = field(default_factory=Future[Any])

    @property
    def rank(self) -> tuple[bool, int]:
        """Evaluations first: the loop waits for them."""
        return self.purpose != "eval", self.number

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # the caller has cancelled it
            self.result.set_exception(error)

    def give(self, result: Any) -> None:
        with suppress(InvalidStateError):
            self.result.set_result(result)


@dataclass(slots=True)
class Flight:
    """An order that an engine is at."""

    order: Order
    slot: Slot
    future: Future[Any]
    deadline: float
    """When the engine has been silent for too long. Does not count while it is not ready."""


@dataclass(slots=True)
class Update:
    """Weights that every engine is to have."""

    version: int
    transfer: Transfer
    done: Future[None] = field(default_factory=Future[None])
