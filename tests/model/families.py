"""Tiny random models of every family with routing replay."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 48

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
}

# The first or second layer is dense if the family supports dense layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 8, "mlp_only_layers": [1], "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_next": {
        "num_experts": 8,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT, "norm_topk_prob": True},
    "deepseek_v32": {
        **_LATENT,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
    },
    "gpt_oss": {"num_local_experts": 8, "layer_types": ["full_attention"] * 3},
    "minimax_m2": {"num_local_experts": 8, "rotary_dim": 16},
}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """Build a random float32 model with routers and correction biases far from zero."""
    key = f"{family} {changes}"
    if key not in _BUILT:
        torch.manual_seed(0)
        _BUILT[key] = _build(family, changes)
    torch.manual_seed(1)
    return deepcopy(_BUILT[key])


_BUILT: dict[str, PreTrainedModel] = {}


def _build(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES.get(family, {}), **changes})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if type(module).__name__.lower().endswith("router"):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.5)
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            bias.data.normal_(std=0.1)
    return model.float().eval()
