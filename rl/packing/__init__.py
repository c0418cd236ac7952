"""Pack trajectories into micro-batches, balancing the number of tokens between ranks."""

from keel.rl.packing.batch import Loss, MicroBatch, TrainBatch
from keel.rl.packing.pack import PackPlan, pack, plan_packing
from keel.rl.packing.prefix_sharing import balance

__all__ = ["Loss", "MicroBatch", "PackPlan", "TrainBatch", "balance", "pack", "plan_packing"]
