"""What all systems are given: sizes, sampling, optimizer. Plain data, written as JSON."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A dense Qwen3 with a tied head."""

    vocab_size: int
    """Rows of the embedding."""
    tokens: int
    """Entries of the tokenizer; the rows past them stand for no token."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int = 4096
    """Tokens."""
    spread: float = 0.02
    """Standard deviation of the matrices of the layers. Narrow models need more of it, or their
    layers add nothing to a token's embedding and it is repeated for ever."""

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.layers * layer + self.vocab_size * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Steps of GRPO, alike for every arm."""

    shape: Shape
    prompts_per_step: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    """Of every completion, unless `ends_after` lets it end sooner."""
    top_p: float
    top_k: int
    temperature: float = 1.0
    kl_coef: float = 0.02
    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 0.2
    mask_delta: float = 2.0
    grad_clip: float = 1.0
    sharpness: float = 8.0
    """Standard deviation of the logits, in nats: see `shape.write_model`."""
    ends_after: int = 0
    """Tokens after which the model is made to end a completion, by an estimate (a rough one of rare
    ends: `length/sampled_mean` says what came of it); the limit cuts the rest. 0: none ends."""
    seed: int = 0
    model: str = ""
    """Folder of weights and tokenizer."""
    prompts: str = ""
    """JSONL of chat prompts."""

    @property
    def sequences(self) -> int:
        """Completions per step."""
        return self.prompts_per_step * self.group_size

    @property
    def step_tokens(self) -> int:
        """Completion tokens per step, at the most."""
        return self.sequences * self.completion_tokens

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def engine_share(self, gpu_bytes: float) -> float:
        """Of a GPU's memory, for an engine in bfloat16 that samples all sequences of a step at
        once: weights twice (a peer's trainer has them in the same process), keys and values at
        full length, and 6 GiB for what it works with."""
        shape = self.shape
        of_token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
        cache = self.sequences * self.context * of_token
        return (4 * shape.parameters + cache + 6 * 2**30) / gpu_bytes

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Workload:
        fields = json.loads(path.read_text())
        return Workload(**{**fields, "shape": Shape(**fields["shape"])})


WIDTHS = {1024: (3072, 16), 1536: (4608, 16), 2048: (6144, 16), 2560: (9728, 32)}
"""Hidden size → intermediate size and heads, of Qwen3's dense models (1536: between two)."""
VOCABULARIES = {32_768: 32_500, 65_536: 65_100, 151_936: 151_669}
"""Rows of the embedding → entries of the tokenizer."""
LARGEST, DEAREST, SMALLEST = 2.0e9, 1.4e14, 32_768
"""A drawn workload's most parameters, most parameters × tokens of a step (Qwen3-0.6B's has 0.9e14),
and least completion tokens of a step."""


def drawn(seed: int) -> Workload:
    """A workload that nobody tuned for: model, batch, lengths and truncation by chance, as far as a
    peer that keeps all activations can hold it on one GPU."""
    pick = random.Random(seed)
    while True:
        hidden, vocabulary = pick.choice(sorted(WIDTHS)), pick.choice(sorted(VOCABULARIES))
        intermediate, heads = WIDTHS[hidden]
        workload = Workload(
            shape=Shape(
                vocab_size=vocabulary,
                tokens=VOCABULARIES[vocabulary],
                hidden_size=hidden,
                intermediate_size=intermediate,
                layers=pick.randrange(8, 37, 2),
                heads=heads,
                kv_heads=8,
                head_dim=128,
            ),
            prompts_per_step=pick.choice([4, 8, 16, 32]),
            group_size=pick.choice([4, 8, 16, 32]),
            prompt_tokens=pick.randrange(64, 1025, 32),
            completion_tokens=pick.randrange(256, 2049, 128),
            top_p=pick.choice([0.9, 0.95, 0.99]),
            top_k=pick.choice([64, 128, 256, 512]),
            seed=seed,
        )
        if pick.random() < 0.5:
            workload = replace(workload, ends_after=workload.completion_tokens // 4)
        cost = workload.shape.parameters * workload.sequences * workload.context
        fits = workload.shape.parameters < LARGEST and cost < DEAREST
        if fits and workload.step_tokens >= SMALLEST:
            return workload


QWEN3_06B = Workload(
    shape=Shape(
        vocab_size=151_936,
        tokens=151_669,
        hidden_size=1024,
        intermediate_size=3072,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
    ),
    prompts_per_step=16,
    group_size=8,
    prompt_tokens=128,
    completion_tokens=1024,
    top_p=0.95,
    top_k=512,
)
LONG = Workload(
    shape=replace(QWEN3_06B.shape, layers=12, max_context=36_864),
    prompts_per_step=8,
    group_size=8,
    prompt_tokens=128,
    completion_tokens=32_768,
    ends_after=6144,
    top_p=0.95,
    top_k=512,
)
"""Answers of 8,200 to 9,700 tokens on average, as measured, a few of which meet the limit of
32,768: 12 of Qwen3-0.6B's 28 layers, to keep a step short."""
SMALL = Workload(
    shape=Shape(
        vocab_size=2048,
        tokens=2000,
        hidden_size=64,
        intermediate_size=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        max_context=256,
        spread=0.15,
    ),
    prompts_per_step=4,
    group_size=4,
    prompt_tokens=16,
    completion_tokens=32,
    top_p=0.95,
    top_k=64,
    sharpness=4.0,
)


@dataclass(kw_only=True)
class StepTimes:
    """One measured step of an arm."""

    step: int
    """From 1, warm-up included."""
    seconds: float
    """Wall time since the end of the step before."""
    tokens: int
    """Sampled tokens trained on."""
    phases: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by what they went into; the rest of `seconds` is between them."""
    notes: dict[str, float] = field(default_factory=dict[str, float])
    """Loss, reward and the like, by the arm's own names."""


@dataclass(kw_only=True)
class ArmFile:
    """What an arm writes down, anew after each step, so that one cut short is not lost."""

    path: Path
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    steps: list[StepTimes] = field(default_factory=list[StepTimes])
    memory: dict[str, float] = field(default_factory=dict[str, float])
    """GiB by what was measured."""
    first_step_at: float = 0.0
    """When the first step began, in seconds since 1970; 0: not yet."""

    def save(self) -> None:
        made = {
            "settings": self.settings,
            "versions": self.versions,
            "memory": self.memory,
            "first_step_at": self.first_step_at,
            "steps": [asdict(step) for step in self.steps],
        }
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(made, indent=1) + "\n")
        fresh.replace(self.path)


def arm_parser(about: str | None, arms: Iterable[str], *, default: str) -> argparse.ArgumentParser:
    """What every arm is told."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arm", choices=sorted(arms), default=default)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    return parser


def version(name: str) -> str:
    """Of an installed package; empty if it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
