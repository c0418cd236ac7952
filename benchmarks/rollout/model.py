"""The model and the prompts for the rollout benchmark."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import Mixture
from benchmarks.peers.shape import random_words, write_model
from keel.rl.types import Prompt


@dataclass(frozen=True)
class Size(Mixture):
    """Size of the model and of one timed run."""

    expert: int = 640
    words: int = 151_669
    """Number of tokens in the vocabulary."""
    prompts: int = 16
    group: int = 16
    prompt: int = 128
    """Number of tokens per prompt."""
    completion: int = 512
    """Number of tokens in every completion."""
    top_p: float = 0.95
    top_k: int = 512
    mean_kept: float = 8.0
    """Mean number of ids in a sampling mask."""
    dtype: str = "bfloat16"

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """Number of tokens sampled in one run."""
        return self.sequences * self.completion


SMALL = Size(
    hidden=64,
    layers=2,
    experts=8,
    per_token=2,
    expert=32,
    vocabulary=2048,
    words=2000,
    prompts=4,
    group=4,
    prompt=48,
    completion=32,
    top_k=64,
    dtype="float32",
)


def write(folder: Path, size: Size) -> dict[str, float]:
    """Write the model to disk. Returns its parameter count and its logit spread."""
    sharpness = logit_spread(size)
    config = size.config(norm_topk_prob=True, max_position_embeddings=4096)
    parameters = write_model(folder, config, size.words, seed=0, sharpness=sharpness)
    return {"parameters": parameters, "logit_spread": sharpness}


def logit_spread(size: Size) -> float:
    """Return the standard deviation of normally distributed logits for which truncation keeps
    `mean_kept` ids on average."""
    generator = torch.Generator().manual_seed(1)
    ranked = torch.randn(256, size.words, generator=generator).topk(size.top_k).values
    low, high = 0.1, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        chances = (ranked * middle).softmax(-1)
        before = chances.cumsum(-1) - chances
        kept = (before < size.top_p).sum(-1).float().mean().item()
        low, high = (middle, high) if kept > size.mean_kept else (low, middle)
    return (low + high) / 2


def make_prompts(size: Size, salt: str) -> list[Prompt]:
    """Make prompts of random words.

    Each new salt gives prompts that are not in the prefix cache yet.
    """
    draw = random.Random(salt)
    texts = [random_words(draw, size.words, size.prompt) for _ in range(size.prompts)]
    return [
        Prompt(
            prompt_id=f"{salt}-{index}",
            domain="benchmark",
            messages=({"role": "user", "content": text},),
        )
        for index, text in enumerate(texts)
    ]
