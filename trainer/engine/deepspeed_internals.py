"""All code that relies on undocumented parts of DeepSpeed. These can change with any release, so
`check_libraries` requires one exact version."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import get_total_norm

from keel.model.imports import not_found
from keel.model.torch_internals import position_of_index, storage_id

# DeepSpeed's autotuner would load MLflow, a tenth of a rank's imports.
with not_found("mlflow"):
    import deepspeed
    from deepspeed import DeepSpeedEngine as DeepSpeedEngine
    from deepspeed.runtime.utils import combine_grad_norm_groups

VERSION = "0.19.8"


def check_libraries() -> None:
    """Raise RuntimeError unless PyTorch and DeepSpeed are versions that Keel supports. Also
    disables DeepSpeed's all-reduce kernel for CPUs, which would take a minute to compile."""
    position_of_index()  # before the first weight update needs it
    if deepspeed.__version__ != VERSION:
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} is installed, but Keel needs {VERSION}. Run "
            f"pip install deepspeed=={VERSION}"
        )
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # type: ignore[attr-defined]


def whole_shape(parameter: nn.Parameter) -> Sequence[int]:
    """Return a parameter's full shape, even if ZeRO-3 has sharded it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def hpz_group() -> ProcessGroup | None:
    """Return the ranks that share a second copy of the parameters. `zero.Init` creates the group
    for the first model and, unless it is given, refuses to create it again for another one."""
    from deepspeed.utils.groups import _get_zero_param_intra_parallel_group  # noqa: PLC0415

    group: Any = _get_zero_param_intra_parallel_group()
    return group


def trainable(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


# float32 sums of bfloat16 gradients

_KERNEL_ELEMENTS = 2**16
"""Minimum tensor size for our kernel. PyTorch's own kernel launches faster, which matters for
smaller tensors."""


def sum_in_one_pass(optimizer: Any) -> None:
    """Patch DeepSpeed's bfloat16 optimizer to add each gradient directly to its float32 sum. This
    moves 10 bytes per parameter instead of 18, and the results are bit-identical."""
    base: Any = type(optimizer)

    class SummingOptimizer(base):
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
            if total.is_cuda and total.numel() >= _KERNEL_ELEMENTS:
                from keel.trainer.engine.grad_kernels import add  # noqa: PLC0415  (needs Triton)

                add(total, gradient)
            else:
                total.add_(gradient.view(total.shape))
            lp._hp_grad = total
            self.fp32_groups_has_gradients[group_idx][param_idx] = True

    optimizer.__class__ = SummingOptimizer


# Clipping two parts of the gradient by their own norms


def clip_apart(optimizer: Any, apart: Set[nn.Parameter]) -> None:
    """Patch a ZeRO optimizer to clip the gradients of `apart` by their own norm. These parameters
    must be in parameter groups of their own. After a step, DeepSpeed's norm covers only the other
    gradients, and `optimizer.apart_norm` is the norm of `apart`. If either is not finite, the step
    is skipped."""
    base: Any = type(optimizer)

    class WholeGradients(base):
        """DeepSpeed's BF16_Optimizer, in which each rank holds the full gradients."""

        def step(self, closure: Any = None) -> None:
            groups = [i for i, group in enumerate(self.bf16_groups) if group[0] in apart]
            gradients: list[Tensor] = [self.fp32_groups_gradients_flat[i] for i in groups]
            self.apart_norm = float(get_total_norm(gradients))
            if math.isfinite(self.apart_norm):
                factor = self.clip_grad / (self.apart_norm + 1e-6) if self.clip_grad else 1.0
                for i, gradient in zip(groups, gradients, strict=True):
                    gradient.mul_(min(1.0, factor))
                    # Hides them from DeepSpeed's norm and clipping, but not from Adam.
                    self.fp32_groups_has_gradients[i] = [False] * len(self.bf16_groups[i])
            super().step(closure)

    class Shards(base):
        """DeepSpeed's optimizers for ZeRO-1 to 3, which compute a norm for each parameter group and
        then clip each group."""

        def step(self, closure: Any = None) -> None:
            self.norms: list[Tensor] = []
            self.apart_norm = math.inf
            super().step(closure)
            if not self.overflow:
                others, own = (self.norm_of(kind) / self.loss_scale for kind in (False, True))
                self._global_grad_norm, self.apart_norm = others, float(own)

        def norm_of(self, kind: bool) -> Tensor:
            groups: list[Any] = getattr(self, "fp16_groups", None) or self.bit16_groups
            pairs = zip(groups, self.norms, strict=True)
            return combine_grad_norm_groups([n for g, n in pairs if (g[0] in apart) == kind])

        def get_grad_norm_direct(self, *arguments: Any, **options: Any) -> Tensor:
            self.norms.append(super().get_grad_norm_direct(*arguments, **options))
            return self.norms[-1]

        def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> Tensor:
            self.norms.append(super().complete_grad_norm_calculation_for_cpu_offload(params))
            return self.norms[-1]

        def _average_expert_grad_norms(self, norm_groups: list[Tensor]) -> None:
            super()._average_expert_grad_norms(norm_groups)
            self.norms = [*norm_groups]

        def unscale_and_clip_grads(self, which: Any, total_norm: Tensor) -> None:
            if isinstance(which, int):  # ZeRO-3: the number of the group
                first = self.fp16_groups[which][0]
            else:
                masters = zip(self.bit16_groups, self.single_partition_of_fp32_groups, strict=True)
                first = next(group[0] for group, master in masters if master.grad is which[0])
            super().unscale_and_clip_grads(which, self.norm_of(first in apart))

    optimizer.__class__ = WholeGradients if hasattr(optimizer, "bf16_groups") else Shards


