"""Send new weights from the trainer to the engines.

An update makes these calls:

    Runtime.push                      once per weight update of the loop
      Learner.prepare_transfer        waits until the weights fit on the GPUs and, unless they are
                                      sent directly, until all buckets are in the object store
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

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

Transfer = Callable[[Mapping[int, Any]], Mapping[int, Future[int]]]
"""Starts sending weights to engines, given as Ray actors (`RolloutWorker`) by index. Returns a
future for each engine, which resolves to the version that it then samples from."""
