"""What it saves to compute a group's prompt once (`trainer.share_prompts`): steps of the trainer.

    python -m benchmarks.training.prompts                  # on a GPU: Qwen3-0.6B's shape
    python -m benchmarks.training.prompts --small          # a small model, on a CPU

For each shape of a group (completions × prompt + completion tokens) a step of as many groups as
make `--tokens` alternates between both ways on the same trajectories, optimizer and packing
included. The lengths of completions are geometric, up to a limit of four times their mean. Tokens
are those that the network computes; the gradient's norm is there to see that it is the same one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.common.batch_shape import SOURCE
from benchmarks.common.models import QWEN3_06B
from benchmarks.common.revision import commit
from keel.configs.schema import AlgorithmConfig, Config, DataConfig, ModelConfig, TrainerConfig
from keel.rl.metrics import values
from keel.rl.packing import pack
from keel.rl.types import Group, KeptSets, Prompt, ScoredGroup, Segment, Trajectory
from keel.trainer.engine.engine import TrainerEngine

SMALL = Qwen3Config(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)
KEPT = 8
"""Ids of a sampling mask."""


@dataclass(frozen=True)
class Shape:
    """Of a group."""

    size: int
    prompt: int
    completion: int
    """On average."""

    def __str__(self) -> str:
        return f"{self.size} × {self.prompt} + {self.completion}"


SHAPES = (
    Shape(8, 736, 85),
    Shape(16, 800, 768),
    Shape(8, 128, 1024),
    Shape(32, 608, 96),
    Shape(4, 384, 288),
    Shape(8, 4096, 512),
)


def groups_of(shape: Shape, tokens: int, vocabulary: int) -> list[ScoredGroup]:
    """As many as have about so many tokens, but two at least."""
    random = np.random.default_rng(0)
    count = max(2, tokens // (shape.size * (shape.prompt + shape.completion)))
    return [group_of(f"p{index}", shape, vocabulary, random) for index in range(count)]


def group_of(name: str, shape: Shape, vocabulary: int, random: np.random.Generator) -> ScoredGroup:
    prompt = random.integers(0, vocabulary, shape.prompt).astype(np.int32)
    lengths = random.geometric(1 / shape.completion, shape.size).clip(1, 4 * shape.completion)
    rewards = (np.arange(shape.size) % 2).astype(np.float32)
    message = {"role": "user", "content": "?"}
    return ScoredGroup(
        group=Group(
            prompt=Prompt(prompt_id=name, domain="d", messages=(message,)),
            trajectories=tuple(
                Trajectory(
                    prompt_id=name,
                    sibling=sibling,
                    segments=(answered(name, prompt, int(length), vocabulary, random),),
                    finish_reason="stop",
                    messages=(),
                )
                for sibling, length in enumerate(lengths)
            ),
        ),
        rewards_G=rewards,
        parts_G=tuple({"correct": float(reward)} for reward in rewards),
        advantages_G=rewards - rewards.mean(),
    )


def answered(
    name: str, prompt: np.ndarray, length: int, vocabulary: int, random: np.random.Generator
) -> Segment:
    own = random.integers(0, vocabulary - KEPT, length).astype(np.int32)
    sampled = np.arange(len(prompt) + length) >= len(prompt)
    spans = [np.zeros(0, np.int32)] * len(prompt) + [np.arange(o, o + KEPT) for o in own]
    return Segment(
        prompt_id=name,
        token_ids_T=np.concatenate([prompt, own]),
        trainable_T=sampled,
        logp_old_T=np.where(sampled, -2.0, 0.0).astype(np.float32),
        version_T=np.where(sampled, 0, -1).astype(np.int32),
        kept=KeptSets.from_lists(spans),
    )


def timed(
    engine: TrainerEngine, groups: list[ScoredGroup], micro_batch_tokens: int, *, share: bool
) -> dict[str, float]:
    """One step."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    began = time.perf_counter()
    (step,) = pack(groups, ranks=1, micro_batch_tokens=micro_batch_tokens, share_prompts=share)
    found = values(engine.step([step]))
    if gpu:
        torch.cuda.synchronize()
    return {
        "s": time.perf_counter() - began,
        "tokens": found["train/tokens"],
        "norm": found["grad_norm"],
        "gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0,
    }


def measure(
    engine: TrainerEngine, shape: Shape, options: argparse.Namespace, vocabulary: int
) -> dict[str, Any]:
    groups = groups_of(shape, options.tokens, vocabulary)
    rounds: list[dict[bool, dict[str, float]]] = []
    for index in range(1 + options.rounds):
        order = (False, True) if index % 2 else (True, False)
        rounds.append(
            {share: timed(engine, groups, options.micro_batch, share=share) for share in order}
        )
    last, kept = rounds[-1], rounds[1:]  # the first compiles
    plain, shared = (statistics.median(row[share]["s"] for row in kept) for share in (False, True))
    return {
        "shape": str(shape),
        "plain_s": plain,
        "shared_s": shared,
        "times": statistics.median(row[False]["s"] / row[True]["s"] for row in kept),
        "tokens": [last[share]["tokens"] for share in (False, True)],
        "norms": [last[share]["norm"] for share in (False, True)],
        "gib": [last[share]["gib"] for share in (False, True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=65_536, help="of a step, nothing shared")
    parser.add_argument("--micro-batch", type=int, default=16_384, help="its tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = SMALL if options.small else QWEN3_06B
    gpu = torch.cuda.is_available()
    dtype = "bfloat16" if gpu else "float32"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(model, dtype=getattr(torch, dtype))
        network.save_pretrained(folder)
        del network
        config = Config(
            model=ModelConfig(path=folder, dtype=dtype),
            data=DataConfig(sources=(replace(SOURCE, kl_coef=0.0),)),
            algorithm=AlgorithmConfig(),
            trainer=TrainerConfig(
                zero_stage=1 if gpu else 0,
                lr=1e-12,
                compile=options.compile,
                micro_batch_tokens=options.micro_batch,
            ),
        )
        engine = TrainerEngine(folder, config)
        device = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} CPU threads"
        print(f"commit {commit()}, {device}, torch {torch.__version__}, {dtype}")
        for shape in SHAPES:
            rows.append(row := measure(engine, shape, options, model.vocab_size))
            plain, shared = row["tokens"]
            print(
                f"{row['shape']:>16}: {row['plain_s']:.3f} s, shared {row['shared_s']:.3f} s, "
                f"{row['times']:.2f} times as fast; {plain:,.0f} → {shared:,.0f} tokens "
                f"({plain / shared:.2f} times fewer); norm {row['norms'][0]:.6g} and "
                f"{row['norms'][1]:.6g}; {row['gib'][0]:.1f} and {row['gib'][1]:.1f} GiB",
                flush=True,
            )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        made = {"commit": commit(), "device": device, "rows": rows}
        (options.out / "prompts.json").write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
