"""Workloads of the comparison and the result file of an arm."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common import VOCABULARIES, Shape, qwen3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """GRPO steps that every arm runs."""

    shape: Shape
    prompts_per_step: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    """Maximum completion length, reached unless `ends_after` is set."""
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
    """Standard deviation of the logits in nats; see `shape.write_model`."""
    ends_after: int = 0
    """Approximate mean length of completions; 0: all reach the maximum."""
    seed: int = 0
    model: str = ""
    prompts: str = ""
    """JSONL file of chat prompts."""
    reward: str = "variety"
    """Function of `benchmarks.peers.reward`."""
    lora_rank: int = 0
    """0: train all parameters. The scale of the adapters is 2."""

    @property
    def sequences(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def step_tokens(self) -> int:
        return self.sequences * self.completion_tokens

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and completion."""
        return self.prompt_tokens + self.completion_tokens

    def engine_share(self, gpu_bytes: float) -> float:
        """Share of a GPU's memory for a bfloat16 engine that samples all sequences at once.

        Covers two copies of the weights (a peer's trainer is in the same process), the full KV
        cache and 6 GiB of working memory.
        """
        shape = self.shape
        token_bytes = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
        cache = self.sequences * self.context * token_bytes
        return (4 * shape.parameters + cache + 6 * 2**30) / gpu_bytes

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Workload:
        fields = json.loads(Path(path).read_text())
        return Workload(**{**fields, "shape": Shape(**fields["shape"])})


WIDTHS = {1024: (3072, 16), 1536: (4608, 16), 2048: (6144, 16), 2560: (9728, 32)}
"""Hidden size → intermediate size and heads of Qwen3's dense models (1536 is interpolated)."""
MAX_PARAMETERS, MAX_COST, MIN_STEP_TOKENS = 2.0e9, 1.4e14, 32_768
"""Limits of a drawn workload; the cost is parameters × tokens of a step (Qwen3-0.6B's: 0.9e14)."""


def drawn(seed: int) -> Workload:
    """Draw a workload at random, which no system was tuned for. The limits let it fit on one GPU
    for a peer that stores all activations."""
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
        fits = workload.shape.parameters < MAX_PARAMETERS and cost < MAX_COST
        if fits and workload.step_tokens >= MIN_STEP_TOKENS:
            return workload


QWEN3_06B = Workload(
    shape=qwen3(1024, 3072, 28, 16),
    prompts_per_step=16,
    group_size=8,
    prompt_tokens=128,
    completion_tokens=1024,
    top_p=0.95,
    top_k=512,
)
QWEN3 = {
    "0.6b": QWEN3_06B,
    "1.7b": replace(QWEN3_06B, shape=qwen3(2048, 6144, 28, 16)),
    # four layers of Qwen3-30B-A3B
    "moe": replace(
        QWEN3_06B,
        shape=replace(qwen3(2048, 768, 4, 32, tied=False), kv_heads=4, experts=128),
    ),
    "8b": replace(QWEN3_06B, shape=qwen3(4096, 12_288, 36, 32, tied=False)),
}
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
        initializer_range=0.15,
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
    """One step of an arm."""

    step: int
    """Counts from 1, including warm-up."""
    seconds: float
    """Wall time since the end of the previous step."""
    tokens: int
    """Sampled tokens in the training batch."""
    phases: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by phase."""
    notes: dict[str, float] = field(default_factory=dict[str, float])
    """Metrics of the arm, such as loss and reward."""


@dataclass(kw_only=True)
class ArmFile:
    """Results of an arm, saved after each step."""

    path: Path
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    steps: list[StepTimes] = field(default_factory=list[StepTimes])
    first_step_at: float = 0.0
    """Unix time at the start of the first step; 0: not yet."""

    def save(self) -> None:
        content = {
            "settings": self.settings,
            "versions": self.versions,
            "first_step_at": self.first_step_at,
            "steps": [asdict(step) for step in self.steps],
        }
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.path)


def arm_options(about: str | None, arms: Iterable[str]) -> argparse.Namespace:
    """Read the command line of an arm."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--workload", type=Workload.load, required=True)
    parser.add_argument("--out", type=lambda path: ArmFile(path=Path(path)), required=True)
    parser.add_argument("--arm", choices=sorted(arms), required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("override", nargs="*", metavar="key=value", help="further knobs of Keel")
    options = parser.parse_args()
    options.steps += options.warmup
    return options


def versions(*packages: str, suffix: str = "") -> dict[str, str]:
    """Return the versions of the installed packages."""
    result: dict[str, str] = {}
    for name in packages:
        try:
            result[f"{name}{suffix}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result
