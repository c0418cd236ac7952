"""The tiny model: a small mixture of experts with random weights, built from a seed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from keel.configs.schema import TinyModelConfig
from keel.model.tiny.tokenizer import vocab_rows


def model_config(config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Every layer is a mixture of experts; input and output embeddings are separate."""
    shared: dict[str, Any] = {
        "vocab_size": vocab_rows(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_size,
        "moe_intermediate_size": config.expert_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": True,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": False,
        "initializer_range": config.initializer_range,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    if config.family == "deepseek_v32":
        return _sparse(config, shared)
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,  # pyright: ignore[reportCallIssue] (an attribute all the same)
        num_experts=config.experts,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        **shared,
    )


def _sparse(config: TinyModelConfig, shared: dict[str, Any]) -> PreTrainedConfig:
    """Latent attention over what an indexer selects; an expert is shared by all tokens."""
    return AutoConfig.for_model(
        "deepseek_v32",
        architectures=["DeepseekV32ForCausalLM"],
        mlp_layer_types=["sparse"] * config.layers,
        num_key_value_heads=config.heads,
        q_lora_rank=config.latent_size,
        kv_lora_rank=config.latent_size,
        qk_nope_head_dim=config.head_dim,
        qk_rope_head_dim=config.head_dim // 2,
        v_head_dim=config.head_dim,
        n_routed_experts=config.experts,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        index_n_heads=config.index_heads,
        index_head_dim=config.head_dim,
        index_topk=config.index_top_k,
        **shared,
    )


def build_model(
    config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> PreTrainedModel:
    """A float32 model with random weights that depend on `config` and `seed` alone.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(model_config(config, tokenizer))
