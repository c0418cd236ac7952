"""Configurations of the models that the benchmarks are about."""

from __future__ import annotations

from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    max_position_embeddings=40_960,
)
DEEPSEEK_V3 = DeepseekV3Config(max_position_embeddings=163_840)
"""transformers' defaults are DeepSeek-V3's sizes; V3.2 adds a sparse-attention indexer to them,
which is left out here."""
REPLAY = Qwen3MoeConfig(
    vocab_size=151_936,
    hidden_size=1024,
    moe_intermediate_size=768,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
)
"""The model of benchmarks/replay.py."""
QWEN3_06B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
QWEN3_17B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
