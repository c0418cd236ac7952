"""Whole GRPO steps with every knob left to Keel, beside layouts tuned by hand.

    python -m benchmarks.auto --out OUT [--shapes 0.6b,1.7b,8b] [--seconds 540] [--steps 3]
    python -m benchmarks.auto --out OUT --shapes 30b-a3b-slice --layers 8       # on all GPUs

For each shape: a model with random weights, and `keel train` on the same prompts with all defaults,
with layouts set by hand, and with neighbours of what was chosen where `--arms` asks for more than
there are of these. Prints tokens per second, the peak memory of the GPU beside the plan's, and what
the default arm reaches of the best. An arm that does not end in its part of the time is ended, said
to be, and left out of that comparison. Without a GPU small shapes show that it works.
"""

from __future__ import annotations

import argparse
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
from transformers import AutoModelForCausalLM, PreTrainedConfig

from benchmarks.common.models import QWEN3_06B, QWEN3_8B, QWEN3_17B, QWEN3_30B_A3B, Mixture
from benchmarks.peers.keel_grpo import AUTO, read_steps, recipe, stop
from benchmarks.peers.memory import PeakMemory, gpu_reader, settled, tree_reader
from benchmarks.peers.shape import MARKS, TENTH, build_tokenizer, write_prompts
from benchmarks.peers.workload import QWEN3_06B as WORKLOAD
from benchmarks.peers.workload import SMALL, Workload
from keel.trainer.planning.remembered import CHOSEN

MADE_S = 300.0
"""Longest wait for a model to be made."""
LEAST_S = 45.0
"""An arm is not begun with less than this left."""
TUNED: Mapping[str, Any] = {
    "trainer.compile": True,
    "trainer.activation_checkpointing": False,
    "trainer.micro_batch_tokens": 17_280,
    "rollout.sleep": True,
    "trainer.offload_while_sampling": False,
    "rollout.gpu_memory_utilization": 0.14,
}
"""`keel-turns` of docs/performance.md, with the engine's share that a shape needs."""
WIDE: Mapping[str, Any] = {
    "trainer.compile": True,
    "trainer.activation_checkpointing": False,
    "trainer.micro_batch_tokens": 36_864,
    "rollout.sleep": False,
    "rollout.gpu_memory_utilization": 0.2,
}
PLAIN: Mapping[str, Any] = {**WIDE, "trainer.compile": False}
TURNS: Mapping[str, Any] = {
    "trainer.compile": True,
    "rollout.sleep": True,
    "trainer.offload_while_sampling": True,
    "rollout.gpu_memory_utilization": 0.31,
}
"""For a model whose trainer does not fit beside an engine that is awake."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    model: PreTrainedConfig
    arms: Mapping[str, Mapping[str, Any]]
    """Tuned by hand: knobs, by name."""
    workload: Workload = WORKLOAD


SHAPES = {
    "0.6b": Shape(model=QWEN3_06B, arms={"turns": TUNED, "wide": WIDE, "plain": PLAIN}),
    "1.7b": Shape(
        model=QWEN3_17B,
        arms={
            "turns": {**TUNED, "rollout.gpu_memory_utilization": 0.2},
            "wide": {**WIDE, "trainer.micro_batch_tokens": 32_256},
            "plain": {**PLAIN, "trainer.micro_batch_tokens": 18_432},
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
    "1.4b-a0.4b": Shape(
        model=Mixture().config(tie_word_embeddings=True),
        arms={
            "wide": {**WIDE, "rollout.gpu_memory_utilization": 0.15},
            "plain": {**PLAIN, "rollout.gpu_memory_utilization": 0.15},
            "turns": {**TUNED, "trainer.micro_batch_tokens": 36_864},
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
"""The last with as many of its layers as `--layers` says."""
TINY = Mixture(hidden=64, layers=2, experts=4, per_token=2, expert=32, vocabulary=2048)


@dataclass(kw_only=True)
class Arm:
    """What came of one."""

    name: str
    knobs: Mapping[str, Any]
    seconds: list[float] = field(default_factory=list[float])
    """Of each measured step."""
    rates: list[float] = field(default_factory=list[float])
    """Tokens a second of the same."""
    phases: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds, at the median."""
    peak_gib: float = 0.0
    start_s: float = 0.0
    """Until the first step began."""
    chosen: Mapping[str, Any] = field(default_factory=dict[str, Any])
    planned: str = ""
    """Engine and trainer rank in GiB, as `keel train` planned them."""
    failed: str = ""

    @property
    def rate(self) -> float:
        """Tokens a second, of the steps that there are."""
        return statistics.median(self.rates) if self.rates else 0.0

    def row(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases.items())
        took = f"{statistics.median(self.seconds):.2f}" if self.seconds else "—"
        return (
            f"| {self.name} | {took} | {self.rate:,.0f} | {phases} | {self.peak_gib:.1f} | "
            f"{self.planned} | {self.start_s:.0f} | {self.failed or 'ok'} |"
        )


