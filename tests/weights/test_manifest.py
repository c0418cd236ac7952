"""An update must contain all checkpoint tensors and no others."""

from __future__ import annotations

import pytest
import torch

from keel.weights.manifest import Manifest
from tests.buckets import pack_buckets

NAMES = ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.1.a", "model.layers.2.a"]


def update(manifest: Manifest, *names: str) -> None:
    manifest.begin()
    for bucket in pack_buckets([(name, torch.ones(2)) for name in names], 8):
        manifest.arrived(bucket)
    manifest.finish()


def test_missing_and_unknown_tensors_are_named() -> None:
    manifest = Manifest(NAMES, layers=3, tied=False, decoder="model")
    for _ in range(2):
        update(manifest, *reversed(NAMES))
    with pytest.raises(ValueError, match=r"model.layers.1.a"):
        update(manifest, *(name for name in NAMES if name != "model.layers.1.a"))
    with pytest.raises(ValueError, match=r"model.layers.0.b"):
        update(manifest, *NAMES, "model.layers.0.b")
    # Layers for multi-token prediction come last and are not loaded.
    update(Manifest(NAMES, layers=2, tied=False), *NAMES[:3])


def test_unloaded_tensors_are_not_expected() -> None:
    """Pythia's checkpoints contain masks that are computed nowadays."""
    biases = [f"gpt_neox.layers.{n}.attention.dense.bias" for n in range(2)]
    masks = [f"gpt_neox.layers.{n}.attention.{m}bias" for n in range(2) for m in ("", "masked_")]
    computed = ["gpt_neox.layers.0.attention.rotary_emb.inv_freq"]
    unread = [r"attention.bias", r"attention.masked_bias", r"layers\.1.*"]
    manifest = Manifest([*biases, *masks, *computed], layers=2, tied=False, unread=unread)
    update(manifest, *biases)
    with pytest.raises(ValueError, match=r"gpt_neox.layers.1.attention.dense"):
        update(manifest, biases[0])


def test_decoder_only_checkpoints_match() -> None:
    """GPT-2's checkpoint lacks the decoder prefix of its published tensors."""
    manifest = Manifest(["wte.weight", "h.0.b"], layers=1, tied=True, decoder="transformer")
    update(manifest, "transformer.wte.weight", "transformer.h.0.b", "lm_head.weight")
    with pytest.raises(ValueError, match=r"transformer.h.0.c"):
        update(manifest, "transformer.wte.weight", "transformer.h.0.c")


@pytest.mark.parametrize("published", [NAMES, [*NAMES, "lm_head.weight"]])
@pytest.mark.parametrize("stored", [NAMES, [*NAMES, "lm_head.weight"]])
def test_tied_head_is_optional(published: list[str], stored: list[str]) -> None:
    update(Manifest(stored, layers=3, tied=True), *published)
