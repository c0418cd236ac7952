"""All that the trainer uses of DeepSpeed beyond what its documentation promises. No other file
names a private attribute of it, so its next release breaks this one at most.

Nothing here is relied upon unseen: when the trainer's engine is built, before its first step, the
`check_` functions and `sum_in_one_pass` look at attributes and signatures, and try what they
replace. What they find changed comes back as a line (empty: all is as it should be) that says what
is lost, and DeepSpeed's own way is taken; `check_experts` raises, as nothing can replace AutoEP.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from keel.model.imports import not_found
from keel.model.torch_internals import storage_id

# Its autotuner, which no run uses, loads MLflow where that is installed, and with it web servers
# and stores: a tenth of what a rank imports. So the others have it from here.
with not_found("mlflow"):
    import deepspeed
    from deepspeed import DeepSpeedEngine as DeepSpeedEngine

KNOWN = "0.19.8"
"""The release that this file was written for."""
SHM_OP = "deepspeed_shm_comm"
LARGE = 2**16
"""Elements; for fewer, PyTorch's slower kernel is the quicker one to start."""


def found_changed(what: str, lost: str) -> str:
    """One line for whoever runs this with a DeepSpeed that has moved on."""
    return f"DeepSpeed {deepspeed.__version__} is not as {KNOWN} was: {what}. {lost}"


def skip_shared_memory_op() -> str:
    """Mark the shared-memory all-reduce for CPUs as not available, so that nobody compiles it (over
    a minute, with gcc and ninja). Only tensor-parallel inference uses it. On GPUs DeepSpeed has no
    such operation."""
    if torch.cuda.is_available():
        return ""
    known = getattr(deepspeed.ops, "__compatible_ops__", {})
    if SHM_OP not in known:
        return found_changed(
            f"deepspeed.ops knows no {SHM_OP}", "On a CPU it may take long to start"
        )
    known[SHM_OP] = False
    return ""


