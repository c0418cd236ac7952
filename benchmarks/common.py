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


def _dense(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


QWEN3_06B = _dense(1024, 3072, 28, 16, tied=True)
QWEN3_17B = _dense(2048, 6144, 28, 16, tied=True)
QWEN3_8B = _dense(4096, 12_288, 36, 32, tied=False)
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
