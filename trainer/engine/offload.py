"""Offload a rank's GPU memory to host memory while an engine or the activations need the space.

As in FSDP, storages are resized to zero and refilled later, so all views of DeepSpeed's flat
buffers stay valid. DeepSpeed's own `offload_states` (0.19.8) supports only ZeRO-2 and no reference
policy.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, UntypedStorage, nn

from keel.configs.schema import Config
from keel.model.load import facts_of
from keel.model.torch_internals import storage_id
from keel.trainer.engine import deepspeed_internals as internals
from keel.trainer.engine.deepspeed_internals import DeepSpeedEngine
from keel.trainer.placement.memory import STEP_PARTS, trainer_memory, update_copy_bytes

MIB, GIB = 2**20, 2**30
_MIN_BYTES = 2**12  # storages with fewer bytes than this stay on the device
BLOCK = 2**28
"""Size in bytes of a block of host memory. Large tensors are split into blocks, because PyTorch
rounds pinned allocations up to a power of two."""
SPARE = 2 * GIB  # bytes of device memory that are kept free in addition to the known need
_TRIES = 3
"""Number of attempts to free enough memory. A single one can fall short, because fragmented memory
stays reserved."""
_SLACK = 1.1
"""Safety factor on the largest activation memory measured so far, because micro-batches differ in
size."""


class _Buffer:
    def __init__(
        self, device: torch.device, content: Literal["changing", "constant", "scratch", "zeros"]
    ) -> None:
        """`content` determines when storages are copied to host memory: `changing` on every
        offload, `constant` only once, `scratch` and `zeros` never."""
        self._device, self._content = device, content
        self._copies: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
        """Host copies, keyed by storage. Copies of constant content are kept after loading."""
        self._offloaded: list[tuple[UntypedStorage, int]] = []

    @property
    def offloaded_bytes(self) -> int:
        return sum(size for _, size in self._offloaded)

    def offload(self, tensors: Iterable[Tensor], enough: float = math.inf) -> float:
        freed: list[tuple[UntypedStorage, int]] = []
        copies: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
        for storage in _on_device(tensors, self._device):
            if enough <= 0:
                break
            freed.append((storage, storage.nbytes()))
            enough -= storage.nbytes()
        for storage, size in freed if self._content in ("changing", "constant") else ():
            if storage_id(storage) not in self._copies:
                pin = self._device.type == "cuda"  # PyTorch caches pinned blocks
                blocks = [
                    torch.empty(min(BLOCK, size - at), dtype=torch.uint8, pin_memory=pin)
                    for at in range(0, size, BLOCK)
                ]
                for block, part in zip(blocks, _bytes(storage).split(BLOCK), strict=True):
                    block.copy_(part, non_blocking=True)
                copies[storage_id(storage)] = storage, blocks
        self._synchronize()
        self._copies |= copies  # only now, since a copy may fail
        for storage, _ in freed:
            storage.resize_(0)
        self._offloaded += freed
        return enough

    def load(self) -> None:
        for storage, size in self._offloaded:
            storage.resize_(size)
            if self._content == "zeros":
                _bytes(storage).zero_()
            elif self._content != "scratch":
                _, blocks = self._copies[storage_id(storage)]
                for block, part in zip(blocks, _bytes(storage).split(BLOCK), strict=True):
                    part.copy_(block, non_blocking=True)
        self._synchronize()
        self._offloaded = []
        if self._content != "constant":
            self._copies = {}  # would keep gradients alive that the next step frees

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class NoOffload:
    """A no-op stand-in for `Offload`, for ranks that don't take turns with an engine."""

    def offload(self, *, weights: bool) -> None: ...
    def load(self, *, state: bool = False) -> None: ...
    def before_gradients(self) -> None: ...
    def before_update(self) -> None: ...
    def mark_crowded(self) -> None: ...


