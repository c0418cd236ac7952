"""What the two replays cost: one training step of a mixture of experts, on one GPU.

    python -m benchmarks.training.replay   # 1.4 B parameters, mean sampling mask 8, 64 and 512
    python -m benchmarks.training.replay --small   # seconds, to see that it runs

Three ways to do the same step (forward, backward, optimizer) alternate on the same tokens:

    both     recorded routes and sampling masks: what Keel trains with
    live     sampling masks, live routing
    full     live routing, every token over the whole vocabulary: a trainer without replay

The recorded routes are those that the live router chooses, so all three send the same tokens to the
same experts and differ in the replay alone. Times are medians over rounds, of whole steps with the
host's work in them; ratios are medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM

from benchmarks.common.batch_shape import SOURCE, Row
from benchmarks.common.models import Mixture
from benchmarks.common.revision import commit
from benchmarks.common.synthetic import draw_micro_batch, with_live_routes
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    TrainerConfig,
)
from keel.rl.packing import MicroBatch, TrainBatch
from keel.trainer.engine.engine import TrainerEngine

ARMS = ("both", "live", "full")


@dataclass(frozen=True)
class Size(Mixture):
    """Of the model and of one step."""

    micro_batches: int = 4
    segments: int = 16
    """A micro-batch."""
    prompt: int = 128
    completion: int = 896


SMALL = Size(
    hidden=64,
    layers=2,
    experts=8,
    per_token=2,
    expert=64,
    vocabulary=2048,
    segments=4,
    completion=64,
)


def write_model(folder: Path, size: Size) -> int:
    """Random weights; returns their number."""
    config = size.config(norm_topk_prob=True, dtype="bfloat16")
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def timed_step(engine: TrainerEngine, arm: str, batches: list[MicroBatch]) -> float:
    """Seconds of one step."""
    algorithm = replace(engine._config.algorithm, keep_routing=arm == "both")
    engine._config = replace(engine._config, algorithm=algorithm)
    if arm == "full":
        batches = [replace(batch, kept=None) for batch in batches]
    sequences = sum(len(batch.sequence_tokens_S) for batch in batches)
    step = TrainBatch(micro_batches=tuple(batches), total_sequences=sequences)
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.step([step])
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(engine: TrainerEngine, size: Size, mean_set: int, rounds: int) -> dict[str, float]:
    shape = Row(
        segments=size.segments,
        prompt=size.prompt,
        completion=size.completion,
        vocabulary=size.vocabulary,
    )
    cuda = torch.device("cuda")
    batches = [draw_micro_batch(shape, mean_set, cuda) for _ in range(size.micro_batches)]
    batches = [with_live_routes(engine, batch) for batch in batches]
    tokens = sum(len(batch.token_ids_N) for batch in batches)
    for arm in ARMS:
        timed_step(engine, arm, batches)
    times: list[dict[str, float]] = []
    peaks: dict[str, float] = {}
    for index in range(rounds):
        order = ARMS[index % len(ARMS) :] + ARMS[: index % len(ARMS)]
        row: dict[str, float] = {}
        for arm in order:
            torch.cuda.reset_peak_memory_stats()
            row[arm] = timed_step(engine, arm, batches)
            peaks[arm] = torch.cuda.max_memory_allocated() / 2**30
        times.append(row)
    kept = [batch.kept.sizes()[batch.trainable_N].mean() for batch in batches if batch.kept]
    middle = {arm: statistics.median(row[arm] for row in times) for arm in ARMS}
    return {
        "mean_set": float(np.mean(kept)),
        "tokens": tokens,
        **{f"{arm}_ms": 1e3 * middle[arm] for arm in ARMS},
        **{f"{arm}_gib": peaks[arm] for arm in ARMS},
        "routing_cost": statistics.median(row["both"] / row["live"] for row in times) - 1,
        "both_to_full": statistics.median(row["both"] / row["full"] for row in times),
        "tokens_per_second": tokens / middle["both"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sets", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = SMALL if options.small else Size()
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_model(Path(folder), size)
        config = Config(
            model=ModelConfig(path=folder),
            data=DataConfig(sources=(SOURCE,)),
            algorithm=AlgorithmConfig(),
            trainer=TrainerConfig(
                zero_stage=1, activation_checkpointing=options.recompute, lr=1e-9
            ),
        )
        engine = TrainerEngine(folder, config)
        print(
            f"{parameters / 1e9:.2f} B parameters, bf16, {size}, commit {commit()}, "
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
            f"{platform.python_version()}\n"
            "mean set   both ms   live ms   full ms   routing   both/full   "
            "GiB both/live/full  tok/s",
            flush=True,
        )
        rows: list[dict[str, float]] = []
        for mean in options.sets:
            rows.append(row := measure(engine, size, mean, options.rounds))
            print(
                f"{row['mean_set']:8.1f} {row['both_ms']:9.1f} {row['live_ms']:9.1f} "
                f"{row['full_ms']:9.1f} {row['routing_cost']:+9.1%} {row['both_to_full']:11.3f}   "
                f"{row['both_gib']:.1f}/{row['live_gib']:.1f}/{row['full_gib']:.1f} "
                f"{row['tokens_per_second']:9,.0f}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps({"commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
