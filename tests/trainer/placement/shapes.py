"""Recipes, model shapes and machines for the planner's tests."""

from dataclasses import replace
from functools import cache
from typing import Any

from transformers import DeepseekV32Config

from benchmarks.common import MIXTURE, QWEN3_06B, QWEN3_8B, QWEN3_17B, QWEN3_30B_A3B
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
    "1.4b-a0.4b": MIXTURE.config(),
    "30b-a3b": QWEN3_30B_A3B,
}
SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10, kl_coef=0.02)


@cache
def facts(shape: str) -> ModelFacts:
    return replace(facts_of(SHAPES[shape]), max_context=40_960)


@cache
def v32_facts() -> ModelFacts:
    return facts_of(DeepseekV32Config())


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
    return Config(model=model, sft=SftConfig(sources=(source,), **sft)).supervised()


DENSE = ModelFacts(
    architecture="Qwen3ForCausalLM",
    layers=10,
    moe_layer_ids=(),
    experts=0,
    experts_per_token=0,
    vocab_size=100_000,
    hidden_size=1000,
    max_context=100_000,
    parameters=1_000_000_000,
    active_parameters=1_000_000_000,
    tied=False,
    expert_parameters=0,
    attention_parameters=40_000_000,
    attention_width=1000,
    kv_width=512,
    kv_heads=2,
    head_size=128,
    attention_heads=8,
)
"""Each layer has 80 M parameters without embeddings: 4 M in attention, 76 M / 3,000 MLP units."""
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_parameters": 10 * 8 * 3 * 1000 * 500}
MOE = replace(DENSE, architecture="Qwen3MoeForCausalLM", moe_layer_ids=(*range(10),), **EXPERTS)
