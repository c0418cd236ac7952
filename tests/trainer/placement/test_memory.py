"""The memory model against hand calculations and measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
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
    TRAINER_CUDA_GIB,
    TRAINER_UNUSED_GIB,
    DoesNotFit,
    OffloadPlan,
    activation_elements,
    held_bytes,
    host_bytes,
    key_width,
    support_head_bytes,
    trainer_memory,
)
from keel.trainer.placement.plan import Plan, describe, make_plan

GPU = Hardware(gpu=True)

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


@pytest.mark.parametrize(("stage", "shared"), [(1, 1), (2, 4), (3, 4)])
def test_warm_up_trains_indexers_only(stage: Any, shared: int) -> None:
    """All other parameters have weights only."""
    facts = replace(DENSE, indexer_parameters=40_000_000, head_size=0)
    config = recipe(ranks=4, zero_stage=stage, attention="warm-up")
    parts = trainer_memory(config, facts, gpu=True).parts
    assert parts["gradients"] == 4 * 40e6 / shared
    assert parts["optimizer"] == 12 * 40e6 / 4
    assert parts["weights"] == 2e9 / (4 if stage == 3 else 1)
    away = recipe(ranks=4, zero_stage=stage, attention="warm-up", offload_optimizer=True)
    # Host memory also holds gradients: twice under ZeRO-3, else once with new weights.
    assert host_bytes(away, facts, OffloadPlan()) == (20 if stage == 3 else 18) * 40e6 / 4


def test_single_key_head_is_not_latent_attention() -> None:
    """Small Gemma 3 models have one."""
    assert key_width(replace(DENSE, kv_heads=1, kv_width=256)) == 128
    assert key_width(replace(DENSE, kv_heads=1, kv_width=576, head_size=0)) == 1000


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


def test_unfused_norms_save_copies() -> None:
    config = recipe(micro_batch_tokens=8000)
    fused = plan(config).trainer.parts["activations"]
    copies = plan(config, replace(DENSE, fused_norms=False)).trainer.parts["activations"] - fused
    assert copies == pytest.approx(10 * 2 * (2 * 1000 + 1000 + 256) * 2 * 8000)


@pytest.mark.parametrize(("fused", "widths"), [(True, 3), (False, 4)])
@pytest.mark.parametrize(("recompute", "layers"), [(False, 10), (True, 1)])
def test_saved_expert_activations(fused: bool, widths: int, recompute: bool, layers: int) -> None:
    """Copies of the token in both directions, and the intermediate activations."""
    experts = {"experts": 8, "experts_per_token": 2, "expert_parameters": 10 * 8 * 3 * 1000 * 500}
    moe = replace(DENSE, moe_layer_ids=tuple(range(10)), fused_experts=fused, **experts)
    config = recipe(micro_batch_tokens=8000, activation_checkpointing=recompute)
    kept = plan(config, moe).trainer.parts["experts' tokens"]
    assert kept == pytest.approx(layers * 2 * (2 * 1000 + widths * 500) * 2 * 8000)


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


@pytest.mark.parametrize(
    ("vocabulary", "hidden", "mean_set", "measured"),
    [  # "extra GiB" of docs/performance.md, 32,768 tokens
        (151_936, 2048, 8.8, 0.72),
        (151_936, 1024, 8.8, 0.37),
        (262_144, 640, 8.8, 0.37),
        (151_936, 2048, None, 2.08),
    ],
)
def test_support_head_matches_measurement(
    vocabulary: int, hidden: int, mean_set: float | None, measured: float
) -> None:
    facts = replace(DENSE, vocab_size=vocabulary, hidden_size=hidden)
    sampling = SamplingConfig(top_k=0 if mean_set is None else 512)
    config = recipe(micro_batch_tokens=32_768, rollout={"sampling": sampling})
    assert support_head_bytes(config, facts, 2) / GIB == pytest.approx(measured, rel=0.1)


def test_mass_penalty_needs_the_whole_head() -> None:
    config = recipe(rollout={"sampling": SamplingConfig(top_p=0.9, top_k=64, max_tokens=7_000)})
    held = replace(config, algorithm=replace(config.algorithm, kept_mass_coef=1.0))
    more = support_head_bytes(held, DENSE, 2) - support_head_bytes(config, DENSE, 2)
    sampling = replace(config.rollout.sampling, top_p=1.0, top_k=0)
    whole = replace(config, rollout=replace(config.rollout, sampling=sampling))
    assert more == support_head_bytes(whole, DENSE, 2)


def test_engine_too_small_for_one_trajectory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"an engine's GPU needs .*weights 1\.9 GiB") as raised:
        plan(recipe(), gpu_gib=4)
    for knob in ("rollout.gpu_memory_utilization = 0.85", "run.gpu_gib"):
        assert knob in str(raised.value)


def test_small_cache_is_reported_and_slows_the_estimate() -> None:
    small = {"ranks": 4, "zero_stage": 3, "activation_checkpointing": True}
    config = recipe(rollout={"gpu_memory_utilization": 0.3, "max_num_seqs": 64}, **small)
    tight = plan(config, gpu_gib=15.2)
    ample = plan(config, gpu_gib=80)
    assert tight.cached is not None and 1 <= tight.cached < 64
    small, large = (replace(GPU, gpu_gib=size) for size in (15.2, 80.0))
    text = describe(config, DENSE, tight, [], hardware=small)
    assert f"holds {tight.cached} of 64 sequences at full length" in text
    assert "holds all 64 sequences" in describe(config, DENSE, ample, [], hardware=large)
    for shown, size in ((tight, 15.2), (ample, 80)):
        assert shown.engine.total <= 0.3 * size * GIB
    assert tight.time and ample.time and tight.time.rollout > ample.time.rollout


@pytest.mark.parametrize(
    ("trainer", "gib"),
    [({"micro_batch_tokens": 8000}, 16), ({"ranks": 8, "zero_stage": 1}, 8)],
)
def test_rank_that_does_not_fit_is_refused(trainer: dict[str, Any], gib: float) -> None:
    with pytest.raises(DoesNotFit, match=r"a trainer rank needs .* \(run\.gpu_gib\)"):
        plan(recipe(**trainer), gpu_gib=gib)
    plan(recipe(**trainer))  # unknown GPU: no check


def test_long_trajectory_fills_a_micro_batch_alone() -> None:
    short, long = (billions(recipe(micro_batch_tokens=n), "activations") for n in (1000, 8000))
    assert short == long


def test_engine_share_limits_the_trainer() -> None:
    config = recipe(micro_batch_tokens=8000, rollout={"gpu_memory_utilization": 0.5})
    plan(config, gpu_gib=48)
    with pytest.raises(ConfigError, match=r"shared with an engine that takes 0\.5 of it"):
        plan(config, gpu_gib=48, shared=True)
    plan(config, gpu_gib=80, shared=True)


def test_time_sharing_gives_each_nearly_all_memory() -> None:
    config = recipe(
        micro_batch_tokens=8000, rollout={"gpu_memory_utilization": 0.9, "time_share": True}
    )
    rank = plan(config).trainer
    need = (rank.total - rank.parts["optimizer"]) / GIB
    side_by_side = replace(config, rollout=replace(config.rollout, time_share=False))
    with pytest.raises(ConfigError, match=r"takes 0\.9 of it"):
        plan(side_by_side, gpu_gib=rank.total / GIB + 2, shared=True)
    plan(config, gpu_gib=need + 2, shared=True)
    with pytest.raises(
        ConfigError, match=r"at a time \(.* shared with an engine that takes 0\.\d+ of"
    ):
        plan(config, gpu_gib=need + 1, shared=True)
    greedy = replace(config, rollout=replace(config.rollout, gpu_memory_utilization=0.999))
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization = 0\.999: .* stay with the trainer"
    ):
        plan(greedy, gpu_gib=need + 2, shared=True)


def test_rank_without_offloading_limits_the_engine() -> None:
    trainer = {"micro_batch_tokens": 8000, "offload_while_sampling": False}
    config = recipe(**trainer, rollout={"gpu_memory_utilization": 0.9, "time_share": True})
    memory = plan(config).trainer
    need, held = memory.total / GIB, held_bytes(memory) / GIB
    gpu_gib = need + 2
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization = 0\.9: .* stay") as raised:
        plan(config, gpu_gib=gpu_gib, shared=True)
    beside = TRAINER_CUDA_GIB + TRAINER_UNUSED_GIB + 0.25  # and a block in transfer
    assert f"{held + beside:.1f} GiB of" in str(raised.value)
    share = (need - held - TRAINER_UNUSED_GIB) / gpu_gib
    modest = replace(config, rollout=replace(config.rollout, gpu_memory_utilization=share))
    plan(modest, gpu_gib=gpu_gib, shared=True)


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [  # weights, master weights and moments of one rank
        ({"zero_stage": 0}, 2 + 12),
        ({"zero_stage": 1}, 2 + 12),
        ({"zero_stage": 1, "offload_optimizer": True}, 2),
        ({"zero_stage": 2}, 2 + 12),
        ({"zero_stage": 3, "ranks": 2}, (2 + 12) / 2),
    ],
)
def test_rank_memory_held_while_sampling(options: dict[str, Any], bytes_each: int) -> None:
    """Gradients are freed."""
    config = recipe(micro_batch_tokens=8000, **options)
    assert held_bytes(plan(config).trainer) == pytest.approx(bytes_each * 1e9)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        # Before and after attention in each layer, and its gradient.
        ({}, 10 * 2 * 1000 + 1000),
        ({"compile": True}, 10 * 2 * 1000 + 1000),
        # The layers' inputs, all of the last layer, and the gradient.
        ({"activation_checkpointing": True}, 10 * 1000 + 2 * 1000 + 1000),
    ],
)
def test_float32_residual_costs_extra_activations(options: dict[str, Any], more: float) -> None:
    narrow = recipe(**options)
    wide = replace(narrow, model=replace(narrow.model, residual_dtype="float32"))
    difference = activation_elements(DENSE, wide) - activation_elements(DENSE, narrow)
    assert difference == pytest.approx(more)
    exact = replace(wide, model=replace(wide.model, dtype="float32"))
    assert activation_elements(DENSE, exact) == activation_elements(DENSE, narrow)
