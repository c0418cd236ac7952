"""The driver's end of a weight update.

The calls of one update:

    trainer.loop.train                WeightSync.push(version)
      RolloutPool.update              Transfer.to(engines), again for engines that restart
        DirectTransfer                Learner.send, then TrainerWorker.send on every rank
          Sender (rank)               Begin, Bucket …, Finish through the control channel;
                                      bytes through NCCL or gloo, or in place on a shared GPU
          EngineThread.receive        carries out each message
        StoreTransfer                 RolloutWorker.update on every engine;
                                      bytes through Ray's object store
          WeightsExtension (vLLM)     begin, load each bucket, finish
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from keel.configs.schema import RolloutConfig

Outcome = int | Exception
"""The version that an engine samples from after an update, or the error that prevented it."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """An engine to send weights to, with the actor of its `RolloutWorker`."""

    index: int
    actor: Any


class Transfer(Protocol):
    """One version of the weights, ready for delivery."""

    def to(self, engines: Sequence[Any], /) -> Sequence[Future[int]]:
        """Start delivery; each future holds the version that its engine then samples from."""
        ...


class WeightSource(Protocol):
    """The trainer, as an update sees it (`keel.trainer.learner.Learner`)."""

    def make_room(self) -> None: ...
    def put_weights(self) -> Sequence[Any]: ...
    def send(self, engines: Sequence[Any]) -> Sequence[Future[int]]: ...


class WeightTarget(Protocol):
    """The engines, as an update sees them (`keel.rollout.pool.pool.RolloutPool`)."""

    def update(self, version: int, transfer: Transfer) -> Future[None]: ...


@dataclass(frozen=True)
class DirectTransfer:
    """Delivers the trainer's current weights from its ranks: over NCCL, or in place on a shared
    GPU (`keel.weights.sender`)."""

    source: WeightSource

    def to(self, engines: Sequence[Any], /) -> Sequence[Future[int]]:
        return self.source.send(engines)


@dataclass(frozen=True)
class StoreTransfer:
    """Delivers buckets through Ray's object store, which copies them once per node."""

    version: int
    buckets: Sequence[Any]
    """Object references to `keel.weights.buckets.Bucket`s."""

    def to(self, engines: Sequence[Any], /) -> Sequence[Future[int]]:
        return [engine.update(self.version, self.buckets) for engine in engines]


def sends_directly(config: RolloutConfig, *, gpu: bool) -> bool:
    """Resolve `rollout.weight_transfer: auto`, which is `direct` on GPUs."""
    return config.weight_transfer == "direct" or (config.weight_transfer == "auto" and gpu)


class WeightSync:
    """Moves the trainer's weights into every engine."""

    def __init__(
        self,
        source: WeightSource,
        engines: WeightTarget,
        *,
        direct: bool,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Call `before(version)` as each update starts."""
        self._source, self._engines = source, engines
        self._direct, self._before = direct, before

    def push(self, version: int) -> Future[None]:
        """Bring every engine to the trainer's current weights, which are `version`."""
        self._source.make_room()
        transfer: Transfer = (
            DirectTransfer(self._source)
            if self._direct
            else StoreTransfer(version, self._source.put_weights())
        )
        self._before(version)
        return self._engines.update(version, transfer)
