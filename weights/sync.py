"""The driver's side of a weight update.

An update makes these calls:

    WeightSync.push                   once per weight update of the loop
      Learner.put_engines_to_sleep    waits until the weights fit on the GPUs
      Learner.put_weights             waits until all buckets are in the object store; not if direct
      EpisodeRunner.set_version       seeds of later episodes
      RolloutPool.update              on the pool's thread
        RolloutPool._load             calls the `Transfer`, again for engines that restart
          Learner.send_weights        TrainerWorker.send_weights on every rank
            Sender (rank)             calls RolloutWorker.update_from_rank on each of its engines;
                                      messages through a `Mailbox`;
                                      bytes through NCCL or gloo, or in place on a shared GPU
            RolloutWorker             EngineThread.update_from_rank carries out each `Message`
          or, through the store       RolloutWorker.update_from_store on every engine;
                                      bytes through Ray's object store
    BatchStream.track_update          frees slots of the buffer once the update is done

Both paths end in the same calls on the engine: `begin_update`, `load_bucket` for each bucket and
`finish_update` go from `EngineThread` to `VllmEngine`, and from there to `WeightsExtension` in
vLLM's workers.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from keel.model import ray_timeouts

Transfer = Callable[[Mapping[int, Any]], Mapping[int, Future[int]]]
"""Starts sending weights to engines, given as Ray actors (`RolloutWorker`) by index. Returns a
future for each engine, which resolves to the version that it then samples from."""


class _Learner(Protocol):
    """The methods of `keel.trainer.learner.Learner` that an update calls."""

    direct: bool

    def put_engines_to_sleep(self) -> None: ...

    def put_weights(self) -> Sequence[Any]: ...

    def send_weights(self, engines: Mapping[int, Any]) -> Mapping[int, Future[int]]: ...


class _Pool(Protocol):
    """The method of `keel.rollout.pool.RolloutPool` that an update calls."""

    def update(self, version: int, transfer: Transfer) -> Future[None]: ...


@dataclass(frozen=True, slots=True)
class WeightSync:
    """Sends the trainer's weights to every engine: directly from the ranks if `Learner.direct` is
    set, otherwise through Ray's object store."""

    learner: _Learner
    pool: _Pool
    set_version: Callable[[int], None] = lambda _: None
    """Called with the version just before the engines receive weights."""

    def push(self, version: int) -> Future[None]:
        """Start sending the trainer's current weights, tagged with `version`. Returns the future
        from `RolloutPool.update`.

        Blocks until there is room for the weights on the GPUs and, unless they are sent directly,
        until all of them are in the object store.
        """
        self.learner.put_engines_to_sleep()
        direct = self.learner.direct
        transfer = self.learner.send_weights if direct else self._through_store(version)
        self.set_version(version)
        return self.pool.update(version, transfer)

    def _through_store(self, version: int) -> Transfer:
        buckets = self.learner.put_weights()  # Ray copies each bucket to a node once
        return lambda engines: {
            index: ray_timeouts.call(actor.update_from_store, version, buckets).future()
            for index, actor in engines.items()
        }