# Memory held between two steps


class EngineTensors:
    """The tensors that a DeepSpeed engine holds between two steps."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._module: Any = engine.module
        self._optimizer: Any = engine.optimizer

    def weights(self) -> list[Tensor]:
        return list(weights_of(self._module))

    def gradient_sums(self) -> list[Tensor]:
        """Return the float32 gradient buffers, which are free between an optimizer update and the
        next backward pass."""
        zero_3: Tensor | None = getattr(self._optimizer, "grad_partitions_flat_buffer", None)
        if zero_3 is not None:
            return [zero_3]
        return [*getattr(self._optimizer, "fp32_groups_gradients_flat", ())]

    def buckets(self) -> list[Tensor]:
        ipg_buckets = getattr(self._optimizer, "ipg_buckets", {}).values()
        return list(_tensors([getattr(bucket, "buffer", None) for bucket in ipg_buckets], set()))

    def optimizer_state(self) -> list[Tensor]:
        """Return the master weights and moments, which are needed only during an update."""
        masters, state = self._masters()
        moments = [m for slots in state.values() for m in slots.values() if isinstance(m, Tensor)]
        weights = set(map(_storage, self.weights()))
        return [t.data for t in (*masters, *moments) if _storage(t) not in weights]

    def missing_moment_bytes(self, device: torch.device) -> int:
        """Return the number of bytes that the next update will allocate on `device` for moments."""
        masters, state = self._masters()
        sizes = {id(m): 8 * m.numel() for m in masters if m.device == device}
        return sum(sizes.values()) - sum(sizes.get(id(m), 0) for m in state)

    def other_state(self) -> list[Tensor]:
        """Return every tensor reachable from the optimizer, including gradient shards but excluding
        weights, buckets, gradient sums and optimizer state."""
        named = (self.weights(), self.buckets(), self.gradient_sums(), self.optimizer_state())
        listed = {_storage(tensor) for part in named for tensor in part}
        return [t for t in _tensors(self._optimizer, set()) if _storage(t) not in listed]

    def drop_gathered(self) -> None:
        if hasattr(self._optimizer, "empty_partition_cache"):
            self._optimizer.empty_partition_cache()

    def _masters(self) -> tuple[list[Tensor], Mapping[Tensor, Mapping[str, Any]]]:
        """Return all tensors that can hold master weights, plus the optimizer's state. Under
        ZeRO-3, the parameter groups contain the master weights only during an update."""
        optimizer = self._optimizer
        groups = [p for group in optimizer.param_groups for p in group["params"]]
        zero_3 = getattr(optimizer, "fp32_partitioned_groups_flat", ())
        state = getattr(optimizer, "optimizer", optimizer).state
        return [*groups, *zero_3, *state], state


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the data of all parameters and, under ZeRO-3, of this rank's shards too."""
    for parameter in module.parameters():
        yield parameter.data
        for name in ("ds_tensor", "ds_secondary_tensor"):
            if (shard := getattr(parameter, name, None)) is not None:
                yield shard.data


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    children: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list | tuple | set):
        children = list(value)
    elif isinstance(value, torch.optim.Optimizer):
        children = (value.param_groups, value.state)
    elif not isinstance(value, nn.Module) and any(
        base.__module__.startswith("deepspeed") for base in type(value).__mro__
    ):
        children = list(getattr(value, "__dict__", {}).values())
    for child in children:
        yield from _tensors(child, seen)


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


# Master weights, for checkpoints


class Part(NamedTuple):
    """The part of a parameter that is stored in a single master weight tensor."""

    name: str
    start: int  # index of the piece's first element in the flattened parameter
    count: int
    offset: int  # index of the piece's first element in the tensor of master weights
    weights: Tensor  # the [count] weights that the model computes with, in the model's dtype


class Master(NamedTuple):
    """A tensor of master weights, which Adam updates as a single parameter."""

    tensor: Tensor
    parts: list[Part]

    @property
    def flat(self) -> Tensor:
        return self.tensor.detach().view(-1)


