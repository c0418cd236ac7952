"""What waits in host memory where an engine and a rank share a GPU by turns, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.configs.schema import Config
from keel.trainer.planning.memory import ENGINE_CUDA_GIB, GIB, Memory, trainer_memory
from keel.trainer.planning.turns import (
    NOTHING,
    check_trainer_fits,
    held_bytes,
    least_bytes,
    most_bytes,
    waiting,
)
from tests.trainer.planning.test_memory import DENSE, recipe


def turns(share: float, *, updates: int = 1, beta: float = 0.0, **trainer: Any) -> Config:
    rollout = {"sleep": True, "gpu_memory_utilization": share}
    config = recipe(beta=beta, micro_batch_tokens=8000, rollout=rollout, **trainer)
    algorithm = replace(config.algorithm, updates_per_batch=updates)
    return replace(config, algorithm=algorithm)


def memory(config: Config) -> Memory:
    return trainer_memory(config, DENSE, gpu=True)


def test_nothing_waits_where_nobody_needs_the_room() -> None:
    config = turns(0.1)
    assert waiting(config, memory(config), 1000.0, shared=True).moved == 0
    for other in (turns(0.9, offload_while_sampling=False), recipe()):
        assert waiting(other, memory(other), 80.0, shared=True) == NOTHING
    apart = turns(0.9)
    assert waiting(apart, memory(apart), 80.0, shared=False) == NOTHING
    assert most_bytes(apart, memory(apart), shared=False) == memory(apart).total


@pytest.mark.parametrize(
    ("lacking", "state", "weights"),
    [(0.5e9, 4e9, 0), (3.9e9, 4e9, 0), (4.1e9, 8e9, 0), (11e9, 12e9, 0), (13e9, 12e9, 1e9)],
)
def test_as_much_waits_as_an_engine_has_no_room_for(
    lacking: float, state: float, weights: float
) -> None:
    """Of 2 GB of weights and 12 of the optimizer, in three pieces under ZeRO-1. The reference goes
    first, and is in host memory already, so it moves one way."""
    for beta, reference in ((0.0, 0.0), (0.1, 2e9)):
        config = turns(0.5, beta=beta)
        held = held_bytes(memory(config))
        assert held == pytest.approx(14e9 + reference)
        beside = 1.3 + 1.5 + 0.25  # CUDA, what the allocator keeps, a block on its way
        gpu_gib = ((held - lacking - reference) / GIB + beside) / 0.5
        waits = waiting(config, memory(config), gpu_gib, shared=True)
        assert waits.sampling == pytest.approx(state + weights + reference, rel=1e-6)


def test_under_zero_3_layers_wait_by_themselves() -> None:
    config = turns(0.5, ranks=2, zero_stage=3)
    held = held_bytes(memory(config))
    assert held == pytest.approx(7e9)
    gpu_gib = ((held - 2.5e9) / GIB + 3.05) / 0.5
    waits = waiting(config, memory(config), gpu_gib, shared=True)
    assert waits.sampling == pytest.approx(2.5e9, rel=1e-6)


def test_the_optimizer_makes_way_for_activations_and_the_reference_for_an_update() -> None:
    config = turns(0.01, beta=0.1, updates=3)
    rank = memory(config)
    parts = rank.parts
    update = sum(parts[n] for n in ("weights", "gradients", "optimizer", "unused", "CUDA"))
    assert least_bytes(config, rank) == max(rank.total - parts["optimizer"], update)
    least = least_bytes(config, rank) / GIB + ENGINE_CUDA_GIB
    check_trainer_fits(config, rank, least + 0.01, shared=True)
    with pytest.raises(Exception, match=r"a trainer rank needs \d+\.\d GiB at a time"):
        check_trainer_fits(config, rank, least - 0.01, shared=True)
    lacks = 3e9
    gpu_gib = (rank.total - lacks) / GIB + ENGINE_CUDA_GIB
    waits = waiting(config, rank, gpu_gib, shared=True)
    assert waits.sampling == 0
    again = update + parts["reference"] > gpu_gib * GIB - ENGINE_CUDA_GIB * GIB
    assert waits.moved == pytest.approx(2 * 3 * lacks + again * 3 * parts["reference"], rel=1e-6)
    # Where an update just fits, the reference is not there meanwhile.
    tight = waiting(config, rank, update / GIB + ENGINE_CUDA_GIB + 0.01, shared=True)
    assert tight.most >= parts["reference"] > 0
