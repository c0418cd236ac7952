"""Packs trajectories into micro-batches, balancing the number of tokens between ranks."""

from keel.rl.packing.batch import Loss, MicroBatch, TrainBatch
from keel.rl.packing.items import balance
from keel.rl.packing.pack import pack

__all__ = ["Loss", "MicroBatch", "TrainBatch", "balance", "pack"]
