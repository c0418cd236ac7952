"""Tokens per second with and without drafts, for a real model that copies a text or writes a story.

    python -m benchmarks.drafts --model FOLDER --out OUT    # one GPU

The engines of all arms stay up and take turns. *packed* and *native* are recorders without drafts,
and *drafts* is the native recorder with three drafted tokens. All record sampling masks.
"""

import json
import os
import random
import statistics
import sys
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common import arguments, run_facts
from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Prompt
from keel.rollout.spec import EngineSpec, GroupRequest, env_vars

ARMS: dict[str, dict[str, Any]] = {
    "packed": {"recorder": "packed"},
    "native": {"recorder": "native"},
    "drafts": {"recorder": "native", "draft_tokens": 3},
}
TEMPERATURES = (1.0, 0.3)
SEQUENCES = (1, 8, 64)
TOKENS, CONTEXT = 400, 2048
START_S, RUN_S = 300.0, 120.0
NOUNS = "time person year way day thing man world life hand part child eye woman place work week"

_driver: Any
"""Engine of an arm's process."""


def sampling(temperature: float) -> SamplingConfig:
    return SamplingConfig(temperature=temperature, top_p=0.95, top_k=64, max_tokens=TOKENS)


def start(arm: str, model: str, log: Path) -> None:
    """Start an arm's engine in this process."""
    global _driver
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    gpu = torch.cuda.is_available()
    config = RolloutConfig(sampling=sampling(1.0), max_num_seqs=max(SEQUENCES), **ARMS[arm])
    os.environ |= env_vars(config, gpu=gpu)
    from keel.rollout.engine.vllm_engine import VllmEngine  # noqa: PLC0415
    from keel.rollout.engine.worker import EngineThread  # noqa: PLC0415

    spec = EngineSpec(
        model_path=model,
        tokenizer=model,
        config=config,
        dtype="bfloat16" if gpu else "float32",
        max_model_len=CONTEXT,
        seed=0,
        keep_routing=False,
        keep_sampling_mask=True,
        cache_bytes=2**33 if gpu else 2**28,
    )
    _driver = EngineThread(lambda: VllmEngine(spec), config)
    for kind in ("copy", "story"):  # compiles kernels
        for sequences in SEQUENCES:
            run(kind, sequences, 1.0, "warm")


def run(kind: str, sequences: int, temperature: float, salt: str) -> float:
    """Sample one completion of each prompt and return the tokens per second."""
    draw = random.Random(f"{kind} {sequences} {temperature} {salt}")
    nouns = NOUNS.split()
    requests: list[GroupRequest] = []
    for index in range(sequences):
        text = f"Write a long story about a {draw.choice(nouns)} and a {draw.choice(nouns)}."
        if kind == "copy":
            lines = [f"{line}. {' '.join(draw.choices(nouns, k=9))}" for line in range(20)]
            text = "\n".join(["Copy this text exactly, every line:", *lines])
        prompt = Prompt(
            prompt_id=f"{salt}-{index}",
            domain="benchmark",
            messages=({"role": "user", "content": text},),
        )
        requests.append(GroupRequest(prompt, 1))
    began = time.perf_counter()
    futures = [
        _driver.sample(request, sampling=sampling(temperature), record=True) for request in requests
    ]
    groups = [future.result(timeout=RUN_S).result() for future in futures]
    seconds = time.perf_counter() - began
    return sum(t.sampled_tokens for group in groups for t in group.trajectories) / seconds


def measure(
    arms: dict[str, ProcessPoolExecutor], options: Namespace, rows: list[dict[str, Any]]
) -> None:
    """Start all arms, let them take turns, print the mean speeds and add all speeds to `rows`."""
    ready = [
        process.submit(start, arm, options.model, options.out / f"log_{arm}.txt")
        for arm, process in arms.items()
    ]
    for future in ready:
        future.result(timeout=START_S)
    print(", ".join(f"{name} {value}" for name, value in run_facts().items()))
    print(f"| text | temperature | sequences | {' | '.join(arms)} |")
    print(f"|---|---|---|{'---|' * len(arms)}", flush=True)
    for kind, temperature, sequences in product(("copy", "story"), TEMPERATURES, SEQUENCES):
        load = kind, sequences, temperature
        speeds: dict[str, list[float]] = {arm: [] for arm in arms}
        for index in range(options.rounds):
            for arm, process in arms.items():
                speeds[arm].append(process.submit(run, *load, str(index)).result(timeout=RUN_S))
        rows.append({"load": load, "tokens_per_second": speeds})
        means = " | ".join(f"{statistics.mean(each):,.0f}" for each in speeds.values())
        print(f"| {kind} | {temperature} | {sequences} | {means} |", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="folder of an instruction-tuned model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    arms = {arm: ProcessPoolExecutor(1, get_context("spawn")) for arm in options.arms}
    rows: list[dict[str, Any]] = []
    try:
        measure(arms, options, rows)
    finally:
        for process in psutil.Process().children(recursive=True):
            process.kill()
        (options.out / "drafts.json").write_text(json.dumps({"facts": run_facts(), "rows": rows}))
    sys.stdout.flush()
    os._exit(0)  # the pools would wait for their processes


if __name__ == "__main__":
    main()
