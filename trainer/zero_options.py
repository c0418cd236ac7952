"""Choices about ZeRO that the ranks make, and that the estimates of memory and time assume."""

from keel.configs.schema import TrainerConfig

_BUCKET_ELEMENTS, _LONE_BUCKET_ELEMENTS = 500_000_000, 50_000_000
"""DeepSpeed's default gradient bucket size, and the size for a single rank, which has nothing to
reduce."""


def zero_stage(trainer: TrainerConfig, *, float32: bool) -> int:
    """Return the ZeRO stage to use. In dtypes other than float32 it is at least 1, because at
    stage 0 DeepSpeed keeps no float32 master weights."""
    return trainer.zero_stage if float32 else max(1, trainer.zero_stage)


def reading_ranks(trainer: TrainerConfig) -> int:
    """Return how many ranks read the model from disk: only rank 0 under ZeRO-3, and otherwise the
    first rank that holds each expert. DeepSpeed broadcasts the weights to the other ranks."""
    return 1 if trainer.zero_stage == 3 else trainer.expert_parallel


def bucket_elements(trainer: TrainerConfig) -> int:
    """Return the maximum number of elements in a gradient bucket. A single rank uses a smaller
    bucket, except under ZeRO-2 without an offloaded optimizer."""
    lone = trainer.ranks == 1 and (trainer.zero_stage != 2 or trainer.offload_optimizer)
    return _LONE_BUCKET_ELEMENTS if lone else _BUCKET_ELEMENTS


def sums_in_float32(dtype: str, trainer: TrainerConfig) -> bool:
    """Return True if DeepSpeed's bfloat16 optimizer sums gradients in float32."""
    return dtype == "bfloat16" and trainer.zero_stage <= 1 and not trainer.offload_optimizer
