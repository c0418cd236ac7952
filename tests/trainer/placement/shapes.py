"""Recipes, model shapes and machines for the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.common import QWEN3_06B, QWEN3_8B, QWEN3_17B, QWEN3_30B_A3B, Mixture
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SftConfig,
    SourceConfig,
)
from keel.configs.sections.sft import ConversationsConfig
from keel.model.load import ModelFacts, facts_of
from keel.trainer.placement.hardware import Hardware, idle_nodes

SHAPES = {
    "0.6b": QWEN3_06B,
    "1.7b": QWEN3_17B,
    "8b": QWEN3_8B,
    "1.4b-a0.4b": Mixture().config(),
    "30b-a3b": QWEN3_30B_A3B,
}
SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10, kl_coef=0.02)


@cache
def facts(shape: str) -> ModelFacts:
    return replace(facts_of(SHAPES[shape]), max_context=40_960)


def machine(gpus: int, gib: float, **options: Any) -> Hardware:
    nodes = tuple(idle_nodes(1, gpus))
    return Hardware(gpu=True, nodes=nodes, gpu_gib=gib, note="x", **options)


def recipe(*, dtype: Any = "bfloat16", **algorithm: Any) -> Config:
    """Return the recipe of the workload in docs/performance.md."""
    sizes: dict[str, Any] = {"prompts_per_step": 16, "group_size": 8, **algorithm}
    return Config(
        model=ModelConfig(path="some/model", dtype=dtype),
        data=DataConfig(sources=(SOURCE,), max_prompt_tokens=128),
        rollout=RolloutConfig(sampling=SamplingConfig(top_p=0.95, top_k=512, max_tokens=1024)),
        algorithm=AlgorithmConfig(**sizes),
    )


def sft_recipe(*, dtype: Any = "bfloat16", **sft: Any) -> Config:
    source = ConversationsConfig(name="a", source="jsonl", path="a")
    model = ModelConfig(path="some/model", dtype=dtype)
    return Config(model=model, sft=SftConfig(sources=(source,), **sft)).supervised(100)
