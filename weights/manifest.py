"""Checks that a weight update contains exactly the tensors of the checkpoint that the engine was
started from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from keel.model.transformers_internals import left_out
from keel.weights.buckets import Bucket

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COMPUTED = re.compile(r"\brotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Matches tensors in old checkpoints that the engine and the trainer compute themselves instead of
loading them."""


class Manifest:
    """Tracks which tensors have arrived during an update. vLLM itself only warns about missing
    tensors, and does not notice all of them."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        layers: int,
        tied: bool,
        decoder: str = "",
        unread: Iterable[str] = (),
    ) -> None:
        """Create a manifest from the tensor names in the checkpoint.

        `layers` is the number of layers, not counting the multi-token-prediction layers. Those come
        last, and neither the engine nor the trainer loads them. If `tied` is set, the output
        embedding is the input embedding and may be missing. `decoder` is the decoder's prefix in
        tensor names; names may also come without it. `unread` are patterns for tensors that the
        trainer does not load.
        """
        self._prefix = f"{decoder}."
        self._optional = {"lm_head.weight"} if tied else set[str]()
        known = {self._plain(name): name for name in names if not _COMPUTED.search(name)}
        # Patterns that name whole layers mean those behind the last one, hence without numbers.
        self._optional |= {
            name for name in known if any(re.search(p, _LAYER.sub(".", name)) for p in unread)
        }
        self._names = {
            plain: name
            for plain, name in known.items()
            if _layer(plain) < layers and plain not in self._optional
        }
        """Maps names without the decoder's prefix to the names in the checkpoint."""
        self._missing: set[str] = set()

    @staticmethod
    def of(path: str, text: PreTrainedConfig) -> Manifest:
        """Create the manifest for the checkpoint at `path`. `text` is the config of its language
        model."""
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), PreTrainedModel)
        return Manifest(
            checkpoint_names(path),
            layers=text.num_hidden_layers,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
            decoder=kind.base_model_prefix,
            unread=left_out(kind)[1],
        )

    def begin(self) -> None:
        self._missing = set(self._names)

    def arrived(self, bucket: Bucket) -> None:
        """Mark the tensors in a bucket as arrived. Raises ValueError if any tensor is not in the
        checkpoint."""
        for entry in bucket.entries:
            name = self._plain(entry.name)
            if name not in self._names and name not in self._optional:
                raise ValueError(
                    f"weight update: the engine's checkpoint has no tensor {entry.name!r}; publish "
                    "the names that save_pretrained writes (one tensor for each expert)"
                )
            self._missing.discard(name)

    def finish(self) -> None:
        """Raise ValueError if any tensor did not arrive during the update."""
        if self._missing:
            first = ", ".join(sorted(self._names[name] for name in self._missing)[:3])
            raise ValueError(
                f"weight update: {len(self._missing)} of {len(self._names)} tensors did not "
                f"arrive, among them {first}; the engine would mix old and new weights"
            )

    def _plain(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def checkpoint_names(path: str) -> list[str]:
    """Return the tensor names in a safetensors checkpoint. `path` is a folder or a hub name."""
    index = cached_file(
        path, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False
    )
    if index is not None:
        return list(json.loads(Path(index).read_text())["weight_map"])
    single = cached_file(path, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if single is None:
        raise ValueError(
            f"model.path = {path!r}: has no safetensors checkpoint (model.safetensors)"
        )
    with safe_open(single, framework="pt") as tensors:
        return list(tensors.keys())


def _layer(name: str) -> int:
    match = _LAYER.search(name)
    return int(match.group(1)) if match else -1
