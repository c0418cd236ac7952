"""The embedded model: a small Qwen3 mixture of experts with random weights, built from a seed."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from keel.configs.schema import EmbeddedConfig
from keel.model.embedded.tokenizer import vocab_rows


def model_config(config: EmbeddedConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Every layer is a mixture of experts; input and output embeddings are separate."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=vocab_rows(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.expert_size,
        moe_intermediate_size=config.expert_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,  # pyright: ignore[reportCallIssue] (an attribute all the same)
        num_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        norm_topk_prob=True,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        max_position_embeddings=config.max_context,
        tie_word_embeddings=False,
        initializer_range=config.initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )


def build_model(
    config: EmbeddedConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> Qwen3MoeForCausalLM:
    """A float32 model with random weights that depend on `config` and `seed` alone.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(model_config(config, tokenizer))
