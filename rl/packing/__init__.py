"""From scored trajectories to packed micro-batches, balanced over ranks by tokens."""

from keel.rl.packing.batch import Loss, MicroBatch, TrainBatch
from keel.rl.packing.pack import pack
from keel.rl.packing.work import balance

__all__ = ["Loss", "MicroBatch", "TrainBatch", "balance", "pack"]