def master_weights(module: nn.Module, engine: DeepSpeedEngine, *, stage: int) -> list[Master]:
    """Return this rank's master weights. At ZeRO stage 0, these are the parameters themselves."""
    if stage == 0:
        return [
            Master(p, [Part(name, 0, p.numel(), 0, p.detach().view(-1))])
            for name, p in trainable(module)
        ]
    optimizer: Any = engine.optimizer
    tensors: list[Tensor] = (
        optimizer.fp32_partitioned_groups_flat
        if stage == 3
        else [group["params"][0] for group in optimizer.param_groups]
    )
    masters = [Master(tensor, []) for tensor in tensors]
    for name, parameter in trainable(module):
        group, part = (_find_zero_3_slice if stage == 3 else _find_zero_1_slice)(
            name, parameter, optimizer
        )
        if part is not None:
            masters[group].parts.append(part)
    return masters


def _find_zero_1_slice(name: str, parameter: Any, _: Any) -> tuple[int, Part | None]:
    """Return a parameter's optimizer group and its slice of the master weights under ZeRO-1 or
    2."""
    mapping = parameter._hp_mapping
    if mapping is None:  # in the partition of another rank
        return 0, None
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    weights = parameter.detach().view(-1)[low.start :][: low.numel]
    return mapping.param_group_index, Part(name, low.start, low.numel, high.start, weights)


def _find_zero_3_slice(name: str, parameter: Any, optimizer: Any) -> tuple[int, Part | None]:
    """Return a parameter's optimizer group and its slice of the master weights under ZeRO-3."""
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = parameter.ds_zero_partition_rank * size
    count = min(size, parameter.ds_numel - start)  # the last shard is padded
    if count <= 0:
        return group, None
    return group, Part(name, start, count, offset, parameter.ds_tensor.data.view(-1)[:count])


@contextmanager
def edit_master_weights(
    engine: DeepSpeedEngine, masters: list[Master], *, stage: int
) -> Iterator[None]:
    """Return a context for editing master weights. On exit, the model's weights are updated to
    match."""
    optimizer: Any = engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    yield
    if stage == 3:
        for master in masters:
            for part in master.parts:
                part.weights.copy_(master.flat[part.offset :][: part.count])
        optimizer.checkpoint_event_epilogue()
    elif stage > 0:
        optimizer.update_lp_params()


# The loss scale of float16, and skipped steps

_SCALER_STATE = ("cur_scale", "cur_iter", "cur_hysteresis", "last_overflow_iter")


def loss_scale(engine: DeepSpeedEngine) -> dict[str, float]:
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not scaler.dynamic:
        return {}
    return {k: v for k, v in vars(scaler).items() if isinstance(v, int | float)}


def set_loss_scale(engine: DeepSpeedEngine, state: Mapping[str, float]) -> None:
    if loss_scale(engine):
        optimizer: Any = engine.optimizer
        vars(optimizer.loss_scaler).update({k: v for k, v in state.items() if k in _SCALER_STATE})


def grow_loss_scale(engine: DeepSpeedEngine, window: int) -> None:
    """Double the loss scale after every `window` steps without overflow. DeepSpeed itself would do
    this too early, before unscaling that step's gradient."""
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    steady = getattr(scaler, "cur_iter", 0) - getattr(scaler, "last_overflow_iter", 0) - 2
    if steady > 0 and steady % window == 0:
        scaler.cur_scale *= scaler.scale_factor


def discard_gradient_sums(engine: DeepSpeedEngine) -> None:
    """Discard the non-finite gradient sums of a skipped step. Under ZeRO-1 and 2, DeepSpeed keeps
    them if the optimizer is offloaded."""
    if engine.zero_cpu_offload() and engine.zero_optimization_stage() < 3:
        optimizer: Any = engine.optimizer
        optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))


# Expert parallelism (AutoEP)

WEIGHTS = ("w1", "w2", "w3")  # AutoEP's names for the gate, down and up projections


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """Return the model's AutoEP layers, keyed by module name."""
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer  # noqa: PLC0415

    return {name: m for name, m in model.named_modules() if isinstance(m, AutoEPMoELayer)}


def original_names(layer: Any) -> dict[str, str]:
    """Map the names of modules and experts in an AutoEP layer to their names in Transformers, where
    the gate and up projections are fused."""
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset  # noqa: PLC0415

    preset: Any = get_preset(layer.model_family)
    gate, down, up = WEIGHTS
    fused = f"{preset.experts_pattern}.{preset.expert_w1}"
    return {
        "router.gate": preset.router_pattern,
        "router": preset.router_pattern,
        "shared_experts": preset.shared_experts_pattern,
        "shared_experts_gate": preset.shared_experts_gate_pattern,
        f"experts.{gate}": fused,
        f"experts.{up}": fused,
        f"experts.{down}": f"{preset.experts_pattern}.{preset.expert_w2}",
    }


def split_experts(
    parameters: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    from deepspeed.moe.utils import split_params_into_shared_and_expert_params  # noqa: PLC0415

    return split_params_into_shared_and_expert_params(list(parameters))


def layer_group(layer: Any) -> ProcessGroup | None:
    return layer.ep_group


def expert_group_name(parameter: Any) -> str:
    return parameter.group_name


def expert_group(parameter: nn.Parameter) -> ProcessGroup:
    from deepspeed.utils.groups import _get_expert_parallel_group  # noqa: PLC0415

    return _get_expert_parallel_group(expert_group_name(parameter))
