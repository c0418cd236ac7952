"""What a rank and an engine that share a GPU leave each other there (`rollout.time_share`): what
`keel.trainer.engine.offload` does, in bytes.

A rank's optimizer state is in host memory while activations need its room, and comes back for the
update; and while the engine samples, whatever the engine's share leaves no room for.
"""

from __future__ import annotations

from dataclasses import dataclass

from keel.configs.schema import Config
from keel.model.load import ModelFacts
from keel.trainer.placement.families import learned_parameters
from keel.trainer.placement.memory import (
    ENGINE_CUDA_GIB,
    ENGINE_SPARE,
    ENGINE_SPARE_GIB,
    GIB,
    JOINED,
    RANK_SPARE,
    STEP_PARTS,
    TRAINER_CUDA_GIB,
    DoesNotFit,
    Memory,
    engine_memory,
    gib,
    largest_first,
    stage_in_use,
    trainer_memory,
    update_copy_bytes,
)

IN_PIECES = 0.08
"""Of a GPU, while an engine samples: memory that is left in pieces in use in part, a sleeping
engine's own, counted twice, and what is offloaded as a whole. 11 GiB of 140 in the one run that was
looked at."""
LEFT_GIB = 0.5
"""Of a rank that has offloaded all it can, in PyTorch's allocator: 0.3 to 0.8 in four drawn
workloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Bytes of a rank in host memory, in turns with an engine."""

    sampling: float = 0.0
    """While that samples."""
    training: float = 0.0
    """Of the optimizer's state, beside activations."""
    host: float = 0.0
    """At most, of whatever it is."""
    moved: float = 0.0
    """Between GPU and host memory in a step, both ways together."""


def offloads(config: Config, *, shared: bool) -> bool:
    return shared and config.rollout.time_share and config.trainer.offload_while_sampling


def needed_bytes(config: Config, memory: Memory, *, shared: bool) -> float:
    """That a rank needs on its GPU at a time."""
    return least_bytes(config, memory) if offloads(config, shared=shared) else memory.total


def least_bytes(config: Config, memory: Memory) -> float:
    """Where it offloads what it can: without its optimizer's state beside activations, and without
    a reference in an update."""
    return max(memory.total - memory.parts["optimizer"], _of_update(config, memory))


def peak_bytes(config: Config, memory: Memory, waits: Waiting) -> float:
    """That a rank has there at any time."""
    return max(memory.total - waits.training, min(memory.total, _of_update(config, memory)))


def _of_update(config: Config, memory: Memory) -> float:
    """Without activations and without a reference."""
    names = ("weights", "gradients", "optimizer", "unused", "CUDA")
    held = sum(memory.parts[name] for name in names)
    return held + update_copy_bytes(config, memory.parts, gpu=True)


