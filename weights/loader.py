"""The engine's side of a weight update: `WeightsExtension` runs in vLLM's workers, and
`TensorChecklist` in the engine's own process.

New weights are loaded into the running engine one bucket at a time. vLLM's layerwise reload
collects the tensors of each layer, converts them as it did when the model was first loaded, and
copies the result into the tensors that kernels and CUDA graphs use. Calling `load_weights` alone
would leave the model only partly loaded. Later updates repeat the copies of the first one without
vLLM's loader (see `keel.weights.copy_plan`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from keel.model.load import readable_tensors
from keel.model.transformers_internals import unused_tensor_patterns
from keel.weights import vllm_patches  # noqa: F401  changes vLLM when it is imported
from keel.weights.channel import (
    Bucket,
    Channel,
    Checksum,
    Receiver,
    Rendezvous,
    attempt,
    gpu_id,
    unpack_flat,
)
from keel.weights.copy_plan import CopyPlan, LoadTracer

_LOG = logging.getLogger(__name__)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COMPUTED = re.compile(r"\brotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Tensors in old checkpoints that the engine and the trainer compute themselves."""


def moe_runners(model: nn.Module) -> list[Any]:
    """Return the MoE layers of a vLLM model in layer order."""
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    return sorted(runners, key=lambda runner: runner.layer_id)


def _repack_tied_heads(model: nn.Module) -> None:
    """Repack tied output heads for oneDNN. vLLM's CPU build only packs a head if the update has a
    separate tensor for it."""
    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    for head in embeddings:
        packed = isinstance(head, ParallelLMHead) and hasattr(head, "cpu_linear")
        if packed and any(m is not head and m.weight is head.weight for m in embeddings):
            head.quant_method.process_weights_after_loading(head)


class WeightsExtension:
    """Methods that Keel adds to each vLLM worker (`worker_extension_cls`)."""

    vllm_config: Any
    model_runner: Any
    rank: int
    device: torch.device
    distributed_init_method: str

    keel_channel: Channel | None = None
    keel_receiver: Receiver
    keel_checksum: Checksum
    keel_tracer: LoadTracer | None = None
    keel_plan: CopyPlan | None = None
    """Copy plan for later updates, or None if the first update could not be recorded."""
    keel_decided = False

    def keel_prepare(self) -> None:
        """Prepare the worker for weight updates. Deletes the rendezvous file, if any, and gives
        every weight loader a `__name__`, which vLLM's reload requires but a `functools.partial`
        lacks."""
        if (place := self.distributed_init_method).startswith("file://"):
            Path(place.removeprefix("file://")).unlink(missing_ok=True)
        for tensor in self.model_runner.get_model().parameters():
            loader = getattr(tensor, "weight_loader", None)
            if loader is not None and not hasattr(loader, "__name__"):
                loader.__name__ = "weight_loader"

    def keel_moe_layers(self) -> list[int]:
        return [runner.layer_id for runner in moe_runners(self.model_runner.get_model())]

    def keel_gpu(self) -> str:
        return gpu_id(self.device)

    def keel_connect(self, rendezvous: Rendezvous, name: str, timeout_s: float) -> None:
        if self.keel_channel is not None:
            self.keel_channel.close()
            self.keel_channel = None
        self.keel_channel = Channel(
            rendezvous,
            name,
            rank=1 + self.rank,
            size=1 + self.vllm_config.parallel_config.world_size,
            device=self.device,
            timeout_s=timeout_s,
        )

    keel_attempt = attempt

    def keel_begin_update(self, copies: bool = True) -> None:
        """Begin a weight update. If `copies` is set, the first one is recorded in order to build a
        copy plan."""
        self.keel_checksum = Checksum()
        self.keel_receiver = Receiver(self.device, self.keel_channel)
        if self.keel_plan is not None:
            with torch.inference_mode():
                self.keel_plan.begin()
            return
        model = self.model_runner.get_model()
        if self.keel_tracer is None:
            self.keel_tracer = LoadTracer(model, self._keel_deferred_layers() if copies else [])
            if not copies:
                self.keel_tracer.refuse("rollout.copy_weights is false")
            elif self.vllm_config.quant_config is not None:
                self.keel_tracer.refuse("weights are quantized")
        elif not self.keel_decided:
            self.keel_tracer.refuse("an earlier update did not finish")
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    @torch.inference_mode()
    def keel_load_bucket(self, bucket: Bucket) -> None:
        tracer = self.keel_tracer
        assert tracer is not None
        loader_alone = self.keel_plan is None and tracer.refusal != ""
        flat = bucket.data.read(
            self.keel_receiver, to_device=not loader_alone, keep=self.keel_plan is None
        )
        if bucket.data.checked:
            self.keel_checksum.add(flat)
        if self.keel_plan is not None:
            self.keel_plan.load(bucket.entries, flat)
            bucket.data.release()
            return
        watched = nullcontext() if loader_alone else tracer.bucket(bucket.entries, flat)
        with set_current_vllm_config(self.vllm_config), watched:
            self.model_runner.get_model().load_weights(unpack_flat(bucket.entries, flat))

    @torch.inference_mode()
    def keel_finish_update(self, checksum: int | None) -> None:
        self.keel_receiver = Receiver(self.device)
        if checksum not in (None, self.keel_checksum.value()):
            raise RuntimeError(
                f"weight update: worker {self.rank} of the engine received corrupted "
                "weights (checksum mismatch)"
            )
        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        tracer = self.keel_tracer
        assert tracer is not None
        with set_current_vllm_config(self.vllm_config):
            if self.keel_plan is not None:
                for layer in self._keel_deferred_layers():
                    layer.process_weights_after_loading(config.dtype)
                return
            with tracer.record_operations():
                finalize_layerwise_reload(model, config)
            if self.device.type == "cpu":
                _repack_tied_heads(model)
        if self.keel_decided:
            return
        self.keel_decided = True
        self.keel_plan = tracer.plan()
        if self.keel_plan is None:
            _LOG.info("weight updates go through vLLM's loader: %s", tracer.refusal)
        else:
            _LOG.info("weight updates copy %d tensors directly", len(self.keel_plan.placed))

    def _keel_deferred_layers(self) -> list[Any]:
        """Return the attention layers that derive tensors from their weights, such as MLA."""
        from vllm.model_executor.layers.attention import (  # noqa: PLC0415  (only copies need it)
            is_deferred_attention_layer,
        )

        modules = self.model_runner.get_model().modules()
        return [module for module in modules if is_deferred_attention_layer(module)]


