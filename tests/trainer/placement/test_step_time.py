"""Compares the time model with calculations by hand and with measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from benchmarks.training.cases import Case, estimates, model_of
from keel.configs.load import load_config
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from keel.model.load import ModelFacts, facts_of
from keel.rl.packing.prefix_sharing import prefix_group_size
from keel.trainer.placement.hardware import GpuSpec
from keel.trainer.placement.memory import (
    BYTES,
    GIB,
    _mlp_width,
    packed,
)
from keel.trainer.placement.step_time import (
    Rates,
    body_parameters,
    compute_seconds,
    step_time,
)
from tests.trainer.placement.shapes import SOURCE

SUMS = replace(SOURCE, kl_coef=0.0)


@pytest.fixture(scope="module")
def moe() -> ModelFacts:
    """A mixture-of-experts model with 1.6 B parameters."""
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


def test_step_adds_compute_and_memory_time(moe: ModelFacts) -> None:
    """Compute-bound and memory-bound cases, calculated by hand."""
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


def test_window_may_be_shorter_than_the_longest_prompt() -> None:
    config = load_config("agent-guess", ["trainer.share_prompts=true"])
    assert config.max_context < config.data.max_prompt_tokens and packed(config)[1] > 0


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


USUAL = Case(shape="", length=1024, micro_batch_tokens=16_384, step_tokens=65_536)
WIDE = {"micro_batch_tokens": 32_768}
LONG = {"length": 4096, **WIDE}
SLICE: list[tuple[float, float, dict[str, Any]]] = [
    (0.523, 89.8, {}),
    (0.485, 103.6, WIDE),
    (0.592, 103.6, LONG),
    (0.672, 78.7, {"recompute": True}),
    (0.452, 89.3, {"compiled": True}),
    (0.420, 102.7, {"compiled": True, **WIDE}),
]
QWEN3_17B: list[tuple[float, float, dict[str, Any]]] = [
    (1.430, 69.2, {}),
    (1.382, 106.0, WIDE),
    (1.655, 106.0, LONG),
    (1.806, 36.1, {"recompute": True}),
    (1.180, 55.6, {"compiled": True}),
]
MIXTURE: list[tuple[float, float, dict[str, Any]]] = [
    (0.475, 41.6, {}),
    (0.357, 53.6, WIDE),
    (0.432, 53.6, LONG),
    (0.645, 29.6, {"recompute": True}),
]
COPIED = replace(Rates(), summed_bytes=Rates().gradient_bytes)
"""Rates of the commit behind the last two tables, which copied gradients before adding them."""
STEPS = [
    pytest.param(seconds, gib, replace(USUAL, shape=shape, **changes), rates, id=f"{shape}-{index}")
    for shape, rates, rows in (
        ("30b-a3b-slice", Rates(), SLICE),
        ("qwen3-1.7b", COPIED, QWEN3_17B),
        ("moe-1.6b", COPIED, MIXTURE),
    )
    for index, (seconds, gib, changes) in enumerate(rows)
]
"""Seconds, GiB of GPU memory, and the case of `python -m benchmarks.training`."""


@pytest.mark.parametrize(("seconds", "gib", "case", "rates"), STEPS)
def test_estimates_are_within_a_tenth(seconds: float, gib: float, case: Case, rates: Rates) -> None:
    """Memory may be underestimated by at most 3 %, so that recipes which pass `keel check` fit."""
    facts = facts_of(model_of(case.shape, small=False))
    estimated_s, estimated_bytes = estimates(case, facts, gpu=True, rates=rates)
    assert 0.9 <= estimated_s / seconds <= 1.1
    assert 0.97 <= estimated_bytes / GIB / gib <= 1.1
