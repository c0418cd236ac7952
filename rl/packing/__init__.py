"""Pack trajectories into micro-batches, balancing the number of tokens between ranks."""

from keel.rl.packing.batch import Loss, MicroBatch, TrainBatch
from keel.rl.packing.pack import pack
from keel.rl.packing.prefix_sharing import balance

__all__ = ["Loss", "MicroBatch", "TrainBatch", "balance", "pack"]