class TensorChecklist:
    """Checks that all tensors of an update have arrived, because vLLM does not notice every missing
    tensor."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        layers: int,
        tied: bool,
        decoder: str = "",
        unread: Iterable[str] = (),
    ) -> None:
        """Create a checklist from the tensor names in the checkpoint.

        `layers` is the number of layers, not counting the multi-token prediction layers. Those come
        last, and neither the engine nor the trainer loads them. If `tied` is set, the output
        embedding is the input embedding and may be missing. `decoder` is the decoder's prefix in
        tensor names; names without it are accepted too. `unread` lists patterns for tensors that
        the trainer doesn't load.
        """
        self._prefix = f"{decoder}."
        self._required: set[str] = set()
        self._optional = {"lm_head.weight"} if tied else set[str]()
        for name in map(self._plain, names):
            layer = _LAYER.search(name)
            # Some patterns match whole layers after the last one, so strip the layer's number.
            if any(re.search(pattern, _LAYER.sub(".", name)) for pattern in unread):
                self._optional.add(name)
            elif not _COMPUTED.search(name) and (layer is None or int(layer[1]) < layers):
                self._required.add(name)
        self._required -= self._optional
        self._missing: set[str] = set()

    @staticmethod
    def of_checkpoint(path: str, text: PreTrainedConfig) -> TensorChecklist:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), PreTrainedModel)
        return TensorChecklist(
            readable_tensors(path, "np"),
            layers=text.num_hidden_layers,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
            decoder=kind.base_model_prefix,
            unread=unused_tensor_patterns(kind),
        )

    def begin(self) -> None:
        self._missing = set(self._required)

    def arrived(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            name = self._plain(entry.name)
            if name not in self._required and name not in self._optional:
                raise ValueError(
                    f"weight update: the engine's checkpoint has no tensor {entry.name!r}; publish "
                    "the names that save_pretrained writes (one tensor for each expert)"
                )
            self._missing.discard(name)

    def finish(self) -> None:
        if self._missing:
            first = ", ".join(sorted(self._missing)[:3])
            raise ValueError(
                f"weight update: {len(self._missing)} of {len(self._required)} tensors did not "
                f"arrive, among them {first}; the engine would mix old and new weights"
            )

    def _plain(self, name: str) -> str:
        return name.removeprefix(self._prefix)
