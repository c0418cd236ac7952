"""Where DeepSpeed's optimizers keep master weights and what Adam knows of them.

Beside `keel.trainer.engine.deepspeed_internals` the only file that names what DeepSpeed has not
promised. `held` is looked through when the trainer's engine is built (`flaw`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from keel.trainer.engine.deepspeed_internals import DeepSpeedEngine, found_changed

SCALED = ("cur_scale", "cur_iter", "cur_hysteresis", "last_overflow_iter")
"""What a scaler of float16's loss has come to."""
MOVED_ON = (AttributeError, TypeError, LookupError, RuntimeError, AssertionError)
"""What looking at it ends in where it is another DeepSpeed than the one that is known."""


class Part(NamedTuple):
    """Of a parameter, as this rank has it (of an expert's layer, this rank's experts)."""

    name: str
    start: int
    """Its first element, in the flattened parameter."""
    count: int
    offset: int
    """Its first element, in the master weights."""
    weights: Tensor
    """[count] what the model computes with, in its own dtype."""


class Held(NamedTuple):
    """Master weights that Adam steps on as one tensor."""

    master: Tensor
    parts: list[Part]

    @property
    def flat(self) -> Tensor:
        return self.master.detach().view(-1)


def held(module: nn.Module, engine: DeepSpeedEngine, *, stage: int) -> list[Held]:
    """All that this rank has. `stage`: of ZeRO; 0: parameters are their own master weights."""
    if stage == 0:
        return [
            Held(p, [Part(name, 0, p.numel(), 0, p.detach().view(-1))])
            for name, p in trainable(module)
        ]
    optimizer: Any = engine.optimizer
    masters: list[Tensor] = (
        optimizer.fp32_partitioned_groups_flat
        if stage == 3
        else [group["params"][0] for group in optimizer.param_groups]
    )
    found = [Held(master, []) for master in masters]
    for name, parameter in trainable(module):
        group, part = (_sharded if stage == 3 else _mapped)(name, parameter, optimizer)
        if part is not None:
            found[group].parts.append(part)
    return found


def flaw(found: list[Held]) -> str:
    """What is not as it must be, if anything: right after the start, master weights are the model's
    weights in float32. Looks at the ends of each part, where a wrong offset would show."""
    for master, parts in found:
        if master.dtype != torch.float32 or not master.is_contiguous():
            return f"master weights are {master.dtype}, or not contiguous"
        flat = master.detach().view(-1)
        for part in parts:
            mine, theirs = flat[part.offset :][: part.count], part.weights
            if not (len(mine) == len(theirs) == part.count):
                return f"{part.name} is not where its master weights are"
            for end in (slice(0, 16), slice(-16, None)):
                ours = mine[end].to(theirs.device, theirs.dtype)
                if not torch.equal(ours.nan_to_num(), theirs[end].nan_to_num()):
                    return f"{part.name} is not where its master weights are"
    return ""


@contextmanager
def replacing_masters(engine: DeepSpeedEngine, found: list[Held], *, stage: int) -> Iterator[None]:
    """Collective. What the caller writes into master weights becomes the model's weights."""
    optimizer: Any = engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    yield
    if stage == 3:
        for master, parts in found:
            flat = master.detach().view(-1)
            for part in parts:
                part.weights.copy_(flat[part.offset :][: part.count])
        optimizer.checkpoint_event_epilogue()
    elif stage > 0:
        optimizer.update_lp_params()


def loss_scale(engine: DeepSpeedEngine) -> dict[str, float]:
    """What a scaler of float16's loss has seen so far; nothing in other dtypes."""
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not scaler.dynamic:
        return {}
    return {k: v for k, v in vars(scaler).items() if isinstance(v, int | float)}


def grow_loss_scale(engine: DeepSpeedEngine, window: int) -> None:
    """Double it after `window` steps that were not skipped, of which this is the last. DeepSpeed
    itself would before it divides the step's gradient by it, and so halve that (0.19.8)."""
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    steady = getattr(scaler, "cur_iter", 0) - getattr(scaler, "last_overflow_iter", 0) - 2
    if steady > 0 and steady % window == 0:
        scaler.cur_scale *= scaler.scale_factor


def forget_sums(engine: DeepSpeedEngine) -> None:
    """After a step that was skipped. With an optimizer in host memory DeepSpeed keeps the sums of
    its gradients (ZeRO 1 and 2, 0.19.8), and what is not finite in them would stay for good."""
    sums: Any = getattr(engine.optimizer, "averaged_gradients", None)
    if keeps_sums(engine) and isinstance(sums, dict):
        sums.update(dict.fromkeys(sums))


def keeps_sums(engine: DeepSpeedEngine) -> bool:
    return engine.zero_cpu_offload() and engine.zero_optimization_stage() < 3


def sums_missed(engine: DeepSpeedEngine) -> str:
    """Right after the start: a line about what is lost where `forget_sums` would find none."""
    there = isinstance(getattr(engine.optimizer, "averaged_gradients", None), dict)
    if there or not keeps_sums(engine):
        return ""
    return found_changed(
        "an optimizer in host memory keeps its sums of gradients elsewhere",
        "A step that is skipped for want of a finite gradient may have all later ones skipped",
    )


def set_loss_scale(engine: DeepSpeedEngine, seen: Mapping[str, float]) -> None:
    """If there is one; its settings stay those of this run."""
    if loss_scale(engine):
        optimizer: Any = engine.optimizer
        vars(optimizer.loss_scaler).update({k: v for k, v in seen.items() if k in SCALED})


def trainable(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def elements(parameter: Any) -> int:
    """Of the parameter that this rank has, where ZeRO-3 has left it a shard."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _mapped(name: str, parameter: Any, _: Any) -> tuple[int, Part | None]:
    """ZeRO-1 and 2: a partition of all parameters of a group, one after the other."""
    mapping = parameter._hp_mapping
    if mapping is None:  # in other ranks' partitions
        return 0, None
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    weights = parameter.detach().view(-1)[low.start :][: low.numel]
    return mapping.param_group_index, Part(name, low.start, low.numel, high.start, weights)


def _sharded(name: str, parameter: Any, optimizer: Any) -> tuple[int, Part | None]:
    """ZeRO-3: a shard of each parameter."""
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = parameter.ds_zero_partition_rank * size
    count = min(size, parameter.ds_numel - start)  # the last shard is padded
    if count <= 0:
        return group, None
    return group, Part(name, start, count, offset, parameter.ds_tensor.data.view(-1)[:count])
