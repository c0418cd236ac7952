"""What a rank holds on its GPU, put aside in host memory while an engine has the GPU
(`rollout.sleep`).

DeepSpeed moves what it has made of the model, but under ZeRO-3 neither master weights nor the state
of an optimizer that is not its own; and it knows nothing of the reference policy.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
from torch import Tensor, nn

MASTER = (State.hp_params, State.optim_states)


class Shelf:
    """Tensors whose numbers are on the device or in host memory; they stay the same objects."""

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *, constant: bool
    ) -> None:
        """`tensors` is asked each time, and those that are on `device` then are meant. `constant`:
        they are always the same, and their numbers never change."""
        self._find, self._device, self._constant = tensors, device, constant
        self._places: list[tuple[Tensor, Tensor]] = []
        """Each with its place in host memory."""
        self._away = False

    def put(self) -> None:
        if self._away:
            return
        self._away = True
        if not (self._constant and self._places):
            pin = self._device.type == "cuda"
            self._places = [
                (tensor, torch.empty_like(tensor.data, device="cpu", pin_memory=pin))
                for tensor in self._find()
                if tensor.device == self._device
            ]
            for tensor, place in self._places:
                place.copy_(tensor.data)
        for tensor, place in self._places:
            tensor.data = place

    def take(self) -> None:
        if not self._away:
            return
        self._away = False
        for tensor, place in self._places:
            tensor.data = place.to(self._device, copy=True)
        if not self._constant:
            self._places = []


class Parking:
    """Of one rank."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        reference: nn.Module | None,
        device: torch.device,
        *,
        stage: int,
    ) -> None:
        self._engine, self._pin = engine, device.type == "cuda"
        self._by_deepspeed = [state for state in State if stage < 3 or state not in MASTER]
        self._shelves: list[Shelf] = []
        if stage == 3:
            self._shelves.append(Shelf(self._master, device, constant=False))
        if reference is not None:
            self._shelves.append(Shelf(lambda: _numbers(reference), device, constant=True))
        self.parked = False
        """Whether the weights, and with them everything, are in host memory."""
        # DeepSpeed collects garbage whenever it moves something. What a process has by now stays.
        gc.collect()
        gc.freeze()

    def park(self, *, weights: bool = True) -> None:
        """Put everything aside, or everything but the weights (in the compute dtype)."""
        for shelf in self._shelves:
            shelf.put()
        states = [state for state in self._by_deepspeed if weights or state != State.lp_params]
        self._engine.offload_states(include=states, pin_memory=self._pin)
        self.parked = weights

    def unpark(self) -> None:
        """Back to the device with all that was put aside."""
        self._engine.reload_states()
        for shelf in self._shelves:
            shelf.take()
        self.parked = False

    def _master(self) -> Iterable[Tensor]:
        optimizer: Any = self._engine.optimizer  # DeepSpeed's, around PyTorch's
        yield from optimizer.fp32_partitioned_groups_flat
        for state in optimizer.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _numbers(module: nn.Module) -> Iterable[Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        yield getattr(tensor, "ds_tensor", tensor)  # ZeRO-3: this rank's shard
