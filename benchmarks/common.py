"""Model shapes, run facts and the argument parser shared by the benchmarks."""

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

COMMIT_VARIABLE = "KEEL_COMMIT"
"""Environment variable with the commit, for machines without git."""


def commit() -> str:
    """Short id of the current commit, marked if files have changed."""
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"


def run_facts() -> dict[str, str]:
    """Command, commit, device and versions for a report."""
    gpu = torch.cuda.is_available()
    return {
        "command": " ".join(sys.argv[1:]),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or "CPU",
        "torch": torch.__version__,
    }


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Create a parser whose help is the module docstring, unformatted."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts with attention heads of 64."""

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


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3, dense or with experts."""

    vocab_size: int
    """Rows of the embedding."""
    tokens: int
    """Tokenizer entries; further embedding rows are unused."""
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward layer, or of one expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    per_token: int = 8
    tied: bool = True
    """True if the output layer shares the embedding's weights."""
    max_context: int = 4096
    initializer_range: float = 0.02
    """Standard deviation of the initial weights. Narrow models need a larger value, because
    otherwise sampling repeats a single token."""

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size * max(1, self.experts)
        return self.layers * layer + (2 - self.tied) * self.vocab_size * self.hidden_size

    def config(self) -> PreTrainedConfig:
        sizes: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_context,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tied,
            "dtype": "bfloat16",
        }
        if not self.experts:
            return Qwen3Config(architectures=["Qwen3ForCausalLM"], **sizes)
        return Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            moe_intermediate_size=self.intermediate_size,
            num_experts=self.experts,
            num_experts_per_tok=self.per_token,
            norm_topk_prob=True,
            **sizes,
        )


VOCABULARIES = {32_768: 32_500, 65_536: 65_100, 151_936: 151_669}
"""Rows of the embedding → entries of the tokenizer."""


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = True) -> Shape:
    return Shape(
        vocab_size=151_936,
        tokens=VOCABULARIES[151_936],
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        tied=tied,
    )


QWEN3_06B = qwen3(1024, 3072, 28, 16).config()
QWEN3_17B = qwen3(2048, 6144, 28, 16).config()
QWEN3_8B = qwen3(4096, 12_288, 36, 32, tied=False).config()
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
MOE_16B: PreTrainedConfig = Mixture().config()
"""Mixture of experts of 1.6 B parameters."""
