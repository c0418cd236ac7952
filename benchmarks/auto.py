"""Whole GRPO steps with automatic knobs, compared with layouts tuned by hand.

    python -m benchmarks.auto --out OUT [--shapes 0.6b,1.7b,8b] [--seconds 540] [--steps 3]
    python -m benchmarks.auto --out OUT --shapes 30b-a3b-slice --layers 8       # on all GPUs

`keel train` runs each shape with random weights and the same prompts, once with all defaults and
once per hand-tuned layout. Prints tokens per second, measured and planned peak memory, and the
speed of the defaults relative to the best arm. Arms that exceed their time limit are stopped and
excluded. Without a GPU a small shape serves as a smoke test.
"""

import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedConfig

from benchmarks.common import (
    QWEN3_06B,
    QWEN3_8B,
    QWEN3_17B,
    QWEN3_30B_A3B,
    Mixture,
    arguments,
)
from benchmarks.peers.keel_grpo import AUTO, read_steps, recipe, started_at, stop
from benchmarks.peers.memory import PeakMemory, gpu_reader, settled
from benchmarks.peers.shape import write_model, write_prompts
from benchmarks.peers.workload import QWEN3_06B as WORKLOAD
from benchmarks.peers.workload import SMALL, Workload
from keel.trainer.placement.choose import CACHE_FILE