class Offload:
    """Moves a rank's tensors between GPU and host memory ahead of each phase of a step.

    Forward and backward passes need the weights, the reference policy, gradient sums, buckets and
    other DeepSpeed tensors. The update needs the weights, master weights and moments. While an
    engine samples, only as much memory is freed as the engine needs. The reference policy is
    offloaded first, because it never changes and its host copy can be reused.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        references: Sequence[nn.Module],
        device: torch.device,
        config: Config,
    ) -> None:
        self._tensors, module = internals.EngineTensors(engine), cast(Any, engine.module)
        self._references, self._device = nn.ModuleList(references), device
        gpu = device.type == "cuda"
        planned = trainer_memory(config, facts_of(module.model.config), gpu=gpu).parts
        # All sizes are bytes of device memory.
        self._room = _max_resident_bytes(config, device)
        """Maximum memory of this rank while an engine samples. If infinite, only scratch memory is
        offloaded."""
        self._limit = config.run.gpu_gib * GIB or math.inf
        """Maximum memory in use on the GPU, including other processes."""
        self._activations = sum(planned.get(name, 0.0) for name in (*STEP_PARTS, "gathered"))
        """Activation memory of forward and backward passes: the planned size, or the largest
        measured so far."""
        self._update_bytes = update_copy_bytes(config, planned, gpu=gpu)
        self._before = 0
        self._weights = _Buffer(device, "changing")
        self._state = _Buffer(device, "changing")
        self._rest = _Buffer(device, "changing")
        self._frozen = _Buffer(device, "constant")
        self._buckets = _Buffer(device, "scratch")
        self._gradients = _Buffer(device, "zeros")

    def offload(self, *, weights: bool) -> None:
        """Free memory until this rank uses no more than `_max_resident_bytes`. Weights are
        offloaded last, and only if `weights` is set."""
        self._gradients.offload(self._tensors.gradient_sums())
        self._buckets.offload(self._tensors.buckets())
        self._tensors.drop_gathered()
        parts = [
            (self._frozen, [*internals.weights_of(self._references)]),
            (self._rest, self._tensors.other_state()),
            (self._state, self._tensors.optimizer_state()),
            (self._weights, self._tensors.weights()),
        ]
        held = [tensor for _, tensors in parts for tensor in tensors]
        for _ in range(_TRIES):
            excess = self._reserved(held) - self._room
            if excess <= 0:
                return
            for buffer, tensors in parts if weights else parts[:-1]:
                excess = buffer.offload(tensors, excess)
        self._empty_cache()

    def load(self, *, state: bool = False) -> None:
        self._weights.load()
        if state:
            self._state.load()
            self._rest.load()

    def before_gradients(self) -> None:
        """Load everything needed for forward and backward passes. Optimizer state is offloaded if
        it doesn't fit alongside the activations."""
        self._weights.load()
        needed = (self._gradients, self._buckets, self._rest, self._frozen)
        need = SPARE + _SLACK * self._activations + sum(b.offloaded_bytes for b in needed)
        if self._room < math.inf:
            self._state.offload(self._tensors.optimizer_state(), need - self._free())
            self._empty_cache()
        for buffer in needed:
            buffer.load()
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def before_update(self) -> None:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - self._before
            self._activations = max(self._activations, float(peak))
        if self._room == math.inf:
            return
        moments = self._tensors.missing_moment_bytes(self._device)
        need = self._state.offloaded_bytes + moments + self._update_bytes
        if need + SPARE > self._free():
            self._tensors.drop_gathered()
            self._buckets.offload(self._tensors.buckets())
            self._frozen.offload(internals.weights_of(self._references))
        self._empty_cache()  # avoids fragments left by activations
        self._state.load()

    def mark_crowded(self) -> None:
        """From now on, keep all optimizer state offloaded during forward and backward passes."""
        self._activations = math.inf

    def _reserved(self, tensors: Iterable[Tensor]) -> float:
        if self._device.type != "cuda":
            return sum(storage.nbytes() for storage in _on_device(tensors, self._device))
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def _free(self) -> float:
        if self._device.type != "cuda":
            return math.inf
        free, total = torch.cuda.mem_get_info(self._device)
        free -= max(0.0, total - self._limit)
        cached = torch.cuda.memory_reserved(self._device)
        return free + cached - torch.cuda.memory_allocated(self._device)

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _max_resident_bytes(config: Config, device: torch.device) -> float:
    """Return how many bytes a rank can keep on its GPU while an engine samples: 0 on a CPU, and
    infinity if `trainer.offload_while_sampling` is off."""
    if not config.trainer.offload_while_sampling:
        return math.inf
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    gpu = min(total, int(config.run.gpu_gib * GIB) or total)
    others = max(0, others - (total - gpu))  # others may use memory beyond `run.gpu_gib`
    rest = (1 - config.rollout.gpu_memory_utilization) * gpu
    return max(0.0, rest - others - config.trainer.publish_bucket_mib * MIB - SPARE)


def _on_device(tensors: Iterable[Tensor], device: torch.device) -> Iterator[UntypedStorage]:
    seen: set[int] = set()
    for tensor in tensors:
        if tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            new = storage_id(storage) not in seen and storage.nbytes() >= _MIN_BYTES
            if new and storage.resizable():
                seen.add(storage_id(storage))
                yield storage


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
