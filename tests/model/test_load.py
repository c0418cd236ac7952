"""Loading of models and tokenizers, and facts about models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from keel.configs.schema import ConfigError
from keel.model.load import checkpoint_tensors, facts_of, load_model_config, load_policy

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense, tied": Qwen3Config(
        **COMMON, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True
    ),
    "qwen3_moe, one dense layer": Qwen3MoeConfig(
        **COMMON,
        num_hidden_layers=3,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    ),
    "qwen2_moe, shared expert": Qwen2MoeConfig(
        **COMMON,
        num_hidden_layers=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "mixtral": MixtralConfig(
        **COMMON, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3, dense first": DeepseekV3Config(
        **COMMON,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
MOE_LAYERS = {
    "dense, tied": (),
    "qwen3_moe, one dense layer": (0, 2),
    "qwen2_moe, shared expert": (0, 1),
    "mixtral": (0, 1),
    "deepseek_v3, dense first": (1, 2),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("reloaded", [False, True], ids=["built", "loaded"])
def test_checkpoint_tensors_equal_save_pretrained(
    family: str, reloaded: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    if reloaded:
        model.save_pretrained(tmp_path / "first")
        model = load_policy(str(tmp_path / "first"), torch.float32)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    streamed = list(checkpoint_tensors(model))
    assert sorted(name for name, _ in streamed) == sorted(saved)
    for name, tensor in streamed:
        assert torch.equal(tensor, saved[name]), name
        assert not tensor.requires_grad


@pytest.mark.parametrize("family", CONFIGS)
def test_facts_match_the_model(family: str) -> None:
    config = CONFIGS[family]
    facts = facts_of(config)
    model = AutoModelForCausalLM.from_config(config)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.moe_layer_ids == MOE_LAYERS[family]
    assert facts.moe_layers == len(MOE_LAYERS[family])
    assert facts.layers == config.num_hidden_layers
    assert facts.tied == (family == "dense, tied")
    assert (facts.vocab_size, facts.hidden_size, facts.max_context) == (64, 32, 128)
    counted = facts.expert_parameters + facts.attention_parameters
    assert 0 < facts.attention_parameters <= counted < facts.parameters
    if family.startswith("deepseek"):
        assert (facts.kv_heads, facts.kv_width) == (1, 16 + 8)
    else:
        projection = next(p for name, p in model.named_parameters() if "k_proj.weight" in name)
        assert (facts.kv_heads, facts.kv_width) == (2, 2 * len(projection))
    if facts.moe_layers:
        assert facts.expert_parameters * (facts.experts - 2) == facts.experts * (
            facts.parameters - facts.active_parameters
        )
        assert facts.experts in (4, 8)
        assert facts.experts_per_token == 2
        size = 48 if family == "mixtral" else 16
        idle = facts.moe_layers * (facts.experts - 2) * 3 * 32 * size
        assert facts.active_parameters == facts.parameters - idle
    else:
        assert (facts.experts, facts.experts_per_token) == (0, 0)
        assert facts.active_parameters == facts.parameters


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]},
    ],
)
def test_other_kinds_of_model_are_refused(content: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="causal language model"):
        facts_of(load_model_config(str(tmp_path)))
