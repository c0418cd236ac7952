"""Compares the memory model with calculations by hand and with measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from keel.model.load import ModelFacts
from keel.trainer.placement.memory import (
    _FRAGMENTED,
    ENGINE_CUDA_GIB,
    GIB,
    RANK_SPARE,
    DoesNotFit,
    Memory,
    OffloadPlan,
    can_start_together,
    check_trainer_fits,
    held_bytes,
    least_bytes,
    needed_bytes,
    offload_plan,
    peak_bytes,
    trainer_memory,
    update_copy_bytes,
)
from keel.trainer.placement.plan import Plan, make_plan
from tests.trainer.placement.shapes import SOURCE

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


def recipe(*, beta: float = 0.0, rollout: dict[str, Any] | None = None, **trainer: Any) -> Config:
    options = {"max_num_seqs": 16, "sampling": SamplingConfig(top_k=64, max_tokens=7_000)}
    return Config(
        model=ModelConfig(path="some/model"),
        data=DataConfig(sources=(replace(SOURCE, kl_coef=beta),), max_prompt_tokens=1000),
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


def test_parallelism_shards_experts_or_tokens() -> None:
    parts = plan(recipe(ranks=4, expert_parallel=4), MOE).trainer.parts
    assert parts["weights"] == 2 * (MOE.parameters - 3 / 4 * MOE.expert_parameters)
    long = recipe(ranks=4, sequence_parallel=2, micro_batch_tokens=16_000)
    alone = recipe(ranks=2, micro_batch_tokens=8000)
    assert billions(long, "activations") == billions(alone, "activations")


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


def turns(share: float, *, updates: int = 1, beta: float = 0.0, **trainer: Any) -> Config:
    rollout = {"time_share": True, "gpu_memory_utilization": share}
    config = recipe(beta=beta, micro_batch_tokens=8000, rollout=rollout, **trainer)
    algorithm = replace(config.algorithm, updates_per_batch=updates)
    return replace(config, algorithm=algorithm)


def memory(config: Config) -> Memory:
    return trainer_memory(config, DENSE, gpu=True)


def test_nothing_is_offloaded_without_need() -> None:
    config = turns(0.1)
    roomy = offload_plan(config, memory(config), 1000.0, shared=True)
    assert (
        roomy == OffloadPlan() and peak_bytes(config, memory(config), roomy) == memory(config).total
    )
    for other in (turns(0.9, offload_while_sampling=False), recipe()):
        assert offload_plan(other, memory(other), 80.0, shared=True) == OffloadPlan()
    apart = turns(0.9)
    assert offload_plan(apart, memory(apart), 80.0, shared=False) == OffloadPlan()
    assert needed_bytes(apart, memory(apart), shared=False) == memory(apart).total


@pytest.mark.parametrize(
    ("lacking", "state", "weights"),
    [(0.5e9, 4e9, 0), (3.9e9, 4e9, 0), (4.1e9, 8e9, 0), (11e9, 12e9, 0), (13e9, 12e9, 1e9)],
)
def test_offloads_only_the_bytes_the_engine_needs(
    lacking: float, state: float, weights: float
) -> None:
    """Weights take 2 GB, the optimizer 12 GB in three pieces under ZeRO-1. The reference is dropped
    first; its copy in host memory makes that a one-way move."""
    for beta, reference in ((0.0, 0.0), (0.1, 2e9)):
        config = turns(0.5, beta=beta)
        held = held_bytes(memory(config))
        assert held == pytest.approx(14e9 + reference)
        beside = 1.3 + 0.25  # CUDA and a block in transfer
        gpu_gib = ((held - lacking - reference) / GIB + beside) / (0.5 - _FRAGMENTED)
        waits = offload_plan(config, memory(config), gpu_gib, shared=True)
        assert waits.sampling == pytest.approx(state + weights + reference, rel=1e-6)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_optimizer_is_offloaded_for_activations(updates: int, beta: float) -> None:
    """The GPU lacks 3 GB for everything at once, with 6 % spare, but fits an update. Each update of
    a batch reloads the optimizer."""
    config = turns(0.01, beta=beta, updates=updates)
    rank = memory(config)
    parts, lacks = rank.parts, 3e9
    gpu_gib = (RANK_SPARE * rank.total - lacks) / GIB + ENGINE_CUDA_GIB
    update = sum(parts[n] for n in ("weights", "gradients", "optimizer", "unused", "CUDA"))
    assert update + parts["reference"] < rank.total - lacks
    waits = offload_plan(config, rank, gpu_gib, shared=True)
    assert (waits.sampling, waits.training, waits.host) == pytest.approx((0, lacks, lacks))
    assert waits.moved == pytest.approx(2 * updates * lacks)
    assert peak_bytes(config, rank, waits) == pytest.approx(rank.total - lacks)


def test_reference_is_offloaded_for_an_update() -> None:
    """With few activations, memory use peaks during the update."""
    config = turns(0.01, beta=0.1, updates=3)
    rank = memory(config)
    small = Memory(parts={**rank.parts, "activations": 0.0})
    parts = small.parts
    update = sum(parts[n] for n in ("weights", "gradients", "optimizer", "unused", "CUDA"))
    assert least_bytes(config, small) == update > small.total - parts["optimizer"]
    least = update / GIB + ENGINE_CUDA_GIB
    check_trainer_fits(config, small, least + 0.01, shared=True)
    with pytest.raises(DoesNotFit, match=r"a trainer rank needs \d+\.\d GiB at a time"):
        check_trainer_fits(config, small, least - 0.01, shared=True)
    waits = offload_plan(config, small, least + 0.01, shared=True)
    lacks = RANK_SPARE * small.total - update - 0.01 * GIB
    assert waits.training == pytest.approx(lacks)
    assert waits.host == pytest.approx(lacks + parts["reference"])
    assert waits.moved == pytest.approx(3 * (2 * lacks + parts["reference"]))
    assert peak_bytes(config, small, waits) == pytest.approx(update)


@pytest.mark.parametrize(
    ("dtype", "stage", "ranks", "copied"),
    [
        ("bfloat16", 1, 1, 0.0),
        ("bfloat16", 2, 2, 0.0),
        ("bfloat16", 3, 2, 2e9),
        ("float16", 1, 2, 2e9),
        ("float16", 2, 2, 0.0),
        ("float32", 1, 1, 4e9),
        ("float32", 2, 2, 2e9),
        ("float32", 0, 1, 0.0),
    ],
)
def test_bytes_copied_by_an_update(dtype: Any, stage: int, ranks: int, copied: float) -> None:
    config = turns(0.5, zero_stage=stage, ranks=ranks)
    config = replace(config, model=replace(config.model, dtype=dtype))
    assert update_copy_bytes(config, memory(config).parts, gpu=True) == pytest.approx(copied)


def test_engine_and_rank_start_together_if_both_fit() -> None:
    """The engine takes its share, and the rank takes its state before the first step."""
    rollout = {"gpu_memory_utilization": 0.5}
    config = recipe(rollout=rollout, micro_batch_tokens=8000)
    parts = trainer_memory(config, DENSE, gpu=True).parts
    there = 1.06 * sum(parts[n] for n in ("weights", "gradients", "optimizer", "unused", "CUDA"))
    enough = 2 * there / GIB
    assert enough > 40  # so the engine's cache is guaranteed
    assert can_start_together(config, DENSE, enough + 0.1, 0.0)
    assert not can_start_together(config, DENSE, enough - 0.1, 0.0)
    assert not can_start_together(config, DENSE, enough + 0.1, 1.0)
    assert can_start_together(config, DENSE, enough + 2.1, 1.0)
    of_a_step = 2 * 1.06 * trainer_memory(config, DENSE, gpu=True).total / GIB
    assert of_a_step > enough + 0.2
    assert can_start_together(config, DENSE, of_a_step + 0.1, 0.0, stepping=True)
    assert not can_start_together(config, DENSE, of_a_step - 0.1, 0.0, stepping=True)
    assert not can_start_together(recipe(rollout={**rollout, "time_share": True}), DENSE, 80.0, 0.0)
    assert not can_start_together(
        recipe(rollout={"gpu_memory_utilization": 0.05}), DENSE, 80.0, 0.0
    )