def write_model(folder: Path, config: PreTrainedConfig, tokens: int, sharpness: float) -> None:
    """Random weights of any of the shapes, as far apart in their logits as a trained model's, none
    of which ends a completion: see `benchmarks.peers.shape.write_model`."""
    if (folder / "config.json").exists():
        return
    tokenizer = build_tokenizer(tokens)
    config.pad_token_id = MARKS.index("<|endoftext|>")
    config.eos_token_id = MARKS.index("<|im_end|>")
    config.bos_token_id = None
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows[: len(MARKS)] *= TENTH
        rows[tokens:] = 0
        model.get_output_embeddings().weight.copy_(rows)  # the same, or of their own
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= TENTH
            if hasattr(layer.mlp, "experts"):  # a token's are averaged, and narrow
                layer.mlp.experts.down_proj *= config.num_experts_per_tok
        spread = float(rows[len(MARKS) : tokens].float().std())
        model.model.norm.weight.fill_(sharpness / (spread * config.hidden_size**0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def made_apart(*arguments: Any) -> None:
    """`write_model` in a process of its own: one that has used a GPU holds half a GiB of it to its
    end, which the arms would take for another's."""
    process = multiprocessing.get_context("spawn").Process(target=write_model, args=arguments)
    process.start()
    process.join(MADE_S)
    if process.exitcode is None:
        process.kill()
        raise SystemExit(f"the model was not made within {MADE_S:g} s")
    if process.exitcode:
        raise SystemExit(f"the model could not be made: exit code {process.exitcode}")


def run(
    arm: Arm,
    made: dict[str, Any],
    out: Path,
    *,
    steps: int,
    limit_s: float,
    knobs: Sequence[str] = (),
) -> None:
    """`keel train`, until so many steps after a first one are done, or the time is up. knobs: on
    the command line, before the arm's own."""
    folder = Path(made["run"]["dir"])
    path, log = out / f"{folder.name}.yaml", out / f"{folder.name}.log"
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    given = [f"{knob}={str(value).lower()}" for knob, value in arm.knobs.items()]
    command = [sys.executable, "-m", "keel.trainer.cli", "train", str(path), *knobs, *given]
    began = time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    on_gpu = gpu_reader()
    read = on_gpu or tree_reader(lambda: process.pid if process else None)
    free = read()
    with PeakMemory(read, 0.05 if on_gpu else 0.5) as peak, log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                if len(read_steps(folder / "metrics.jsonl")) > steps:
                    break
                time.sleep(0.2)
        finally:
            stop(process)
    if on_gpu:
        settled(read, free)
    arm.peak_gib = peak.gib
    found = read_steps(folder / "metrics.jsonl")
    measured = found[1 : steps + 1]
    arm.seconds = [step.seconds for step in measured]
    arm.rates = [step.tokens / step.seconds for step in measured]
    if measured:
        names = {name: None for step in measured for name in step.phases}
        arm.phases = {n: statistics.median(s.phases.get(n, 0.0) for s in measured) for n in names}
        arm.start_s = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["time"]
        arm.start_s -= time.time() - (time.monotonic() - began)
    if (folder / CHOSEN).exists():
        arm.chosen = json.loads((folder / CHOSEN).read_text())["values"]
    text = log.read_text(errors="replace")
    sizes = re.findall(r"(?:GPU of an engine|engine|trainer rank): ([\d.]+ [GM]iB) each", text)
    arm.planned = " + ".join(sizes)
    if len(measured) < steps:
        last = [line for line in text.splitlines() if line.strip()]
        arm.failed = f"{len(measured)} of {steps} steps; {last[-1] if last else 'no output'}"[:300]


def neighbours(chosen: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Layouts beside the one that was chosen."""
    if "trainer.micro_batch_tokens" not in chosen:
        return {}
    tokens = chosen["trainer.micro_batch_tokens"]
    return {
        "half": {**chosen, "trainer.micro_batch_tokens": tokens // 2},
        "compile": {**chosen, "trainer.compile": not chosen["trainer.compile"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="", help=f"of {','.join(SHAPES)}; default: all")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything together")
    parser.add_argument("--arm-seconds", type=float, default=150.0, help="at most, for one arm")
    parser.add_argument("--steps", type=int, default=3, help="measured, after a first one")
    parser.add_argument("--layers", type=int, default=8, help="of 30b-a3b-slice")
    parser.add_argument("--set", nargs="*", default=[], help="knobs of all arms: KNOB=VALUE")
    parser.add_argument("--arms", type=int, default=2, help="beside the defaults, for each shape")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gpu, ends = torch.cuda.is_available(), time.monotonic() + options.seconds
    small = Shape(model=TINY.config(), arms={"half": {"trainer.micro_batch_tokens": 4096}})
    shapes = SHAPES if gpu else {"tiny": small}
    if options.shapes:
        shapes = {name: shapes[name] for name in options.shapes.split(",")}
    found: dict[str, list[Arm]] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        base = shape.workload if gpu else SMALL
        if name == "30b-a3b-slice":
            shape.model.num_hidden_layers = options.layers
            name = f"{name}-{options.layers}"
        model, prompts = options.out / name / "model", options.out / name / "prompts.jsonl"
        made_apart(model, shape.model, base.shape.tokens, base.sharpness)
        workload = replace(base, model=str(model), prompts=str(prompts))
        write_prompts(prompts, workload)
        arms = [Arm(name="defaults", knobs={})]
        found[name] = arms
        part = (ends - time.monotonic()) / (len(shapes) - number)
        until = time.monotonic() + part
        waiting = dict(list(shape.arms.items())[: options.arms])
        while True:
            arm, left = arms[-1], until - time.monotonic()
            if left < LEAST_S:
                arm.failed = "no time left for it"
            else:
                folder = options.out / name / f"run-{arm.name}-{int(time.time())}"
                made = recipe(workload, folder=folder, steps=100, gpu=gpu, arm=AUTO)
                limit = min(left, options.arm_seconds)
                run(
                    arm,
                    made,
                    options.out / name,
                    steps=options.steps,
                    limit_s=limit,
                    knobs=options.set,
                )
            print(f"{name}: {arm.row()}", flush=True)
            if arm.name == "defaults":
                beside = [*waiting.items(), *neighbours(arm.chosen).items()]
                waiting = dict(beside[: options.arms])
            content = {shape: [asdict(one) for one in those] for shape, those in found.items()}
            (options.out / "auto.json").write_text(json.dumps(content, indent=1) + "\n")
            if not waiting:
                break
            following = next(iter(waiting))
            arms.append(Arm(name=following, knobs=waiting.pop(following)))
    print(report(found))


def report(found: Mapping[str, list[Arm]]) -> str:
    lines: list[str] = []
    for name, arms in found.items():
        lines += [
            f"\n{name}",
            "| arm | s per step | tokens per second | phases, s | peak GiB | planned: engine + "
            "rank | start s | |",
            "|---|---|---|---|---|---|---|---|",
            *(arm.row() for arm in arms),
        ]
        default, whole = arms[0], [arm for arm in arms if not arm.failed]
        if default.failed or len(whole) < 2:
            lines.append("no verdict: it takes the defaults' steps and another arm's, all of them")
        else:
            best = max(whole, key=lambda arm: arm.rate)
            share = 100 * default.rate / best.rate
            lines.append(f"defaults reach {share:.1f} % of the best ({best.name})")
        lines += [f"  {knob} = {value}" for knob, value in default.chosen.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
