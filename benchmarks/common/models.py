"""Configurations of the models that the benchmarks are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts, with heads of 64."""

    hidden: int = 1024
    layers: int = 16
    experts: int = 32
    per_token: int = 4
    expert: int = 768
    vocabulary: int = 151_936

    def config(self, **others: Any) -> Qwen3MoeConfig:
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.expert,
            "num_hidden_layers": self.layers,
            "num_attention_heads": max(2, self.hidden // 64),
            "num_key_value_heads": max(1, self.hidden // 256),
            "head_dim": 64,
            "num_experts": self.experts,
            "num_experts_per_tok": self.per_token,
        }
        return Qwen3MoeConfig(**sizes, **others)


def dense(*, hidden: int) -> Qwen3Config:
    """The small dense models of Qwen3 differ in their width alone."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,  # pyright: ignore[reportCallIssue]
    num_experts=128,
    num_experts_per_tok=8,
    max_position_embeddings=40_960,
)
DEEPSEEK_V3 = DeepseekV3Config(max_position_embeddings=163_840)
"""transformers' defaults are DeepSeek-V3's sizes; V3.2 adds a sparse-attention indexer to them,
which is left out here."""
REPLAY = Mixture().config()
"""The model of benchmarks/training/replay.py."""
QWEN3_06B = dense(hidden=1024)
QWEN3_17B = dense(hidden=2048)
QWEN3_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)
