"""Which tensors an update has to bring: those of the checkpoint the engine was started from."""

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
"""Tensors of old checkpoints that engine and trainer both compute, and neither loads."""


class Manifest:
    """Ticks off the tensors of an update. vLLM itself only warns about some of the missing ones."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        layers: int,
        tied: bool,
        decoder: str = "",
        unread: Iterable[str] = (),
    ) -> None:
        """`layers`: of the model without its multi-token-prediction layers, which checkpoints keep
        behind the last one and neither engine nor trainer loads. `tied`: the output embedding is
        the input embedding, and may or may not be published. `decoder`: what the decoder is called
        in the model; names may begin with it or, in a checkpoint of the decoder alone, not.
        `unread`: patterns of tensors that the trainer does not load, and so does not publish."""
        self._prefix = f"{decoder}."
        self._optional = {"lm_head.weight"} if tied else set[str]()
        known = {self._plain(name): name for name in names if not _COMPUTED.search(name)}
        # A layer's own tensors: patterns that name whole layers mean those behind the last one.
        self._optional |= {
            name for name in known if any(re.search(p, _LAYER.sub(".", name)) for p in unread)
        }
        self._names = {
            plain: name
            for plain, name in known.items()
            if _layer(plain) < layers and plain not in self._optional
        }
        """Without the decoder's name → as they are in the checkpoint."""
        self._missing: set[str] = set()

    @staticmethod
    def of(path: str, text: PreTrainedConfig) -> Manifest:
        """Of the checkpoint at `path`, as `checkpoint_names` has it. `text`: the configuration of
        its language part."""
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
        """Raises `ValueError` naming a tensor that the checkpoint does not have."""
        for entry in bucket.entries:
            name = self._plain(entry.name)
            if name not in self._names and name not in self._optional:
                raise ValueError(
                    f"weight update: the engine's checkpoint has no tensor {entry.name!r}; publish "
                    "the names that save_pretrained writes (one tensor for each expert)"
                )
            self._missing.discard(name)

    def finish(self) -> None:
        """Raises `ValueError` naming tensors that did not come."""
        if self._missing:
            first = ", ".join(sorted(self._names[name] for name in self._missing)[:3])
            raise ValueError(
                f"weight update: {len(self._missing)} of {len(self._names)} tensors did not "
                f"arrive, among them {first}; the engine would mix old and new weights"
            )

    def _plain(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def checkpoint_names(path: str) -> list[str]:
    """Names of the tensors in the safetensors checkpoint at `path` (a folder or a hub name)."""
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
    found = _LAYER.search(name)
    return int(found.group(1)) if found else -1
