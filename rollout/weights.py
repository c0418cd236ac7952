"""New weights into a running engine, one bucket at a time, wherever its bytes are.

vLLM's layerwise reload puts each layer's tensors aside until the layer is complete, converts them
as at the first load and copies the result into the tensors the kernels (and CUDA graphs) hold.
Calling a model's `load_weights` without it leaves the model half loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from model.channel import Channel, Meeting, gpu_id, open_shared
from model.weights import (
    Bucket,
    Checksum,
    Sent,
    Shared,
    unpack_block,
    unpack_bucket,
)


def moe_runners(model: nn.Module) -> list[Any]:
    """The MoE layers of a vLLM model, in order."""
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    return sorted(runners, key=lambda runner: runner.layer_id)


class WeightsExtension:
    """Methods that vLLM adds to its workers (`worker_extension_cls`); every rank runs them."""

    vllm_config: Any
    model_runner: Any
    rank: int
    """Among the workers of this engine."""
    device: torch.device

    keel_channel: Channel | None = None
    keel_checksum: Checksum

    def keel_moe_layers(self) -> list[int]:
        """Indices of the MoE layers among all layers."""
        return [runner.layer_id for runner in moe_runners(self.model_runner.get_model())]

    def keel_gpu(self) -> str:
        return gpu_id(self.device)

    def keel_join(self, meeting: Meeting, name: str, deadline_s: float) -> None:
        """Open the engine's channel to the rank that sends it weights, in the place of an earlier
        one."""
        if self.keel_channel is not None:
            self.keel_channel.close()
            self.keel_channel = None
        size = 1 + self.vllm_config.parallel_config.world_size
        self.keel_channel = Channel(
            meeting,
            name,
            rank=1 + self.rank,
            size=size,
            device=self.device,
            deadline_s=deadline_s,
        )

    def keel_begin_update(self) -> None:
        self.keel_checksum = Checksum()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    @torch.inference_mode()
    def keel_load_bucket(self, bucket: Bucket) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(self._keel_tensors(bucket))

    def _keel_tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(bucket.data, Sent):
            if self.keel_channel is None:
                raise ConnectionError("the channel for weights has not been opened")
            block = self.keel_channel.receive(bucket.data)
        elif isinstance(bucket.data, Shared):
            block = open_shared(bucket.data, self.device)
        else:
            return unpack_bucket(bucket)
        self.keel_checksum.add(block)
        return unpack_block(bucket.entries, block)

    @torch.inference_mode()
    def keel_finish_update(self, checksum: int | None) -> None:
        """Raises RuntimeError if the bytes that came are not those that were sent."""
        if checksum not in (None, self.keel_checksum.value()):
            raise RuntimeError(
                f"weight update: worker {self.rank} of the engine received other bytes than were "
                "sent"
            )
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)

    def keel_fingerprint(self) -> dict[str, str]:
        """A hash of every parameter as the kernels see it (CPU only)."""
        named = self.model_runner.get_model().named_parameters()
        return {
            name: blake2b(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
            for name, tensor in named
        }
