"""Compares the memory model with calculations by hand and with measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.model.load import ModelFacts
from keel.trainer.placement.hardware import Hardware
from keel.trainer.placement.memory import (
    GIB,
    DoesNotFit,
    trainer_memory,
)
from keel.trainer.placement.plan import Plan, describe, make_plan

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
SUMS = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)

EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_parameters": 10 * 8 * 3 * 1000 * 500}
MOE = replace(DENSE, architecture="Qwen3MoeForCausalLM", moe_layer_ids=(*range(10),), **EXPERTS)


def recipe(*, beta: float = 0.0, rollout: dict[str, Any] | None = None, **trainer: Any) -> Config:
    options = {"max_num_seqs": 16, "sampling": SamplingConfig(top_k=64, max_tokens=7_000)}
    return Config(
        model=ModelConfig(path="some/model"),
        data=DataConfig(sources=(replace(SUMS, kl_coef=beta),), max_prompt_tokens=1000),
        algorithm=AlgorithmConfig(prompts_per_step=8, group_size=8),
        rollout=RolloutConfig(**{**options, **(rollout or {})}),
        trainer=TrainerConfig(**trainer),
    )


def plan(config: Config, facts: ModelFacts = DENSE, **options: Any) -> Plan:
    return make_plan(config, facts, gpu=True, **options)


def billions(config: Config, *names: str) -> list[float]:
    parts = plan(config).trainer.parts
    return [round(parts.get(name, 0.0) / 1e9, 6) for name in names]


@pytest.mark.parametrize(
    ("stage", "state"),
    [  # bytes a parameter: bfloat16 weights and reference, float32 gradients, master and moments
        (0, [2, 4, 12 / 4, 2]),  # DeepSpeed has master weights from stage 1 up, so 0 is 1
        (1, [2, 4, 12 / 4, 2]),
        (2, [2, 4 / 4, 12 / 4, 2]),
        (3, [2 / 4, 4 / 4, 12 / 4, 2 / 4]),
    ],
)
def test_zero_stage_determines_sharding(stage: Any, state: list[float]) -> None:
    config = recipe(ranks=4, zero_stage=stage, beta=0.1)
    assert billions(config, "weights", "gradients", "optimizer", "reference") == state


MLP = (1e9 - 2e8 - 4e7) / 10 / 3000
WHOLE = 4 * 1000 + 3 * 1000 + 3 * 256 + 4 * MLP
"""Elements per token saved by a layer of `DENSE`: residual and norms, queries and attention output,
keys and values, MLP."""
FLOWING = 2 * MLP + 1000
"""Gradient elements in flight inside a layer."""


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, 10 * WHOLE + FLOWING),
        ({"activation_checkpointing": True}, 10 * 1000 + WHOLE + FLOWING),
        ({"compile": True}, 10 * WHOLE - 9 * (2 * 1000 + 2 * MLP) + FLOWING),
        ({"compile": True, "activation_checkpointing": True}, 10 * 1000 + WHOLE + FLOWING),
        (
            {"activation_checkpointing": True, "keep_attention": True},
            10 * (1000 + 1000) + WHOLE + FLOWING,
        ),
        ({"keep_attention": True}, 10 * WHOLE + FLOWING),
        (
            {"activation_checkpointing": True, "keep_attention": True, "zero_stage": 3},
            10 * 1000 + WHOLE + FLOWING,
        ),
    ],
)
def test_saved_activations(options: dict[str, Any], numbers: float) -> None:
    """Compiled layers recompute norms, activation and product, one layer at a time."""
    (kept,) = billions(recipe(micro_batch_tokens=8000, **options), "activations")
    assert kept == pytest.approx(numbers * 2 * 8000 / 1e9)


def test_kv_cache_holds_completions_and_shared_prompts() -> None:
    token = 10 * 512 * 2
    parts = plan(recipe()).engine.parts
    assert parts["KV cache"] == token * (
        16 * 7000 + 3 * 1000
    )  # 16 completions may span three groups
    each = plan(recipe(rollout={"enable_prefix_caching": False})).engine.parts
    assert each["KV cache"] == token * 16 * 8000
    windows = plan(recipe(), replace(DENSE, full_attention=False)).engine.parts
    assert windows["KV cache"] == each["KV cache"]
    two = plan(recipe(rollout={"tensor_parallel": 4})).engine.parts
    assert two["KV cache"] == parts["KV cache"] / 2  # only two heads to share out
    assert two["weights"] == parts["weights"] / 4


def test_moe_without_routing_replay_is_refused_by_default() -> None:
    unsound = replace(recipe().algorithm, keep_routing=False, allow_unsound=True)
    plan(replace(recipe(), algorithm=unsound), MOE)
    algorithm = replace(recipe().algorithm, keep_routing=False)
    with pytest.raises(ConfigError, match="keep_routing"):
        plan(replace(recipe(), algorithm=algorithm), MOE)


def test_parallelism_shards_experts_or_tokens() -> None:
    parts = plan(recipe(ranks=4, expert_parallel=4), MOE).trainer.parts
    assert parts["weights"] == 2 * (MOE.parameters - 3 / 4 * MOE.expert_parameters)
    long = recipe(ranks=4, sequence_parallel=2, micro_batch_tokens=16_000)
    alone = recipe(ranks=2, micro_batch_tokens=8000)
    assert billions(long, "activations") == billions(alone, "activations")


def test_offloaded_optimizer_uses_no_gpu_memory() -> None:
    config = recipe(zero_stage=2, offload_optimizer=True)
    assert billions(config, "optimizer") == [0.0]
    assert make_plan(config, DENSE, gpu=False).trainer.parts["optimizer"] == 12e9


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(DoesNotFit, match="gpu_memory_utilization"):
        plan(recipe(), gpu_gib=4)
    with pytest.raises(DoesNotFit, match=r"run\.gpu_gib"):
        plan(recipe(ranks=8, zero_stage=1), gpu_gib=8)
    config = recipe(micro_batch_tokens=8000, rollout={"gpu_memory_utilization": 0.5})
    plan(config, gpu_gib=48)
    with pytest.raises(DoesNotFit, match="shared"):
        plan(config, gpu_gib=48, shared=True)
    rollout = {"gpu_memory_utilization": 0.9, "time_share": True}
    config = recipe(micro_batch_tokens=8000, rollout=rollout)
    rank = plan(config).trainer
    need = (rank.total - rank.parts["optimizer"]) / GIB
    plan(config, gpu_gib=need + 2, shared=True)
    with pytest.raises(DoesNotFit):
        plan(config, gpu_gib=need + 1, shared=True)
    held = recipe(micro_batch_tokens=8000, offload_while_sampling=False, rollout=rollout)
    with pytest.raises(DoesNotFit, match="gpu_memory_utilization"):
        plan(held, gpu_gib=rank.total / GIB + 2, shared=True)


def test_plan_is_described() -> None:
    small = {"activation_checkpointing": True, "ranks": 4, "zero_stage": 3}
    config = recipe(rollout={"gpu_memory_utilization": 0.3, "max_num_seqs": 64}, **small)
    shown, hardware = plan(config, gpu_gib=15.2), Hardware(gpu=True, gpu_gib=15.2)
    text = describe(config, DENSE, shown, ["sums"], hardware=hardware)
    assert f"KV cache holds {shown.cached} of 64 sequences" in text and "ZeRO 3" in text
    short = describe(config, DENSE, shown, ["sums"], hardware=hardware, trains=False)
    assert "\nsteps " in text and "\nsteps " not in short


def test_lora_keeps_gradients_of_adapters_only() -> None:
    full = recipe(beta=0.1, offload_optimizer=False)
    lora = LoraConfig(rank=10, targets=("q_proj", "up_proj"))
    config = replace(full, model=replace(full.model, lora=lora))
    facts = replace(DENSE, projections={"q_proj": 20_000, "up_proj": 40_000, "down_proj": 40_000})
    before, after = (trainer_memory(each, facts, gpu=True).parts for each in (full, config))
    assert after["weights"] == before["weights"] == before["reference"] == 2e9
    assert (after["gradients"], after["optimizer"], after["reference"]) == (2.4e6, 7.2e6, 0)


def test_teachers_are_held_beside_the_reference() -> None:
    facts = replace(DENSE, teacher_parameters=3_000_000_000)
    parts = trainer_memory(recipe(beta=0.1), facts, gpu=True).parts
    assert parts["reference"] == 2e9 + 6e9