BUILD_S = 300.0
MIN_ARM_S = 45.0
"""Minimum remaining seconds to start an arm."""
TUNED: Mapping[str, Any] = {
    "trainer.compile": True,
    "trainer.activation_checkpointing": False,
    "trainer.micro_batch_tokens": 17_280,
    "rollout.time_share": True,
    "trainer.offload_while_sampling": False,
    "rollout.gpu_memory_utilization": 0.14,
}
"""Engine and trainer take turns; the engine's share depends on the shape."""
WIDE: Mapping[str, Any] = {
    "trainer.compile": True,
    "trainer.activation_checkpointing": False,
    "trainer.micro_batch_tokens": 36_864,
    "rollout.time_share": False,
    "rollout.gpu_memory_utilization": 0.2,
}
TURNS: Mapping[str, Any] = {
    "trainer.compile": True,
    "rollout.time_share": True,
    "trainer.offload_while_sampling": True,
    "rollout.gpu_memory_utilization": 0.31,
}
"""Layout for a trainer that does not fit next to an active engine."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    model: PreTrainedConfig
    arms: Mapping[str, Mapping[str, Any]]
    """Hand-tuned layouts: knobs by name."""
    workload: Workload = WORKLOAD


SHAPES = {
    "0.6b": Shape(model=QWEN3_06B, arms={"turns": TUNED, "wide": WIDE}),
    "1.7b": Shape(
        model=QWEN3_17B,
        arms={
            "turns": {**TUNED, "rollout.gpu_memory_utilization": 0.2},
            "wide": {**WIDE, "trainer.micro_batch_tokens": 32_256},
        },
    ),
    "8b": Shape(
        model=QWEN3_8B,
        arms={
            "recomputed": {
                **TURNS,
                "trainer.activation_checkpointing": True,
                "trainer.micro_batch_tokens": 18_432,
            },
            "narrow": {
                **TURNS,
                "trainer.activation_checkpointing": False,
                "trainer.micro_batch_tokens": 3_456,
            },
        },
    ),
    "30b-a3b-slice": Shape(
        model=QWEN3_30B_A3B,
        arms={"spread": {"trainer.expert_parallel": 2}},
        workload=replace(
            WORKLOAD, prompts_per_step=32, group_size=8, prompt_tokens=128, completion_tokens=1920
        ),
    ),
}
"""30b-a3b-slice has the first `--layers` layers of the model."""
TINY = Mixture(hidden=64, layers=2, experts=4, per_token=2, expert=32, vocabulary=2048)


@dataclass(kw_only=True)
class Arm:
    """A layout and its measurements."""

    name: str
    knobs: Mapping[str, Any]
    seconds: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])
    phases: dict[str, float] = field(default_factory=dict[str, float])
    """Median seconds by phase."""
    peak_gib: float = 0.0
    start_s: float = 0.0
    """Seconds until the first step."""
    chosen: Mapping[str, Any] = field(default_factory=dict[str, Any])
    planned: str = ""
    """Planned GiB of engine and trainer rank, from the output of `keel train`."""
    failed: str = ""

    @property
    def rate(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.rates) if self.rates else 0.0

    def row(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases.items())
        took = f"{statistics.median(self.seconds):.2f}" if self.seconds else "—"
        return (
            f"| {self.name} | {took} | {self.rate:,.0f} | {phases} | {self.peak_gib:.1f} | "
            f"{self.planned} | {self.start_s:.0f} | {self.failed or 'ok'} |"
        )


def write_apart(folder: Path, config: PreTrainedConfig, base: Workload) -> None:
    """Call `write_model` in another process, so that this one holds no GPU memory."""
    if (folder / "config.json").exists():
        return
    process = multiprocessing.get_context("spawn").Process(
        target=write_model,
        args=(folder, config, base.shape.tokens),
        kwargs={"seed": 0, "sharpness": base.sharpness},
    )
    process.start()
    process.join(BUILD_S)
    if process.exitcode != 0:
        process.kill()
        raise SystemExit(f"building the model failed, or took longer than {BUILD_S:g} s")


def run(
    arm: Arm, content: dict[str, Any], *, steps: int, limit_s: float, knobs: Sequence[str] = ()
) -> None:
    """Run `keel train` for one warm-up step and `steps` measured steps, or for `limit_s` seconds.

    knobs: overrides that precede the arm's.
    """
    folder = Path(content["run"]["dir"])
    path, log = folder.with_suffix(".yaml"), folder.with_suffix(".log")
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    own = [f"{knob}={str(value).lower()}" for knob, value in arm.knobs.items()]
    command = [sys.executable, "-m", "keel.commands.cli", "train", str(path), *knobs, *own]
    began = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    with PeakMemory(lambda: process.pid if process else None) as peak, log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                if len(read_steps(folder / "metrics.jsonl")) > steps:
                    break
                time.sleep(0.2)
        finally:
            stop(process)
    if read := gpu_reader():
        settled(read, peak.before)
    arm.peak_gib = peak.gib
    measured = read_steps(folder / "metrics.jsonl")[1 : steps + 1]
    arm.seconds = [step.seconds for step in measured]
    arm.rates = [step.tokens / step.seconds for step in measured]
    if measured:
        names = {name: None for step in measured for name in step.phases}
        arm.phases = {n: statistics.median(s.phases.get(n, 0.0) for s in measured) for n in names}
        wall_began = time.time() - (time.monotonic() - began)
        arm.start_s = started_at(folder / "metrics.jsonl") - wall_began
    if (folder / CACHE_FILE).exists():
        arm.chosen = json.loads((folder / CACHE_FILE).read_text())["values"]
    text = log.read_text(errors="replace")
    sizes = re.findall(r"(?:GPU of an engine|engine|trainer rank): ([\d.]+ [GM]iB) each", text)
    arm.planned = " + ".join(sizes)
    if len(measured) < steps:
        last = [line for line in text.splitlines() if line.strip()]
        arm.failed = f"{len(measured)} of {steps} steps; {last[-1] if last else 'no output'}"[:300]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="", help=f"of {','.join(SHAPES)}; default: all")
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit for everything")
    parser.add_argument("--arm-seconds", type=float, default=150.0, help="time limit for one arm")
    parser.add_argument("--steps", type=int, default=3, help="measured steps after a first one")
    parser.add_argument("--layers", type=int, default=8, help="layers of 30b-a3b-slice")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KNOB=VALUE", help="knobs of all arms"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gpu, ends = torch.cuda.is_available(), time.monotonic() + options.seconds
    small = Shape(model=TINY.config(), arms={"half": {"trainer.micro_batch_tokens": 4096}})
    shapes = SHAPES if gpu else {"tiny": small}
    if options.shapes:
        shapes = {name: shapes[name] for name in options.shapes.split(",")}
    results: dict[str, list[Arm]] = {}
    print(
        "| arm | s per step | tokens per second | phases, s | peak GiB | planned GiB | start s | |"
    )
    for number, (name, shape) in enumerate(shapes.items()):
        base = shape.workload if gpu else SMALL
        if name == "30b-a3b-slice":
            shape.model.num_hidden_layers = options.layers
            name = f"{name}-{options.layers}"
        model, prompts = options.out / name / "model", options.out / name / "prompts.jsonl"
        write_apart(model, shape.model, base)
        workload = replace(base, model=str(model), prompts=str(prompts))
        write_prompts(prompts, workload)
        arms = [Arm(name="defaults", knobs={})]
        arms += [Arm(name=each, knobs=knobs) for each, knobs in shape.arms.items()]
        results[name] = arms
        until = time.monotonic() + (ends - time.monotonic()) / (len(shapes) - number)
        for arm in arms:
            remaining = until - time.monotonic()
            if remaining < MIN_ARM_S:
                arm.failed = "no time left"
            else:
                folder = options.out / name / f"run-{arm.name}-{int(time.time())}"
                content = recipe(workload, folder=folder, steps=100, gpu=gpu, arm=AUTO)
                limit_s = min(remaining, options.arm_seconds)
                run(arm, content, steps=options.steps, limit_s=limit_s, knobs=options.set)
            print(f"{name}: {arm.row()}", flush=True)
            rows = {shape: [asdict(one) for one in some] for shape, some in results.items()}
            (options.out / "auto.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(verdict(arms), flush=True)


def verdict(arms: Sequence[Arm]) -> str:
    """Compare the defaults with the best arm, and list their settings."""
    default, whole = arms[0], [arm for arm in arms if not arm.failed]
    line = "no verdict: it needs all steps of the defaults and of another arm"
    if not default.failed and len(whole) > 1:
        best = max(whole, key=lambda arm: arm.rate)
        share = 100 * default.rate / best.rate
        line = f"defaults reach {share:.1f} % of the best ({best.name})"
    return "\n".join([line, *(f"  {knob} = {value}" for knob, value in default.chosen.items())])


if __name__ == "__main__":
    main()