def waiting_of(
    config: Config, memory: Memory, gpu_gib: float, *, shared: bool, taken_gib: float = 0.0
) -> Waiting:
    """`gpu_gib`: of a GPU, 0 where nobody knows: then all waits; `taken_gib`: of it, by processes
    of others."""
    if not offloads(config, shared=shared):
        return Waiting()
    parts, state = memory.parts, memory.parts["optimizer"]
    free = (gpu_gib - taken_gib) * GIB
    share = config.rollout.gpu_memory_utilization + IN_PIECES
    room = free - (share * gpu_gib + _beside_gib(config)) * GIB
    excess = max(0.0, held_bytes(memory) - max(0.0, room))
    reference = min(excess, parts["reference"])
    excess -= reference
    if stage_in_use(config, gpu=True) in (1, 2):  # what Adam steps on as one tensor is one piece
        pieces = min(3.0, -(-excess // (state / 3))) if state else 0.0
        away = pieces * state / 3
    else:
        away = min(excess, state)
    weights = max(0.0, excess - away)
    # What activations want, and an update.
    free -= ENGINE_CUDA_GIB * GIB
    lacks = min(state, max(0.0, RANK_SPARE * memory.total - free)) if gpu_gib else state
    alone = not gpu_gib or _of_update(config, memory) + parts["reference"] > free
    updates, training = config.algorithm.updates_per_batch, max(away, lacks)
    updated = parts["reference"] * alone
    return Waiting(
        sampling=reference + away + weights,
        training=training,
        host=max(reference + away + weights, training + max(reference, updated)),
        moved=2 * (weights + training + (updates - 1) * lacks)
        + (updates * updated if alone else reference),
    )


def staying_gib(config: Config, memory: Memory, waits: Waiting | None = None) -> float:
    """Of a rank, on the GPU while an engine samples there; waits: with what is no need to offload,
    else the least."""
    if config.trainer.offload_while_sampling and waits is None:
        return least_staying_gib(config)
    # Memory that PyTorch keeps for later, too: 23.4 GiB stayed where weights, optimizer and
    # reference are 19.1 (H200, 1.28 B parameters).
    held = held_bytes(memory) - (waits.sampling if waits else 0.0)
    return _beside_gib(config) + (held + memory.parts["unused"]) / GIB


def least_staying_gib(config: Config) -> float:
    """`staying_gib` of a rank that offloads all it holds."""
    return _beside_gib(config) + LEFT_GIB


def _beside_gib(config: Config) -> float:
    """CUDA's own, and weights on their way."""
    return TRAINER_CUDA_GIB + config.trainer.publish_bucket_mib / 1024


def held_bytes(memory: Memory) -> float:
    """What a rank holds between two steps: no gradients (trainer/engine/offload.py)."""
    return sum(memory.parts[name] for name in ("weights", "optimizer", "reference"))


def host_bytes(config: Config, facts: ModelFacts, waits: Waiting) -> float:
    """What a rank keeps in its machine's memory, at least: master weights, moments and gradients of
    an offloaded optimizer, and new weights on their way; and what waits there in turns with an
    engine."""
    trainer = config.trainer
    learned, _ = learned_parameters(config, facts)
    each = 20 if trainer.zero_stage == 3 else 18
    optimizer = each * learned / trainer.ranks if trainer.offload_optimizer else 0.0
    return optimizer + waits.host


def guaranteed_cache_bytes(config: Config, facts: ModelFacts, gpu_gib: float) -> int:
    """Bytes that an engine's share of such a GPU leaves its KV cache for certain; 0 where that does
    not hold all its answers, so that vLLM has to find out how much it can have."""
    memory = engine_memory(config, facts, gpu=True)
    cache = memory.parts["KV cache"]
    rest = ENGINE_SPARE * (memory.total - cache) + ENGINE_SPARE_GIB * GIB
    left = config.rollout.gpu_memory_utilization * gpu_gib * GIB - rest
    return int(left) if left >= cache else 0


def can_start_together(
    config: Config, facts: ModelFacts, gpu_gib: float, taken_gib: float, *, stepping: bool = False
) -> bool:
    """Whether an engine and a rank that share a GPU have room there while both start: an engine
    wants all of its share free, and none that measures what is left for its cache may be disturbed
    (`certain_cache`). `taken_gib`: by processes of others. stepping: also while the rank computes
    on a whole micro-batch."""
    if config.rollout.time_share or not guaranteed_cache_bytes(config, facts, gpu_gib):
        return False
    rank = trainer_memory(config, facts, gpu=True)
    later = () if stepping else (*STEP_PARTS, JOINED)
    holds = rank.total - sum(rank.parts.get(name, 0.0) for name in later)
    share = config.rollout.gpu_memory_utilization * gpu_gib
    return share + RANK_SPARE * holds / GIB <= gpu_gib - taken_gib


def check_trainer_fits(
    config: Config, memory: Memory, gpu_gib: float, *, shared: bool, taken_gib: float = 0.0
) -> None:
    """Raises DoesNotFit if a rank needs more than its GPU has; `shared`: with an engine;
    `taken_gib`: by processes of others."""
    rollout, needs = config.rollout, needed_bytes(config, memory, shared=shared)
    if shared and rollout.time_share:  # what stays of either while the other has the memory
        room, taken = gpu_gib - ENGINE_CUDA_GIB, ENGINE_CUDA_GIB / gpu_gib
        stays = staying_gib(config, memory) + taken_gib
        if rollout.gpu_memory_utilization > 1 - stays / gpu_gib:
            raise DoesNotFit(
                f"rollout.gpu_memory_utilization = {rollout.gpu_memory_utilization:g}: "
                f"{gib(stays * GIB)} of a GPU's {gib(gpu_gib * GIB)} (run.gpu_gib) stay "
                "with the trainer while the engine samples"
            )
    else:
        taken = rollout.gpu_memory_utilization if shared else 0.0
        room = gpu_gib * (1 - taken)
    if needs <= (room - taken_gib) * GIB:
        return
    limit = f"a GPU has {gib(gpu_gib * GIB)} (run.gpu_gib)"
    if taken_gib:
        limit += f", of which processes of others hold {gib(taken_gib * GIB)}"
    if shared:
        limit += f", shared with an engine that takes {taken:.2g} of it"
    apart = " at a time" * (needs < memory.total)
    raise DoesNotFit(
        f"a trainer rank needs {gib(needs)}{apart} ({largest_first(memory)}), and {limit}"
    )
