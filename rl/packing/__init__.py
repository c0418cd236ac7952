"""Packing of trajectories into micro-batches, balanced over ranks by tokens."""

from keel.rl.packing.batch import Loss, MicroBatch, TrainBatch
from keel.rl.packing.items import balance
from keel.rl.packing.pack import pack

__all__ = ["Loss", "MicroBatch", "TrainBatch", "balance", "pack"]
