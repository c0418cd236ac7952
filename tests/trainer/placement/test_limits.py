"""What a run may use of a GPU (`run.gpu_gib`), beside what drawn workloads were seen to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.peers.shape import model_config
from benchmarks.peers.workload import Workload, drawn
from keel.configs.auto import KNOBS
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
)
from keel.model.load import facts_of
from keel.trainer.placement.choose import choose
from tests.trainer.placement.test_choose import SOURCE, machine


def recipe_of(workload: Workload) -> Config:
    limits = {"top_p": workload.top_p, "top_k": workload.top_k}
    sampling = SamplingConfig(max_tokens=workload.completion_tokens, **limits)
    return Config(
        model=ModelConfig(path="some/model", dtype="bfloat16"),
        data=DataConfig(sources=(SOURCE,), max_prompt_tokens=workload.prompt_tokens),
        rollout=RolloutConfig(sampling=sampling),
        algorithm=AlgorithmConfig(
            prompts_per_step=workload.prompts_per_step, group_size=workload.group_size
        ),
    )


@pytest.mark.parametrize(
    ("draw", "allowed", "beyond", "stays"),
    [(14, 26.3, 0.8, 3.3), (17, 26.8, 0.6, 2.4), (19, 21.1, 1.0, 2.1)],
)
def test_an_engine_leaves_what_both_take_beside_its_share(
    draw: int, allowed: float, beyond: float, stays: float
) -> None:
    """GiB on an H200 (4bc8f194): what the engine's process had beside its share, and a rank that
    had offloaded what it should."""
    workload = drawn(draw)
    facts = replace(facts_of(model_config(workload.shape)), max_context=workload.shape.max_context)
    made = choose(recipe_of(workload), KNOBS, facts, machine(1, allowed)).config
    assert made.rollout.time_share and made.trainer.offload_while_sampling
    assert made.rollout.gpu_memory_utilization * allowed + beyond + stays <= allowed
