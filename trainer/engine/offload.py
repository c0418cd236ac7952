"""What a rank holds on its GPU, offloaded to host memory while others need the room: an engine that
samples (`rollout.time_share`), or activations.

Storages are emptied and filled again, as FSDP does with the parameters that it frees, so that all
tensors that look into them stay what they are: DeepSpeed's flat buffers have many views. Its own
`offload_states` (0.19.8) serves ZeRO-2 alone: the optimizer of bfloat16 under ZeRO-1 has no such
method, ZeRO-3's asserts that Adam is DeepSpeed's FusedAdam, and none knows the reference policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn

from keel.configs.schema import Config
from keel.model.load import facts_of
from keel.model.torch_internals import storage_id
from keel.trainer.engine.deepspeed_internals import (
    KNOWN,
    DeepSpeedEngine,
    buckets,
    check_held,
    drop_gathered,
    gradient_sums,
    moments_to_come,
    optimizer_state,
    other_state,
    weights_of,
)
from keel.trainer.placement.memory import STEP_PARTS, trainer_memory, update_copy_bytes

MIB, GIB = 2**20, 2**30
LEAST = 2**12
"""Bytes; what is smaller stays."""
BLOCK = 2**28
"""Bytes of host memory at a time: of pinned memory PyTorch takes the next power of two."""
SPARE = 2 * GIB
"""Bytes that stay free of a device beside what is known to be needed."""
TRIES = 3
"""Until enough is given back: pieces of memory may be in use in part."""
MORE = 1.1
"""Times what earlier passes took: no micro-batch is like another."""


class Buffer:
    """Storages whose bytes are on the device or in host memory."""

    def __init__(
        self, device: torch.device, content: Literal["changing", "constant", "scratch", "zeros"]
    ) -> None:
        """constant: the bytes are copied to host memory once; scratch and zeros: never."""
        self._device, self._content = device, content
        self._places: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
        """Each storage with its place in host memory, which a constant one keeps."""
        self._away: list[tuple[UntypedStorage, int]] = []

    @property
    def host_bytes(self) -> int:
        return sum(len(block) for _, blocks in self._places.values() for block in blocks)

    @property
    def away(self) -> int:
        """Bytes that are not on the device."""
        return sum(size for _, size in self._away)

    def offload(self, tensors: Iterable[Tensor], enough: float = math.inf) -> float:
        """Those of the storages behind `tensors` that are on the device, until `enough` bytes are
        free. Returns what is missing of that."""
        freed: list[tuple[UntypedStorage, int]] = []
        places: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
        for storage in on_device(tensors, self._device):
            if enough <= 0:
                break
            freed.append((storage, storage.nbytes()))
            enough -= storage.nbytes()
        for storage, size in freed if self._content in ("changing", "constant") else ():
            if storage_id(storage) not in self._places:  # of constant ones
                pin = self._device.type == "cuda"  # PyTorch keeps such blocks for the next time
                blocks = [
                    torch.empty(min(BLOCK, size - at), dtype=torch.uint8, pin_memory=pin)
                    for at in range(0, size, BLOCK)
                ]
                for block, part in zip(blocks, _bytes(storage).split(BLOCK), strict=True):
                    block.copy_(part, non_blocking=True)
                places[storage_id(storage)] = storage, blocks
        self._synchronize()
        self._places |= places  # only now: a copy that failed must not be taken for one
        for storage, _ in freed:
            storage.resize_(0)
        self._away += freed
        return enough

    def load(self) -> None:
        """Back to the device."""
        for storage, size in self._away:
            storage.resize_(size)
            if self._content == "zeros":
                _bytes(storage).zero_()
            elif self._content != "scratch":
                _, blocks = self._places[storage_id(storage)]
                for block, part in zip(blocks, _bytes(storage).split(BLOCK), strict=True):
                    part.copy_(block, non_blocking=True)
        self._synchronize()
        self._away = []
        if self._content != "constant":
            self._places = {}  # or it would hold gradients that the next step lets go of

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class NoOffload:
    """Of a rank without an engine on its GPU: all stays where it is."""

    host_bytes = 0

    def offload(self, *, weights: bool) -> None: ...
    def load(self, *, state: bool = False) -> None: ...
    def before_gradients(self) -> None: ...
    def before_update(self) -> None: ...
    def crowded(self) -> None: ...


class Offload:
    """Of one rank, what it needs at different times.

    - Weights: always, but not while an engine samples.
    - For gradients: the reference policy, their sums, buckets, and whatever else DeepSpeed holds.
    - For the update: master weights and moments, the optimizer's state. What is away of it is
      loaded when the gradients are complete and activations are gone.

    While an engine samples, as much waits in host memory as the engine has no room for: the
    reference first, which is there already, then that whatever else, the optimizer's state, and
    weights at last.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        reference: nn.Module | None,
        device: torch.device,
        *,
        room: float,
        limit: float = math.inf,
        activations: float = math.inf,
        copied: float = 0.0,
    ) -> None:
        """Bytes of the device. room: that may stay while an engine samples; infinite: all that a
        step does not need for itself alone (`trainer.offload_while_sampling` is false). limit: that
        may be in use. activations: that forward and backward passes take, as planned; copied: that
        an update takes beside the optimizer's state."""
        self._module: Any = engine.module
        self._optimizer: Any = engine.optimizer
        self._reference, self._device, self._room, self._limit = reference, device, room, limit
        self._weights = Buffer(device, "changing")
        self._state = Buffer(device, "changing")
        self._rest = Buffer(device, "changing")
        self._frozen = Buffer(device, "constant")
        self._buckets = Buffer(device, "scratch")
        self._gradients = Buffer(device, "zeros")
        self._activations, self._copied, self._before = activations, copied, 0

    @property
    def host_bytes(self) -> int:
        """Host memory that it holds."""
        held = (self._weights, self._state, self._rest, self._frozen)
        return sum(buffer.host_bytes for buffer in held)

    def offload(self, *, weights: bool) -> None:
        """Free the device of all but `room`; of weights only if said."""
        self._gradients.offload(gradient_sums(self._optimizer))
        self._buckets.offload(buckets(self._optimizer))
        drop_gathered(self._optimizer)
        parts = [
            (self._frozen, self._of_reference()),
            (self._rest, other_state(self._module, self._optimizer)),
            (self._state, self._of_optimizer()),
            (self._weights, [*weights_of(self._module)]),
        ]
        held = [tensor for _, tensors in parts for tensor in tensors]
        for _ in range(TRIES):
            excess = self._held(held) - self._room
            if excess <= 0:
                return
            for buffer, tensors in parts if weights else parts[:-1]:
                excess = buffer.offload(tensors, excess)
        self._empty_cache()

    def load(self, *, state: bool = False) -> None:
        """The weights, and what else there is to save."""
        self._weights.load()
        if state:
            self._state.load()
            self._rest.load()

    def before_gradients(self) -> None:
        """Load what forward and backward passes need, and offload of the optimizer's state what
        they have no room beside: as planned, or by the most that they took so far."""
        self._weights.load()
        back = (self._gradients, self._buckets, self._rest, self._frozen)
        need = SPARE + MORE * self._activations + sum(buffer.away for buffer in back)
        if self._room < math.inf:
            self._state.offload(self._of_optimizer(), need - self._free())
            self._empty_cache()
        for buffer in back:
            buffer.load()
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def before_update(self) -> None:
        """Load the optimizer's state; gradients are complete. The reference policy makes way where
        both do not fit."""
        if self._device.type == "cuda":
            took = torch.cuda.max_memory_allocated(self._device) - self._before
            self._activations = max(self._activations, float(took))
        if self._room == math.inf:
            return
        need = self._state.away + moments_to_come(self._optimizer, self._device) + self._copied
        if need + SPARE > self._free():
            drop_gathered(self._optimizer)
            self._buckets.offload(buckets(self._optimizer))
            self._frozen.offload(self._of_reference())
        self._empty_cache()  # the state gets pieces of its own, not what activations had in part
        self._state.load()

    def crowded(self) -> None:
        """Memory ran out: all of the optimizer's state makes way from now on."""
        self._activations = math.inf

    def _of_optimizer(self) -> list[Tensor]:
        return optimizer_state(self._module, self._optimizer)

    def _of_reference(self) -> list[Tensor]:
        return [*weights_of(self._reference)] if self._reference is not None else []

    def _held(self, tensors: Iterable[Tensor]) -> float:
        """Bytes of the device that are PyTorch's: of `tensors`, and what it cannot give back."""
        if self._device.type != "cuda":
            return sum(storage.nbytes() for storage in on_device(tensors, self._device))
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def _free(self) -> float:
        """Bytes of the device that PyTorch could give out."""
        if self._device.type != "cuda":
            return math.inf
        free, whole = torch.cuda.mem_get_info(self._device)
        free -= max(0.0, whole - self._limit)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + kept

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def make_offload(
    engine: DeepSpeedEngine,
    reference: nn.Module | None,
    device: torch.device,
    config: Config,
    *,
    stage: int,
    sums: bool,
) -> tuple[Offload | NoOffload, str]:
    """Nothing is offloaded where no engine sleeps (`rollout.time_share`), or if DeepSpeed has
    changed so
    that its state would not be found: then with a line that says so. `stage` and `sums`: see
    `check_held`.

    Raises `ValueError` if an engine could not share the GPU with what then stays on it.
    """
    if not config.rollout.time_share:
        return NoOffload(), ""
    module: Any = engine.module
    note = check_held(module, engine.optimizer, stage=stage, sums=sums)
    gpu = device.type == "cuda"
    planned = trainer_memory(config, facts_of(module.model.config), gpu=gpu)
    limit = config.run.gpu_gib * GIB or math.inf
    if not note:
        of = {
            "room": room(config, device),
            "limit": limit,
            "activations": sum(planned.parts.get(name, 0.0) for name in (*STEP_PARTS, "gathered")),
            "copied": update_copy_bytes(config, planned.parts, gpu=gpu),
        }
        return Offload(engine, reference, device, **of), ""
    if gpu:
        _, whole = torch.cuda.mem_get_info(device)
        count = sum(weight.numel() for weight in weights_of(module))
        shards = config.trainer.ranks if stage in (1, 2) else 1
        # From the first step.
        moments = 0 if config.trainer.offload_optimizer else 8 * count / shards
        held = torch.cuda.memory_allocated(device) + moments
        share = config.rollout.gpu_memory_utilization
        sizes = {"gpu": min(whole, limit), "needs": planned.total}
        check_room(note, stays=held, engine_share=share, **sizes)
    return NoOffload(), note


