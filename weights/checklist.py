"""Check that a weight update is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from keel.model.transformers_internals import unused_tensor_patterns
from keel.weights.channel import Bucket

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COMPUTED = re.compile(
    r"\brotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)$|\.weight_scale_inv$"
)
"""Tensors in old checkpoints that the engine and the trainer compute themselves."""


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
            # Patterns that name whole layers mean those behind the last one, hence without numbers.
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
            checkpoint_names(path),
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


def checkpoint_names(path: str) -> list[str]:
    """Return the tensor names in a safetensors checkpoint. `path` is a folder or a hub name."""
    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    if (index := find("model.safetensors.index.json")) is not None:
        return list(json.loads(Path(index).read_text())["weight_map"])
    if (single := find("model.safetensors")) is None:
        raise ValueError(
            f"model.path = {path!r}: has no safetensors checkpoint (model.safetensors)"
        )
    with safe_open(single, framework="pt") as tensors:
        return list(tensors.keys())
