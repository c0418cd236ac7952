"""Offloading to host memory while an engine and a rank share a GPU, calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.configs.schema import Config
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
from tests.trainer.placement.test_memory import DENSE, recipe


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