def check_room(
    note: str, *, stays: float, gpu: float, engine_share: float, needs: float = 0.0
) -> None:
    """Raise `ValueError` if engine and trainer do not fit a GPU together where nothing can be
    offloaded. `note`: why not; `stays`: bytes of the trainer's between two steps, `needs`: in a
    step; `gpu`: its bytes; `engine_share`: `rollout.gpu_memory_utilization`."""
    if needs > gpu:
        raise ValueError(
            f"{note}. A step needs {needs / GIB:.1f} GiB at once then, and a GPU has "
            f"{gpu / GIB:.1f} GiB: install DeepSpeed {KNOWN}, or lower trainer.micro_batch_tokens"
        )
    if stays > (1 - engine_share) * gpu:
        most = max(0.0, 1 - stays / gpu)
        raise ValueError(
            f"{note}. {stays / GIB:.1f} GiB of a GPU's {gpu / GIB:.1f} GiB stay with it then, and "
            f"rollout.gpu_memory_utilization = {engine_share:g}: set it to at most "
            f"{most:.2f}, or install DeepSpeed {KNOWN}"
        )


def room(config: Config, device: torch.device) -> float:
    """Bytes of a rank that may stay on its GPU while an engine has its share there; a CPU is taken
    for a GPU without any. The engine sleeps now, and what it has all the same counts twice."""
    if not config.trainer.offload_while_sampling:
        return math.inf
    if device.type != "cuda":
        return 0.0
    free, whole = torch.cuda.mem_get_info(device)
    others = whole - free - torch.cuda.memory_reserved(device)
    gpu = min(whole, int(config.run.gpu_gib * GIB) or whole)
    others = max(0, others - (whole - gpu))  # they may have what the run leaves
    rest = (1 - config.rollout.gpu_memory_utilization) * gpu
    return max(0.0, rest - others - config.trainer.publish_bucket_mib * MIB - SPARE)


def on_device(tensors: Iterable[Tensor], device: torch.device) -> Iterator[UntypedStorage]:
    """Storages of tensors, each once, that have bytes there and may be emptied."""
    seen: set[int] = set()
    for tensor in tensors:
        if tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            new = storage_id(storage) not in seen and storage.nbytes() >= LEAST
            if new and storage.resizable():
                seen.add(storage_id(storage))
                yield storage


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
