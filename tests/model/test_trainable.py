"""Checks of models before an engine starts. tests/trainer/placement/test_supported.py covers the
supported families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GemmaConfig

from keel.configs.schema import ConfigError, LoraConfig
from keel.model.load import facts_of, load_model_config
from keel.model.trainable import check_adapters, trainable_facts
from tests.model.families import build

Tensors = dict[str, Tensor]


def saved(
    folder: Path, family: str, knobs: dict[str, Any], weights: Callable[[Tensors], Tensors] = dict
) -> str:
    """Save a tiny model, then change its config.json and its tensors."""
    tied = knobs.pop("tied", False)
    build(family, tie_word_embeddings=tied).save_pretrained(folder)
    file, whole = folder / "config.json", folder / "model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | knobs))
    save_file(weights(load_file(whole)), whole, metadata={"format": "pt"})
    return str(folder)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
FOUR = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
UNFIT: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "a layer more": ("qwen3", FOUR, dict, r"4 layers\): 11 of 47 tensors are missing"),
    "renamed": (
        "qwen3",
        {},
        lambda tensors: {f"own.{name}": tensor for name, tensor in tensors.items()},
        "36 of 36 tensors are missing",
    ),
    "norms left out": ("qwen3", LLAMA, dict, "no tensor .*k_norm.weight"),
    "biases left out": (
        "qwen2",
        LLAMA,
        lambda tensors: {name: tensor + 1 for name, tensor in tensors.items()},
        "no tensor .*k_proj.bias",
    ),
    "norms made up": ("llama", QWEN3, dict, "6 of 36 tensors are missing, such as .*q_norm"),
    "another size": (
        "qwen3",
        {"intermediate_size": 64},
        dict,
        r"mlp\.down_proj\.weight has shape \[32, 32\], not \[32, 64\]",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_mismatched_weights_are_refused(case: str, tmp_path: Path) -> None:
    family, knobs, weights, reason = UNFIT[case]
    path = saved(tmp_path, family, dict(knobs), weights)
    with pytest.raises(ConfigError, match=f"config.json .*{reason}"):
        trainable_facts(path, load_model_config(path))


def test_adapters_fit_the_model() -> None:
    facts = facts_of(GemmaConfig(num_hidden_layers=1))
    check_adapters(LoraConfig(rank=4), facts)
    for wrong in (
        LoraConfig(rank=4, targets=("q_proj", "o_porj")),
        LoraConfig(rank=4, targets=("lm_head",)),
        LoraConfig(rank=facts.hidden_size + 1),
    ):
        with pytest.raises(ConfigError, match=r"model\.lora"):
            check_adapters(wrong, facts)
