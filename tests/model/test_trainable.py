"""Checks of models before an engine starts. tests/trainer/placement/test_supported.py covers the
supported families."""

import json
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

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
FOUR = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}


def changed(name: str, tensor: Tensor, case: str) -> tuple[str, Tensor]:
    return (f"own.{name}" if case == "renamed" else name), tensor + (case == "biases left out")


@pytest.mark.parametrize(
    ("case", "family", "knobs", "named"),
    [
        ("a layer more", "qwen3", FOUR, "11 of 47 tensors"),
        ("renamed", "qwen3", {}, "36 of 36 tensors"),
        ("norms left out", "qwen3", LLAMA, "k_norm.weight"),
        ("biases left out", "qwen2", LLAMA, "k_proj.bias"),
        ("norms made up", "llama", QWEN3, "6 of 36 tensors .*q_norm"),
        ("another size", "qwen3", {"intermediate_size": 64}, r"down_proj\.weight .*\[32, 32\]"),
    ],
)
def test_mismatched_weights_are_refused(
    case: str, family: str, knobs: dict[str, Any], named: str, tmp_path: Path
) -> None:
    build(family, tie_word_embeddings=False).save_pretrained(tmp_path)
    config, whole = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | knobs))
    tensors = dict(changed(name, tensor, case) for name, tensor in load_file(whole).items())
    save_file(tensors, whole, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"config.json .*{named}"):
        trainable_facts(str(tmp_path), load_model_config(str(tmp_path)))


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