def whole_shape(parameter: nn.Parameter) -> Sequence[int]:
    """Of the whole parameter, where ZeRO-3 has left this rank a shard of it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _missing(thing: object, *names: str) -> str:
    lacking = [name for name in names if not hasattr(thing, name)]
    whose = thing.__name__ if inspect.isclass(thing) else type(thing).__name__
    return f"{whose} has no {' and no '.join(lacking)}" if lacking else ""


# Gradients of bfloat16, added up in float32

_UPDATE = ["self", "lp", "group_idx", "param_idx", "clear_lp_grads"]
"""Parameters of the method that is replaced."""
_MOVED_ON = (AttributeError, TypeError, LookupError, RuntimeError, AssertionError)
"""What a trial of a method ends in whose surroundings have changed."""


def sum_in_one_pass(optimizer: Any) -> str:
    """Have DeepSpeed's optimizer for bfloat16 add each gradient to its float32 sum as it is.

    DeepSpeed makes a float32 copy of every gradient and adds that: 18 bytes a parameter and
    micro-batch, where reading the gradient and adding to its sum takes 10. The sums are the same to
    the bit, which is tried here: a backward pass through a parameter must reach the new method by
    DeepSpeed's own hooks, and leave what it leaves with DeepSpeed's. Else nothing is changed.
    """
    before = type(optimizer)
    what = _missing(
        optimizer,
        "_update_hp_grad",
        "bf16_groups",
        "fp32_groups_gradients",
        "fp32_groups_has_gradients",
        "autoep_folding_tp_group",
    )
    if not what and list(inspect.signature(before._update_hp_grad).parameters) != _UPDATE:
        what = f"{before.__name__}._update_hp_grad has other parameters"
    if not what:
        summing = _summing(before)
        try:
            expected = _tried(optimizer)
            optimizer.__class__ = summing
            found, count = _tried(optimizer), len(expected)
            if optimizer.one_pass_sums != count:
                what = f"{before.__name__} adds gradients up by other ways than _update_hp_grad"
            elif not all(_equal(a, b) for a, b in zip(found, expected, strict=True)):
                what = f"{before.__name__}._update_hp_grad does something else"
        except _MOVED_ON as error:
            what = f"{before.__name__} failed in a trial ({type(error).__name__}: {error})"
        if what:
            optimizer.__class__ = before
    return what and found_changed(what, "It adds gradients up itself, which takes longer")


def _summing(base: Any) -> Any:
    class SummingOptimizer(base):
        one_pass_sums = 0
        """Gradients that went the short way."""

        @torch.no_grad()
        def _update_hp_grad(
            self, lp: Any, group_idx: int, param_idx: int, clear_lp_grads: bool
        ) -> None:
            gradient: Tensor | None = lp.grad
            total: Tensor = self.fp32_groups_gradients[group_idx][param_idx]
            if (
                gradient is None
                or gradient.numel() != total.numel()
                or not (gradient.is_contiguous() and total.is_contiguous())
                or clear_lp_grads
                or self.autoep_folding_tp_group is not None
            ):
                super()._update_hp_grad(lp, group_idx, param_idx, clear_lp_grads)
                return
            if total.is_cuda and total.numel() >= LARGE:
                from keel.trainer.engine.grad_kernels import add  # noqa: PLC0415  (Triton exists on GPU machines)

                add(total, gradient)
            else:
                total.add_(gradient.view(total.shape))
            lp._hp_grad = total
            self.fp32_groups_has_gradients[group_idx][param_idx] = True
            self.one_pass_sums += 1

    return SummingOptimizer


def _tried(optimizer: Any) -> list[tuple[Tensor, bool, bool, bool]]:
    """What two backward passes through a small parameter leave, and through one for the kernel;
    then all is as it was before them."""
    sizes = [
        (parameter.numel(), group, index)
        for group, parameters in enumerate(optimizer.bf16_groups)
        for index, parameter in enumerate(parameters)
    ]
    chosen = {min(sizes), min((size for size in sizes if size[0] >= LARGE), default=min(sizes))}
    left: list[tuple[Tensor, bool, bool, bool]] = []
    for count, group, index in sorted(chosen):
        parameter: Any = optimizer.bf16_groups[group][index]
        total: Tensor = optimizer.fp32_groups_gradients[group][index]
        reached: list[bool] = optimizer.fp32_groups_has_gradients[group]
        linked = getattr(parameter, "_hp_grad", None)
        slope = torch.linspace(-1, 1, count, dtype=parameter.dtype, device=parameter.device)
        try:
            for _ in range(2):
                (parameter * slope.view_as(parameter)).sum().backward()
                rest = (reached[index], parameter._hp_grad is total, parameter.grad is None)
                left.append((total.clone(), *rest))
        finally:
            total.zero_()
            reached[index], parameter._hp_grad, parameter.grad = False, linked, None
    return left


def _equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return torch.equal(one[0], other[0]) and one[1:] == other[1:] and bool(one[0].any())


# What a rank holds between two steps


def gradient_sums(optimizer: Any) -> list[Tensor]:
    """Float32 sums of gradients where they have a place of their own, of no use once the optimizer
    has stepped: of bfloat16 under ZeRO-1, where they are zeros then, and under ZeRO-3, where the
    next gradient is written over them."""
    of_3: Tensor | None = getattr(optimizer, "grad_partitions_flat_buffer", None)
    return [*getattr(optimizer, "fp32_groups_gradients_flat", ())] if of_3 is None else [of_3]


def buckets(optimizer: Any) -> list[Tensor]:
    """For gradients on their way to other ranks: nothing between two steps."""
    filled = getattr(optimizer, "ipg_buckets", {}).values()
    return list(_tensors([getattr(bucket, "buffer", None) for bucket in filled], set()))


def _masters(optimizer: Any) -> tuple[list[Tensor], Mapping[Tensor, Mapping[str, Any]]]:
    """And Adam's state of them. Under ZeRO-3 a group has its own only while they are updated."""
    groups = [p for group in optimizer.param_groups for p in group["params"]]
    of_3 = getattr(optimizer, "fp32_partitioned_groups_flat", ())
    state = getattr(optimizer, "optimizer", optimizer).state
    return [*groups, *of_3, *state], state


def optimizer_state(module: nn.Module, optimizer: Any) -> list[Tensor]:
    """Master weights and moments: what an update needs, and no gradient."""
    masters, state = _masters(optimizer)
    moments = [m for of in state.values() for m in of.values() if isinstance(m, Tensor)]
    weights = set(map(_storage, weights_of(module)))
    return [t.data for t in (*masters, *moments) if _storage(t) not in weights]


def moments_to_come(optimizer: Any, device: torch.device) -> int:
    """Bytes that the next update takes of `device` for moments of which there are none yet."""
    masters, state = _masters(optimizer)
    new = {id(m): 8 * m.numel() for m in masters if m.device == device}
    return sum(new.values()) - sum(new.get(id(m), 0) for m in state)


def other_state(module: nn.Module, optimizer: Any) -> list[Tensor]:
    """All else that the optimizer of `module` holds, as gradients' shards. It is found by walking
    through whatever DeepSpeed's objects hold."""
    named = (buckets(optimizer), gradient_sums(optimizer), optimizer_state(module, optimizer))
    known = {_storage(t) for part in (weights_of(module), *named) for t in part}
    return [tensor for tensor in _tensors(optimizer, set()) if _storage(tensor) not in known]


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Of parameters the data, and under ZeRO-3 this rank's shards."""
    parameter: Any
    for parameter in module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor.data


def drop_gathered(optimizer: Any) -> None:
    """Under ZeRO-3: free parameters that were gathered ahead of their use."""
    if hasattr(optimizer, "empty_partition_cache"):
        optimizer.empty_partition_cache()


