"""Model shapes, run facts, argument parser and worker processes of the benchmarks."""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import psutil
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


@contextmanager
def worker_process(variables: Mapping[str, str], log: Path) -> Iterator[ProcessPoolExecutor]:
    """Start a process with more environment variables and with its output in a file.

    On exit, all processes started here are killed, because vLLM's shutdown can take long.
    """
    before = dict(os.environ)
    os.environ |= variables
    pool = ProcessPoolExecutor(1, get_context("spawn"), write_output, (log,))
    pool.submit(int)  # starts the process
    os.environ.clear()
    os.environ |= before
    try:
        yield pool
    finally:
        for worker in active_children():
            with suppress(psutil.Error):
                for process in [*psutil.Process(worker.pid).children(recursive=True), worker]:
                    process.kill()
        pool.shutdown()


def write_output(log: Path) -> None:
    """Write the output of this process to a file from now on."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


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
QWEN3_30B_A3B = replace(
    qwen3(2048, 768, 48, 32, tied=False), kv_heads=4, experts=128, max_context=40_960
).config()
MIXTURE = Shape(
    vocab_size=151_936,
    tokens=VOCABULARIES[151_936],
    hidden_size=1024,
    intermediate_size=768,
    layers=16,
    heads=16,
    kv_heads=4,
    head_dim=64,
    experts=32,
    per_token=4,
    tied=False,
)
"""Mixture of experts of 1.6 B parameters."""
SMALL_MIXTURE = replace(
    MIXTURE,
    vocab_size=2048,
    tokens=2000,
    hidden_size=64,
    intermediate_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    experts=8,
    per_token=2,
)
