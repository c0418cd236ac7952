"""What an engine is told of its GPUs."""

from __future__ import annotations

from keel.configs.schema import RolloutConfig
from keel.rollout.spec import parallel_args


def test_several_gpus_are_worked_by_the_engines_own_processes() -> None:
    """vLLM's default inside a placement group is Ray, which would find no GPU left."""
    args = parallel_args(RolloutConfig(tensor_parallel=2))
    assert args == {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert parallel_args(RolloutConfig()) == {"tensor_parallel_size": 1}