def check_held(module: nn.Module, optimizer: Any, *, stage: int, sums: bool) -> str:
    """Whether the functions above see what they must; `sums`: gradients of bfloat16 add up in an
    optimizer of their own. Weights and master weights that they miss would be lost, or stay."""
    what = _missing(optimizer, "optimizer") if stage > 0 else ""
    if sums:
        what = what or _missing(optimizer, "fp32_groups_gradients_flat")
    elif stage > 0:
        what = what or _missing(optimizer, "ipg_buckets")
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            what = what or _missing(bucket, "buffer")
    if stage == 3:
        names = ("grad_partitions_flat_buffer", "fp32_partitioned_groups_flat")
        what = what or _missing(optimizer, "empty_partition_cache", *names)
        for parameter in module.parameters():
            what = what or _missing(parameter, "ds_tensor")
    if not what:
        found = {
            *map(_storage, weights_of(module)),
            *map(_storage, optimizer_state(module, optimizer)),
            *map(_storage, other_state(module, optimizer)),
        }
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        if not found.issuperset(map(_storage, masters)):
            what = f"{type(optimizer).__name__} keeps master weights where nobody looks"
    return what and found_changed(what, "Nothing of the trainer's is offloaded between its steps")


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an optimizer of DeepSpeed holds, however deep."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
        inside: Iterable[Any] = ()
    elif isinstance(thing, Mapping):
        inside = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        inside = list(thing)
    elif isinstance(thing, torch.optim.Optimizer):
        inside = (thing.param_groups, thing.state)
    elif _of_deepspeed(type(thing)) and not isinstance(thing, nn.Module):
        inside = list(getattr(thing, "__dict__", {}).values())
    else:
        inside = ()
    for part in inside:
        yield from _tensors(part, seen)


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _of_deepspeed(kind: type) -> bool:
    return any(base.__module__.startswith("deepspeed") for base in kind.__mro__)


# Expert parallelism (AutoEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalNames:
    """What transformers calls the parts of a MoE block."""

    router: str
    shared_experts: str
    shared_experts_gate: str
    gate_and_up: str
    down: str


_AUTO_EP = {
    "deepspeed.module_inject.auto_ep_layer": ["AutoEPMoELayer"],
    "deepspeed.module_inject.auto_ep_presets.registry": ["get_preset"],
    "deepspeed.moe.utils": ["split_params_into_shared_and_expert_params"],
    "deepspeed.utils.groups": ["_get_expert_parallel_group"],
}
_PRESET = (
    "router_pattern",
    "shared_experts_pattern",
    "shared_experts_gate_pattern",
    "experts_pattern",
    "expert_w1",
    "expert_w2",
)
WEIGHTS = ("w1", "w2", "w3")
"""AutoEP's names of the gate, down and up projections."""


def check_experts(layers: Iterable[Any] = ()) -> None:
    """Raise `RuntimeError` unless AutoEP is as it is known: its modules and presets, and once it
    has taken over a model, the layers that it made."""
    what = ""
    for module, names in _AUTO_EP.items():
        try:
            what = what or _missing(importlib.import_module(module), *names)
        except ImportError:
            what = what or f"there is no {module}"
    for layer in layers if not what else ():
        what = what or _missing(layer, "model_family", "ep_group", "router", "experts")
        what = what or _missing(layer.experts, *WEIGHTS)
        what = what or _missing(_preset(layer), *_PRESET)
        what = what or _missing(layer.experts.w1, "group_name")
    if what:
        lost = f"Expert parallelism needs it: set trainer.expert_parallel to 1, or install {KNOWN}"
        raise RuntimeError(found_changed(what, lost))


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that AutoEP put in the place of MoE blocks, by name."""
    kind = _auto_ep("AutoEPMoELayer")
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def original_names(layer: Any) -> OriginalNames:
    preset = _preset(layer)
    return OriginalNames(
        router=preset.router_pattern,
        shared_experts=preset.shared_experts_pattern,
        shared_experts_gate=preset.shared_experts_gate_pattern,
        gate_and_up=f"{preset.experts_pattern}.{preset.expert_w1}",
        down=f"{preset.experts_pattern}.{preset.expert_w2}",
    )


def split_experts(
    parameters: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that every rank has, and those of experts, of which each rank has its own."""
    if (split := _auto_ep("split_params_into_shared_and_expert_params")) is None:
        return list(parameters), []  # `check_experts` has refused expert parallelism
    return split(list(parameters))


def ranks_of(layer: Any) -> ProcessGroup | None:
    """Among which an AutoEP layer is spread."""
    return layer.ep_group


def expert_group_name(parameter: Any) -> str:
    """DeepSpeed's name for the ranks among which this expert's layer is spread."""
    return parameter.group_name


def expert_group(parameter: nn.Parameter) -> ProcessGroup:
    return _auto_ep("_get_expert_parallel_group")(expert_group_name(parameter))


def _preset(layer: Any) -> Any:
    return _auto_ep("get_preset")(layer.model_family)


def _auto_ep(wanted: str) -> Any:
    """None where this DeepSpeed has it no more."""
    module = next(module for module, names in _AUTO_EP.items() if wanted in names)
    try:
        return getattr(importlib.import_module(module), wanted, None)
    except ImportError:
        return None
