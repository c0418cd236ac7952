"""What a rank holds on its GPU, offloaded to host memory while an engine has the GPU
(`rollout.sleep`).

Storages are emptied and filled again, as FSDP does with the parameters that it frees, so that all
tensors that look into them stay what they are: DeepSpeed's flat buffers have many views. Its own
`offload_states` (0.19.8) serves ZeRO-2 alone: the optimizer of bfloat16 under ZeRO-1 has no such
method, ZeRO-3's asserts that Adam is DeepSpeed's FusedAdam, and none knows the reference policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn

from keel.configs.schema import Config
from keel.model.torch_internals import storage_id
from keel.trainer.engine.deepspeed_internals import (
    KNOWN,
    DeepSpeedEngine,
    buckets,
    check_held,
    drop_gathered,
    gradient_sums,
    optimizer_state,
    weights_of,
)

GIB = 2**30
LEAST = 2**12
"""Bytes; what is smaller stays."""


class Buffer:
    """Storages whose bytes are on the device or in host memory."""

    def __init__(
        self, device: torch.device, content: Literal["changing", "constant", "scratch", "zeros"]
    ) -> None:
        """constant: the bytes are copied to host memory once; scratch and zeros: never."""
        self._device, self._content = device, content
        self._places: dict[int, tuple[UntypedStorage, Tensor]] = {}
        """Each storage with its place in host memory, which a constant one keeps."""
        self._sizes: list[tuple[UntypedStorage, int]] = []
        self.away = False

    @property
    def host_bytes(self) -> int:
        return sum(len(place) for _, place in self._places.values())

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Those of the storages behind `tensors` that are on the device."""
        assert not self.away
        self._sizes = [(storage, storage.nbytes()) for storage in self._storages(tensors)]
        for storage, size in self._sizes if self._content in ("changing", "constant") else ():
            if storage_id(storage) not in self._places:
                pin = self._device.type == "cuda"  # PyTorch keeps such blocks for the next time
                place = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
                place.copy_(_bytes(storage), non_blocking=True)
                self._places[storage_id(storage)] = storage, place
        self._synchronize()
        for storage, _ in self._sizes:
            storage.resize_(0)
        self.away = True

    def load(self) -> None:
        """Back to the device."""
        for storage, size in self._sizes:
            storage.resize_(size)
            if self._content == "zeros":
                _bytes(storage).zero_()
        for storage, place in self._places.values():
            _bytes(storage).copy_(place, non_blocking=True)
        self._synchronize()
        self._sizes = []
        if self._content != "constant":
            self._places = {}  # or it would hold gradients that the next step lets go of
        self.away = False

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
        seen: set[int] = set()
        for tensor in tensors:
            if tensor.device == self._device and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                new = storage_id(storage) not in seen and storage.nbytes() >= LEAST
                if new and storage.resizable():
                    seen.add(storage_id(storage))
                    yield storage

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Offload:
    """Of one rank: its weights in the compute dtype in one buffer, all else in others."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        reference: nn.Module | None,
        device: torch.device,
        *,
        stays: bool = False,
    ) -> None:
        """stays: only gives back what a step needs for itself (`trainer.offload_while_sampling` is
        false)."""
        self._module: Any = engine.module
        self._optimizer: Any = engine.optimizer
        self._reference, self._device = reference, device
        self._stays = stays
        self._weights = Buffer(device, "changing")
        self._state = Buffer(device, "changing")
        self._buckets = Buffer(device, "scratch")
        self._gradients = Buffer(device, "zeros")
        self._frozen = Buffer(device, "constant")

    @property
    def host_bytes(self) -> int:
        """Host memory that it holds."""
        return sum(buffer.host_bytes for buffer in (self._weights, self._state, self._frozen))

    def offload(self, *, weights: bool) -> None:
        """Free the device of everything; of the weights only if said."""
        if not self._gradients.away:
            self._gradients.offload(gradient_sums(self._optimizer))
        if not self._stays and not self._state.away:
            drop_gathered(self._optimizer)
            self._state.offload(optimizer_state(self._module, self._optimizer))
            self._buckets.offload(buckets(self._optimizer))
            if self._reference is not None:
                self._frozen.offload(weights_of(self._reference))
        if weights and not self._stays and not self._weights.away:
            self._weights.offload(weights_of(self._module))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def load(self, *, rest: bool = True) -> None:
        """Bring everything back; `rest`: not the weights alone."""
        others = (self._gradients, self._state, self._buckets, self._frozen) if rest else ()
        for buffer in (self._weights, *others):
            if buffer.away:
                buffer.load()


def make_offload(
    engine: DeepSpeedEngine,
    reference: nn.Module | None,
    device: torch.device,
    config: Config,
    *,
    stage: int,
    sums: bool,
) -> tuple[Offload | None, str]:
    """None where no engine sleeps (`rollout.sleep`), or if DeepSpeed has changed so that its state
    would not be found: then with a line that says so. `stage` and `sums`: see `check_held`.

    Raises `ValueError` if an engine could not share the GPU with what then stays on it.
    """
    if not config.rollout.sleep:
        return None, ""
    module: Any = engine.module
    note = check_held(module, engine.optimizer, stage=stage, sums=sums)
    if not note:
        stays = not config.trainer.offload_while_sampling
        return Offload(engine, reference, device, stays=stays), ""
    if device.type == "cuda":
        count = sum(weight.numel() for weight in weights_of(module))
        shards = config.trainer.ranks if stage in (1, 2) else 1
        # From the first step.
        moments = 0 if config.trainer.offload_optimizer else 8 * count / shards
        _, gpu = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device) + moments
        gpu = min(gpu, int(config.run.gpu_gib * GIB) or gpu)
        share = config.rollout.gpu_memory_utilization
        check_room(note, stays=held, gpu=gpu, engine_share=share)
    return None, note


def check_room(note: str, *, stays: float, gpu: float, engine_share: float) -> None:
    """Raise `ValueError` if engine and trainer do not fit a GPU together where nothing can be
    offloaded. `note`: why not; `stays`: bytes of the trainer's between two steps; `gpu`: its bytes;
    `engine_share`: `rollout.gpu_memory_utilization`."""
    if stays > (1 - engine_share) * gpu:
        most = max(0.0, 1 - stays / gpu)
        raise ValueError(
            f"{note}. {stays / GIB:.1f} GiB of a GPU's {gpu / GIB:.1f} GiB stay with it then, and "
            f"rollout.gpu_memory_utilization = {engine_share:g}: set it to at most "
            f"{most:.2f}, or install DeepSpeed {KNOWN}"
        )


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
