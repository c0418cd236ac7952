"""Loading of models and tokenizers, and facts about models."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from keel.model.load import checkpoint_tensors, facts_of, load_policy
from tests.model.families import VOCAB, build

MOE_LAYERS: dict[str, tuple[int, ...]] = {
    "qwen3": (),
    "qwen3_moe": (0, 2),
    "qwen2_moe": (0, 2),
    "mixtral": (0, 1, 2),
    "deepseek_v3": (1, 2),
}


def built(family: str) -> PreTrainedModel:
    return build(family, tie_word_embeddings=family == "qwen3")


@pytest.mark.parametrize("family", MOE_LAYERS)
def test_checkpoint_tensors_equal_save_pretrained(family: str, tmp_path: Path) -> None:
    model = built(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for each in (model, load_policy(str(tmp_path), torch.float32)):
        streamed = list(checkpoint_tensors(each))
        assert sorted(name for name, _ in streamed) == sorted(saved)
        for name, tensor in streamed:
            assert torch.equal(tensor, saved[name]), name
            assert not tensor.requires_grad


@pytest.mark.parametrize("family", MOE_LAYERS)
def test_facts_match_the_model(family: str) -> None:
    model = built(family)
    facts = facts_of(model.config)
    total = sum(p.numel() for p in model.parameters())
    assert (facts.parameters, facts.layers) == (total, 3)
    assert facts.moe_layer_ids == MOE_LAYERS[family]
    assert facts.tied == (family == "qwen3")
    assert (facts.vocab_size, facts.hidden_size, facts.max_context) == (VOCAB, 32, 64)
    counted = facts.expert_parameters + facts.attention_parameters
    assert 0 < facts.attention_parameters <= counted < total
    if family == "deepseek_v3":
        assert (facts.kv_heads, facts.kv_width) == (1, 16 + 16)
    else:
        projection = next(p for name, p in model.named_parameters() if "k_proj.weight" in name)
        assert (facts.kv_heads, facts.kv_width) == (1, 2 * len(projection))
    size = 32 if family == "mixtral" else 16
    experts = facts.moe_layers * 3 * 32 * size
    assert (facts.experts, facts.experts_per_token) == ((8, 2) if experts else (0, 0))
    assert facts.expert_parameters == 8 * experts
    assert facts.active_parameters == total - 6 * experts
