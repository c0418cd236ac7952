"""What a rank holds on its GPU, put aside in host memory while an engine has the GPU
(`rollout.sleep`).

Storages are emptied and filled again, as FSDP does with the parameters that it frees, so that all
tensors that look into them stay what they are: DeepSpeed's flat buffers have many views, and its
own `offload_states` knows neither the optimizer of bfloat16 under ZeRO-1, nor under ZeRO-3 an
optimizer that is not its own, nor a reference policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, UntypedStorage, nn

LEAST = 2**12
"""Bytes; what is smaller stays."""


class Shelf:
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

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Those of the storages behind `tensors` that are on the device."""
        assert not self.away
        self._sizes = [(storage, storage.nbytes()) for storage in self._storages(tensors)]
        for storage, size in self._sizes if self._content in ("changing", "constant") else ():
            if storage._cdata not in self._places:
                pin = self._device.type == "cuda"  # PyTorch keeps such blocks for the next time
                place = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
                place.copy_(_bytes(storage), non_blocking=True)
                self._places[storage._cdata] = storage, place
        self._synchronize()
        for storage, _ in self._sizes:
            storage.resize_(0)
        self.away = True

    def take(self) -> None:
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
                new = storage._cdata not in seen and storage.nbytes() >= LEAST
                if new and storage.resizable():
                    seen.add(storage._cdata)
                    yield storage

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Parking:
    """Of one rank: its weights in the compute dtype on one shelf, all else on others."""

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
        self._engine, self._reference, self._device = engine, reference, device
        self._stays = stays
        self._weights = Shelf(device, "changing")
        self._state = Shelf(device, "changing")
        self._buckets = Shelf(device, "scratch")
        self._gradients = Shelf(device, "zeros")
        self._frozen = Shelf(device, "constant")

    @property
    def host_bytes(self) -> int:
        """Host memory that it holds."""
        return sum(shelf.host_bytes for shelf in (self._weights, self._state, self._frozen))

    def park(self, *, weights: bool) -> None:
        """Put everything aside; the weights only if said."""
        module: Any = self._engine.module
        optimizer: Any = self._engine.optimizer
        if not self._gradients.away:
            # The float32 sums of bfloat16 under ZeRO-1: DeepSpeed has cleared them after the step.
            self._gradients.put(getattr(optimizer, "fp32_groups_gradients_flat", ()))
        if not self._stays and not self._state.away:
            if hasattr(optimizer, "empty_partition_cache"):
                optimizer.empty_partition_cache()  # ZeRO-3: what it has gathered ahead
            # Gradients on their way to other ranks: nothing between two steps.
            filled = getattr(optimizer, "ipg_buckets", {}).values()
            buckets = list(_tensors([getattr(bucket, "buffer", None) for bucket in filled], set()))
            known = {_key(tensor) for tensor in (*_parameters(module), *buckets)}
            self._state.put(t for t in _tensors(optimizer, set()) if _key(t) not in known)
            self._buckets.put(buckets)
            if self._reference is not None:
                self._frozen.put(_parameters(self._reference))
        if weights and not self._stays and not self._weights.away:
            self._weights.put(_parameters(module))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def unpark(self, *, rest: bool = True) -> None:
        """Take everything back; `rest`: not the weights alone."""
        others = (self._gradients, self._state, self._buckets, self._frozen) if rest else ()
        for shelf in (self._weights, *others):
            if shelf.away:
                shelf.take()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _parameters(module: nn.Module) -> Iterator[Tensor]:
    parameter: Any
    for parameter in module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):  # ZeRO-3: this rank's shard
            yield parameter.ds_tensor.data


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


def _of_deepspeed(kind: type) -> bool:
    return any(base.__module__.startswith("deepspeed") for base in kind.__mro__)
