"""The time model against hand calculations and measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.configs.sections.algorithm import PROBES
from keel.model.load import ModelFacts, facts_of
from keel.rl.packing.prefix_sharing import prefix_group_size
from keel.trainer.placement.hardware import GpuSpec, Hardware, idle_nodes, spec_of
from keel.trainer.placement.memory import (
    BYTES,
    _mlp_width,
    kv_token_bytes,
    packed,
    read_together,
)
from keel.trainer.placement.plan import describe, make_plan
from keel.trainer.placement.step_time import (
    Rates,
    StepTime,
    body_parameters,
    compute_seconds,
    decode_device_seconds,
    step_time,
    traffic_seconds,
)

GPU = Hardware(gpu=True)

SUMS = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)


@pytest.fixture(scope="module")
def moe() -> ModelFacts:
    """A mixture of experts with 1.6 B parameters."""
    return facts_of(
        Qwen3MoeConfig(
            vocab_size=151_936,
            hidden_size=1024,
            moe_intermediate_size=768,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            num_experts=32,
            num_experts_per_tok=4,
        )
    )


def recipe(*, answers: int = 64, top_k: int = 512, prompt: int = 128, **trainer: Any) -> Config:
    sampling = SamplingConfig(top_k=top_k, max_tokens=896)
    return Config(
        model=ModelConfig(path="some/moe"),
        data=DataConfig(sources=(SUMS,), max_prompt_tokens=prompt),
        algorithm=AlgorithmConfig(prompts_per_step=answers // 8, group_size=8),
        rollout=RolloutConfig(sampling=sampling, max_num_seqs=256, recorder="native"),
        trainer=TrainerConfig(**trainer),
    )


def estimate(config: Config, facts: ModelFacts, **options: Any) -> StepTime:
    return step_time(config, facts, micro_batches=4, **options)


def compute(
    facts: ModelFacts, *, micro_batches: int = 4, top_k: int = 512, **trainer: Any
) -> float:
    config = recipe(top_k=top_k, **trainer)
    return compute_seconds(config, facts, 65_536, micro_batches, GpuSpec(), Rates())


def test_step_adds_compute_and_memory_time(moe: ModelFacts) -> None:
    """Compute-bound and memory-bound cases by hand."""
    free = {
        "layer_moves": 0.0,
        "expert_moves": 0.0,
        "optimizer_bytes": 0.0,
        "summed_bytes": 0.0,
    }
    config, machine = recipe(), GpuSpec()
    rates = Rates(gemm_share=0.5, attention_share=0.5, **free)
    got = compute_seconds(config, moe, 1000, 1, machine, rates)
    flops = 6 * 1000 * (body_parameters(moe) + 16 * 1024 * 1024)
    assert got == pytest.approx(flops / (0.5 * machine.flops))
    rates = replace(rates, layer_moves=2.0, optimizer_bytes=10.0, summed_bytes=1.0)
    assert _mlp_width(moe) == pytest.approx(0, abs=50)  # the router and norms
    layer = 10 * 1024 + 12 * (1024 + 256) + 5 * _mlp_width(moe)
    moved = 3 * 1000 * 2.0 * 16 * layer * BYTES[config.model.dtype] + moe.parameters * (10 + 7)
    more = compute_seconds(config, moe, 1000, 7, machine, rates) - got
    assert more == pytest.approx(moved / machine.memory_bytes)
    at_experts = compute_seconds(config, moe, 1000, 7, machine, replace(rates, expert_moves=1.0))
    moved = 3 * 1000 * 16 * 4 * (2 * 1024 + 3 * 768) * BYTES[config.model.dtype]
    assert at_experts - got - more == pytest.approx(moved / machine.memory_bytes)


def test_shared_prompt_is_computed_once_per_group(moe: ModelFacts) -> None:
    """64 completions in groups of 8, packed into micro-batches with their prompt."""

    def made(tokens: int, *, share: bool = True) -> Config:
        return recipe(prompt=512, share_prompts=share, micro_batch_tokens=tokens)

    plain, shared = made(16_384, share=False), made(16_384)
    each = plain.max_context
    assert packed(plain) == (math.ceil(64 / (16_384 // each)), 64 * each)
    assert packed(made(each)) == (64, 64 * each)
    assert packed(shared)[1] == 8 * 512 + 64 * (each - 512)
    halves = prefix_group_size(4, 512, each)
    assert packed(made(halves)) == (16, 2 * 8 * 512 + 64 * (each - 512))
    times = [step_time(one, moe, micro_batches=4).compute for one in (plain, shared)]
    assert times[1] < times[0]


def test_unfused_layers_take_longer(moe: ModelFacts) -> None:
    assert compute(moe) < compute(replace(moe, fused_norms=False))
    assert compute(moe) < compute(replace(moe, fused_experts=False))
    compiled = compute(moe, compile=True)
    assert compute(replace(moe, fused_norms=False), compile=True) == compiled
    spread = compute(moe, ranks=4, expert_parallel=4)
    assert spread == compute(replace(moe, fused_experts=False), ranks=4, expert_parallel=4)


def test_expert_layers_take_longer_to_launch(moe: ModelFacts) -> None:
    rates = Rates()
    dense = replace(moe, moe_layer_ids=())
    more = [
        rates.launch_seconds(recipe(compile=compiled), moe, 4)
        - rates.launch_seconds(recipe(compile=compiled), dense, 4)
        for compiled in (False, True)
    ]
    assert more == pytest.approx([rates.expert_pass_s * 16 * 3 * 4] * 2)


def test_step_time_depends_on_options(moe: ModelFacts) -> None:
    usual = compute(moe)
    assert compute(moe, compile=True) < usual < compute(moe, activation_checkpointing=True)
    assert usual < compute(moe, top_k=0)
    whole, plain = compute(moe, top_k=0), recipe()
    sampling = replace(plain.rollout.sampling, top_p=0.9)
    plain = replace(plain, rollout=replace(plain.rollout, sampling=sampling))
    held = replace(plain, algorithm=replace(plain.algorithm, kept_mass_coef=1.0))
    more = compute_seconds(held, moe, 65_536, 4, GpuSpec(), Rates()) - usual
    assert more == pytest.approx((whole - usual) * PROBES * 64 / 65_536)
    assert usual < compute(moe, micro_batches=16)
    assert compute(moe, micro_batches=1, ranks=4) == pytest.approx(usual / 4)


def test_batch_invariant_kernels_slow_sampling_and_training(moe: ModelFacts) -> None:
    plain = recipe(micro_batch_tokens=65_536)
    invariant = replace(plain, model=replace(plain.model, batch_invariant=True))
    compiled = replace(plain, trainer=replace(plain.trainer, compile=True))
    before, after = (step_time(one, moe, micro_batches=1) for one in (compiled, invariant))
    assert after.decode_step == pytest.approx(Rates().invariant_step * before.decode_step)
    assert 1 < after.compute / before.compute < Rates().invariant_pass


def test_small_model_decoding_is_host_bound(moe: ModelFacts) -> None:
    """11.5 ms at 256 sequences with the native recorder, as measured. The packed recorder has the
    cost measured at 32 sequences, extrapolated linearly."""
    config = recipe(answers=256)
    time = estimate(config, moe)
    assert time.host_bound and time.decode_step == pytest.approx(11.48e-3, rel=0.01)
    assert time.decode == pytest.approx(896 * time.decode_step)
    packed = replace(config, rollout=replace(config.rollout, recorder="packed"))
    without = Rates(sampler_s=0.0)
    assert estimate(packed, moe, rates=without).decode_step == pytest.approx(2.02e-3, rel=0.01)
    time = estimate(packed, moe)  # GPU time of a profile
    assert not time.host_bound and time.decode_step == pytest.approx(2.3e-3, rel=0.05)


def test_large_dense_model_decoding_is_memory_bound(moe: ModelFacts) -> None:
    count = 70_000_000_000
    dense = replace(
        moe, experts=0, experts_per_token=0, expert_parameters=0, moe_layer_ids=(), tied=True
    )
    dense = replace(dense, parameters=count, active_parameters=count)
    quick = Rates(memory_share=1.0, cache_share=1.0, layer_step_s=0.0, sampler_s=0.0)
    time = estimate(recipe(answers=8), dense, rates=quick)
    assert not time.host_bound
    assert time.decode_step == pytest.approx(2 * count / 4.8e12, rel=0.01)


@pytest.mark.parametrize(("heads", "together"), [(4, 8), (8, 4), (16, 1)])
def test_cascade_attention_reads_a_prompt_once(moe: ModelFacts, heads: int, together: int) -> None:
    """heads: query heads; there are two key heads."""
    facts = replace(moe, head_size=128, kv_heads=2, kv_width=512, attention_width=128 * heads)
    config = recipe(answers=64, prompt=2048)
    config = replace(config, algorithm=replace(config.algorithm, group_size=8))
    packed = replace(config, rollout=replace(config.rollout, recorder="packed"))
    apart = replace(packed, rollout=replace(packed.rollout, cascade_attention=False))
    assert read_together(packed, facts) == together
    native = replace(config, rollout=replace(config.rollout, recorder="native"))
    invariant = replace(packed, model=replace(packed.model, batch_invariant=True))
    assert [read_together(it, facts) for it in (apart, native, invariant)] == [1, 1, 1]
    few = replace(packed, algorithm=replace(packed.algorithm, group_size=2))
    assert read_together(few, facts) == min(2, together)
    saved = 64 * 2048 * (1 - 1 / together) * kv_token_bytes(packed, facts)
    machine, rates = GpuSpec(), Rates()
    before, after = (decode_device_seconds(it, facts, 64, machine, rates) for it in (apart, packed))
    expected = saved / rates.cache_share / machine.memory_bytes
    assert before - after == pytest.approx(expected)


def test_few_sequences_use_few_experts(moe: ModelFacts) -> None:
    quick = Rates(step_s=0.0, sequence_s=0.0)
    few = estimate(recipe(answers=8, prompt=1), moe, rates=quick).decode_step
    many = estimate(recipe(answers=256, prompt=1), moe, rates=quick).decode_step
    # 8 sequences miss an expert with probability (28/32)^8 = 0.34.
    assert few < 0.75 * many


def test_small_cache_needs_more_decoding_rounds(moe: ModelFacts) -> None:
    all_at_once = estimate(recipe(answers=256), moe)
    in_four = estimate(recipe(answers=256), moe, sequences=64)
    assert in_four.sequences == 64
    assert in_four.decode == pytest.approx(4 * 896 * (2.0e-3 + 64 * 37e-6))
    assert in_four.decode > all_at_once.decode
    last = estimate(recipe(answers=16), moe)
    in_three = estimate(recipe(answers=256), moe, sequences=120)
    assert in_three.decode == pytest.approx(896 * 2 * in_three.decode_step + last.decode)


def test_traffic_grows_with_zero_3_and_network(moe: ModelFacts) -> None:
    def traffic(machine: GpuSpec, **trainer: Any) -> float:
        return traffic_seconds(recipe(**trainer), moe, 4, machine)

    node, pairs = GpuSpec(), GpuSpec(node_gpus=2, network_bytes=10e9)
    assert traffic(node) == 0
    # Ring reduce of float32 gradients and gather of bfloat16 weights, once a step.
    assert traffic(node, ranks=4, zero_stage=1) == pytest.approx(
        moe.parameters * 3 / 4 * 6 / node.link_bytes
    )
    assert traffic(node, ranks=4, zero_stage=3) > 4 * traffic(node, ranks=4, zero_stage=1)
    assert traffic(pairs, ranks=4, zero_stage=3) > traffic(node, ranks=4, zero_stage=3)
    spread = traffic(node, ranks=4, zero_stage=2, expert_parallel=4)
    assert spread != traffic(node, ranks=4, zero_stage=2)


def test_all_steps_of_a_batch_have_traffic(moe: ModelFacts) -> None:
    def traffic(stage: int, updates: int) -> float:
        config = recipe(ranks=4, zero_stage=stage)
        algorithm = replace(config.algorithm, updates_per_batch=updates)
        return traffic_seconds(replace(config, algorithm=algorithm), moe, 8, GpuSpec())

    assert traffic(1, 4) == pytest.approx(4 * traffic(1, 1))
    assert traffic(3, 4) == traffic(3, 1), "a micro-batch's is the same in any step"
    config = recipe(ranks=4, zero_stage=2, micro_batch_tokens=1024)
    once, often = (
        replace(config, algorithm=replace(config.algorithm, updates_per_batch=n)) for n in (1, 4)
    )
    times = [make_plan(c, moe, gpu=True, gpu_gib=139.0).time for c in (once, often)]
    assert times[0] is not None and times[1] is not None
    assert times[1].launch == pytest.approx(times[0].launch)
    assert times[1].traffic > times[0].traffic


def test_gpus_per_node_determine_network_traffic(moe: ModelFacts) -> None:
    eight, four = (
        Hardware(gpu=True, nodes=tuple(idle_nodes(8 // n, n)), gpu_gib=139.0).spec for n in (8, 4)
    )
    assert (eight.node_gpus, four.node_gpus, Hardware(gpu=True).spec.node_gpus) == (8, 4, 8)
    config = recipe(ranks=8, zero_stage=1)
    assert traffic_seconds(config, moe, 4, four) > traffic_seconds(config, moe, 4, eight)
    # Queries, keys and values to their heads, outputs back, in two passes and a reference's.
    sliced = recipe(ranks=8, sequence_parallel=8, micro_batch_tokens=4096)
    whole = recipe(ranks=8, micro_batch_tokens=512)
    more = traffic_seconds(sliced, moe, 4, eight) - traffic_seconds(whole, moe, 4, eight)
    trips = 2 + any(source.kl_coef > 0 for source in config.data.sources)
    moved = 16 * trips * 4 * 512 * 2 * (1024 + 256) * 2 * 7 / 8
    assert more == pytest.approx(moved / eight.link_bytes)


def test_shared_gpu_needs_no_weight_transfer(moe: ModelFacts) -> None:
    config = recipe(ranks=8)
    config = replace(config, rollout=replace(config.rollout, engines=8))
    shared, apart = (estimate(config, moe, shared=is_shared) for is_shared in (True, False))
    sent = moe.parameters * 2
    assert apart.weights - shared.weights == pytest.approx(sent / 50e9 - sent / 450e9)


def test_parts_add_up_to_the_estimate(moe: ModelFacts) -> None:
    config = recipe()
    plan = make_plan(config, moe, gpu=True)
    assert plan.time is not None
    parts = plan.time.rollout + plan.time.training + plan.time.weights + plan.time.driver
    assert plan.time.total == pytest.approx(parts)
    text = describe(config, moe, plan, [], hardware=GPU)
    assert "ESTIMATE, not measured, for NVIDIA H200 and" in text
    assert make_plan(config, moe, gpu=False).time is None


def test_long_context_attention_depends_on_the_kernels(
    moe: ModelFacts,
) -> None:
    """Attention time alone: 32,768 causal tokens in 4 passes."""
    longest, tokens = 32_768, 65_536

    def seconds(machine: GpuSpec = GpuSpec(), **trainer: Any) -> float:  # noqa: B008  (frozen)
        config = recipe(prompt=longest - 896, activation_checkpointing=True, **trainer)
        return compute_seconds(config, moe, tokens, 2, machine, Rates())

    flops = 2 * moe.attention_width * longest * moe.layers * tokens / GpuSpec().flops
    at = {"torch": 0.27, "flash4": 0.62 * longest / (longest + 2000)}
    torch, flash4 = (seconds(attention_kernels=name) for name in at)
    assert torch - flash4 == pytest.approx(4 * flops * (1 / at["torch"] - 1 / at["flash4"]))
    assert seconds() == flash4
    assert seconds(replace(GpuSpec(), flash4=False)) == torch
    for name, whole in zip(at, (torch, flash4), strict=True):
        kept = seconds(attention_kernels=name, keep_attention=True)
        assert whole - kept == pytest.approx(flops / at[name])


def test_offloaded_optimizer_costs_cpu_and_transfer_time(moe: ModelFacts) -> None:
    def seconds(micro_batches: int, stage: int, *, away: bool) -> float:
        trainer: dict[str, Any] = {"ranks": 2, "zero_stage": stage, "offload_optimizer": away}
        config = recipe(**trainer)
        return compute_seconds(config, moe, 65_536, micro_batches, GpuSpec(), Rates())

    owned = moe.parameters / 2
    for count, stage in product((1, 4), (1, 2, 3)):
        sums = (30 - 14) * (stage == 1)  # gradients need an extra pass
        on_gpu = owned * 65 - sums * moe.parameters * count
        crossing = 4 + 2 + 8 * (count - 1) * (stage == 3)
        there = owned * (3.5e-10 + crossing / GpuSpec().host_bytes)
        more = seconds(count, stage, away=True) - seconds(count, stage, away=False)
        assert more == pytest.approx(there - on_gpu / GpuSpec().memory_bytes)


@pytest.mark.parametrize(
    ("driver", "sheet", "tflops", "terabytes"),
    [
        ("NVIDIA H200", "H200", 989, 4.8),
        ("NVIDIA H100 80GB HBM3", "H100", 989, 3.35),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756, 2.0),
        ("NVIDIA H20", "H20", 148, 4.0),
        ("NVIDIA GH200 480GB", "GH200", 989, 4.0),
        ("NVIDIA A100-SXM4-80GB", "A100", 312, 2.04),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", 312, 1.56),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 312, 1.94),
        ("NVIDIA GB200", "GB200", 2500, 8.0),
        ("NVIDIA B200", "B200", 2250, 8.0),
        ("NVIDIA L40S", "L40S", 362, 0.864),
        ("NVIDIA L4", "L4", 121, 0.3),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165, 1.01),
    ],
)
def test_gpu_specs_by_driver_name(driver: str, sheet: str, tflops: float, terabytes: float) -> None:
    spec = spec_of(driver)
    assert spec.name == f"NVIDIA {sheet}"
    assert (spec.flops, spec.memory_bytes) == (tflops * 1e12, terabytes * 1e12)
    assert spec.flash4 == (sheet[0] in "GHB")  # Hopper and Blackwell
    assert spec.host_bytes == (44e9 if spec.flash4 or "5090" in sheet else 22e9)


def test_unknown_gpu_uses_named_default_rates() -> None:
    assert spec_of("") == GpuSpec()
    spec = spec_of("NVIDIA T4")
    assert spec.flops == GpuSpec().flops and not spec.flash4
    assert not spec_of("NVIDIA GB10").flash4
    assert spec.name == "NVIDIA H200 (Keel has no rates of NVIDIA T4)"
