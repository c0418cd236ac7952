"""What a rank and an engine that share a GPU leave each other there (`rollout.sleep`): what
`keel.trainer.engine.offload` does, in bytes.

A rank's optimizer state is in host memory while activations need its room, and comes back for the
update; and while the engine samples, whatever the engine's share leaves no room for.
"""

from __future__ import annotations

from dataclasses import dataclass

from keel.configs.schema import Config
from keel.model.load import ModelFacts
from keel.trainer.planning.memory import (
    ENGINE_CUDA_GIB,
    GIB,
    TRAINER_CUDA_GIB,
    TRAINER_UNUSED_GIB,
    DoesNotFit,
    Memory,
    gib,
    largest_first,
    stage_in_use,
)

SUB_GROUP_BYTES = 4e9
"""ZeRO-3 updates so many bytes of master weights at a time (DeepSpeed's default)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Bytes of a rank in host memory, in turns with an engine."""

    sampling: float
    """While that samples."""
    most: float
    """At any time."""
    moved: float
    """Between GPU and host memory in a step, both ways together."""


NOTHING = Waiting(sampling=0.0, most=0.0, moved=0.0)


def offloads(config: Config, *, shared: bool) -> bool:
    return shared and config.rollout.sleep and config.trainer.offload_while_sampling


def most_bytes(config: Config, memory: Memory, *, shared: bool) -> float:
    """That a rank has on its GPU at any time."""
    return least_bytes(config, memory) if offloads(config, shared=shared) else memory.total


def least_bytes(config: Config, memory: Memory) -> float:
    """As much with its optimizer's state in host memory whenever it can be."""
    return max(memory.total - memory.parts["optimizer"], _of_update(config, memory))


def _of_update(config: Config, memory: Memory) -> float:
    """Without activations and without a reference. A shard's gradients are copied into one piece,
    under ZeRO-3 of a few layers at a time."""
    parts, stage = memory.parts, stage_in_use(config, gpu=True)
    one = parts["optimizer"] / 3
    copies = {2: one, 3: min(one, SUB_GROUP_BYTES)}.get(stage, 0.0)
    names = ("weights", "gradients", "optimizer", "unused", "CUDA")
    return sum(parts[name] for name in names) + copies


def waiting(
    config: Config, memory: Memory, gpu_gib: float, *, shared: bool, taken_gib: float = 0.0
) -> Waiting:
    """`gpu_gib`: of a GPU, 0 where nobody knows; `taken_gib`: of it, by processes of others."""
    if not offloads(config, shared=shared):
        return NOTHING
    parts, free = memory.parts, (gpu_gib - taken_gib) * GIB
    taken = config.rollout.gpu_memory_utilization * gpu_gib + _beside_gib(config)
    room = free - (taken + TRAINER_UNUSED_GIB) * GIB if gpu_gib else 0.0
    excess = max(0.0, held_bytes(memory) - max(0.0, room))
    reference, state = min(excess, parts["reference"]), parts["optimizer"]
    excess -= reference
    # What Adam steps on as one tensor goes as a whole.
    whole = stage_in_use(config, gpu=True) in (1, 2) and 0 < excess < state
    away = state / 3 * -(-excess // (state / 3)) if whole else min(excess, state)
    rest = max(0.0, excess - away)
    sampling, free = reference + away + rest, free - ENGINE_CUDA_GIB * GIB
    # What activations and the update want, of each update of a batch.
    lacks = min(state, max(0.0, memory.total - free)) if gpu_gib else 0.0
    again = bool(gpu_gib) and _of_update(config, memory) + parts["reference"] > free
    updates = config.algorithm.updates_per_batch
    return Waiting(
        sampling=sampling,
        most=max(sampling, max(away, lacks) + max(reference, again * parts["reference"])),
        moved=2 * (rest + max(away, lacks) + (updates - 1) * lacks)
        + (updates * parts["reference"] if again else reference),
    )


def staying_gib(config: Config, memory: Memory) -> float:
    """Of a rank, on the GPU at least while an engine samples there."""
    stays = _beside_gib(config)
    if config.trainer.offload_while_sampling:
        return stays
    # Memory that PyTorch keeps for later, too: 23.4 GiB stayed where weights, optimizer and
    # reference are 19.1 (H200, 1.28 B parameters).
    return stays + (held_bytes(memory) + memory.parts["unused"]) / GIB


def _beside_gib(config: Config) -> float:
    """CUDA's own, and weights on their way."""
    return TRAINER_CUDA_GIB + config.trainer.publish_bucket_mib / 1024


def held_bytes(memory: Memory) -> float:
    """What a rank holds between two steps: no gradients (trainer/engine/offload.py)."""
    return sum(memory.parts[name] for name in ("weights", "optimizer", "reference"))


def host_bytes(config: Config, facts: ModelFacts, waits: Waiting) -> float:
    """What a rank keeps in its machine's memory, at least: master weights and moments of an
    offloaded optimizer, and what waits there in turns with an engine."""
    trainer = config.trainer
    optimizer = 12 * facts.parameters / trainer.ranks if trainer.offload_optimizer else 0.0
    return optimizer + waits.most


def check_trainer_fits(
    config: Config, memory: Memory, gpu_gib: float, *, shared: bool, taken_gib: float = 0.0
) -> None:
    """Raises DoesNotFit if a rank needs more than its GPU has; `shared`: with an engine;
    `taken_gib`: by processes of others."""
    rollout, most = config.rollout, most_bytes(config, memory, shared=shared)
    if shared and rollout.sleep:  # what stays of either while the other has the memory
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
    if most <= (room - taken_gib) * GIB:
        return
    limit = f"a GPU has {gib(gpu_gib * GIB)} (run.gpu_gib)"
    if taken_gib:
        limit += f", of which processes of others hold {gib(taken_gib * GIB)}"
    if shared:
        limit += f", shared with an engine that takes {taken:.2g} of it"
    apart = " at a time" * (most < memory.total)
    raise DoesNotFit(
        f"a trainer rank needs {gib(most)}{apart} ({largest_first(memory)}), and {limit}"
    )
