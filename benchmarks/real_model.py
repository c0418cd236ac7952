"""A pretrained model trained by Keel and TRL on the same prompts and the same rule as reward.

    python -m benchmarks.real_model --model FOLDER --out OUT --arms keel trl --seeds 0 1 2
    python -m benchmarks.real_model --model FOLDER --out OUT --arms keel-lora trl-lora --lr 1e-4
    python -m benchmarks.real_model --model tiny --out OUT --small --arms keel --steps 2    # a CPU
    python -m benchmarks.real_model --out OUT --report

The reward is 1 if the last number in the completion is correct. `--tasks arithmetic` asks for sums,
differences and products of two numbers; `hard` mixes five tasks of reasoning_gym. Arms that test a
stabiliser (`stale-…`, `cut-…`) come in pairs, with and without it. TRL's arms need
requirements/peers.txt, and trl-lora needs peft.

Each run is a separate process. Up to `--parallel` runs are distributed over the visible GPUs. Each
step is appended to OUT/<tasks>-<arm>-<seed>.jsonl when it ends, and the last line records how the
run ended. Completed runs are skipped. Compare times and memory only between runs that had a GPU to
themselves. `--report` prints a table and writes OUT/curves.jsonl.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

from benchmarks.common import arguments, commit
from benchmarks.peers.compare import last_line, watch
from benchmarks.peers.memory import gpu_reader
from benchmarks.peers.workload import SMALL, Workload
from benchmarks.real_tasks import TASKS, calculator_knobs, write_prompts

RANK = 16
WARMUP = 2
"""Number of first steps to exclude from the time per step."""
T_95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""
SHOWN = {
    "reward": ("reward/mean", "reward"),
    "mismatch": ("mismatch/logp_abs", "sampling/sampling_logp_difference/mean"),
}
"""Curve → its metric in Keel and in TRL."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    knobs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keel's knobs beyond the common ones."""
    trl: bool = False
    lora: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the workload."""


STALE = {"algorithm.max_lag": 4, "algorithm.updates_per_batch": 4}
CUT = {"top_p": 0.9, "top_k": 64}
UNSOUND = {"algorithm.keep_sampling_mask": False, "algorithm.allow_unsound": True}
ARMS: Mapping[str, Arm] = {
    "keel": Arm(),
    "trl": Arm(trl=True),
    "keel-lora": Arm(lora=True),
    "trl-lora": Arm(trl=True, lora=True),
    "keel-float16": Arm(knobs={"model.dtype": "float16"}),
    "keel-residual": Arm(knobs={"model.dtype": "float16", "model.residual_dtype": "float32"}),
    "keel-lag1": Arm(knobs={"algorithm.max_lag": 1}),
    "keel-lag2": Arm(knobs={"algorithm.max_lag": 2}),
    "keel-lag4": Arm(knobs={"algorithm.max_lag": 4}),
    "keel-updates4": Arm(knobs={"algorithm.updates_per_batch": 4}),
    "keel-agent": Arm(knobs=calculator_knobs("peers")),
    "stale-masked": Arm(knobs=STALE),
    "stale-unmasked": Arm(knobs={**STALE, "algorithm.mask_delta": None}),
    "cut-replayed": Arm(sampling=CUT),
    "cut-unreplayed": Arm(sampling=CUT, knobs=UNSOUND),
    "stale-cut-replayed": Arm(sampling=CUT, knobs=STALE),
    "stale-cut-penalty": Arm(sampling=CUT, knobs={**STALE, "algorithm.kept_mass_coef": 1.0}),
    "stale-cut-unreplayed": Arm(sampling=CUT, knobs={**STALE, **UNSOUND}),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    arm: str
    seed: int
    tasks: str

    @property
    def name(self) -> str:
        return f"{self.tasks}-{self.arm}-{self.seed}"


def workload_of(run: Run, options: argparse.Namespace) -> Workload:
    arm = ARMS[run.arm]
    workload = Workload(
        shape=SMALL.shape,  # unused
        prompts_per_step=options.prompts,
        group_size=options.group,
        prompt_tokens=options.prompt_tokens,
        completion_tokens=options.tokens,
        top_p=1.0,
        top_k=0,
        kl_coef=0.0,
        mask_delta=0.2,
        lr=options.lr or (1e-4 if arm.lora else 1e-5),
        seed=run.seed,
        model=options.model,
        prompts=str(options.out / f"{run.tasks}.prompts"),
        reward="number",
        lora_rank=RANK if arm.lora else 0,
    )
    return replace(workload, **arm.sampling)


def missing(run: Run) -> str:
    """Name the package that an arm lacks, if any."""
    arm = ARMS[run.arm]
    needed = ["trl", "datasets"] * arm.trl + ["peft"] * arm.lora
    absent = [name for name in needed if find_spec(name) is None]
    hint = "; pip install -r requirements/peers.txt" if arm.trl else ""
    return f"{run.arm} needs {' and '.join(absent)}{hint}" if absent else ""


def command(run: Run, options: argparse.Namespace, folder: Path) -> list[str]:
    arm, workload = ARMS[run.arm], folder / "workload.json"
    workload_of(run, options).save(workload)
    module, name = ("trl_grpo", "trl-real") if arm.trl else ("keel_grpo", "keel-auto")
    common = {"run.gpu_gib": options.gib} if options.gib else {}
    common |= {"model.tiny.cold_start.steps": 0} if options.model == "tiny" else {}
    knobs = [f"{knob}={json.dumps(value)}" for knob, value in {**common, **arm.knobs}.items()]
    return [
        *(sys.executable, "-m", f"benchmarks.peers.{module}", f"--arm={name}", "--warmup=0"),
        *(f"--workload={workload}", f"--out={folder / 'arm.json'}", f"--steps={options.steps}"),
        *([] if arm.trl else [f"--scratch={folder}", *knobs, *options.set]),
    ]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a run's steps."""
    text = path.read_text() if path.exists() else ""
    rows = map(json.loads, text.split("\n")[:-1])
    return [row for row in rows if "step" in row]


class Lines:
    """Copies the steps of an arm's result file to the lines of its run."""

    def __init__(self, run: Run, source: Path, target: Path) -> None:
        self._run, self._source, self._target = run, source, target
        self.steps = 0
        target.unlink(missing_ok=True)

    def update(self, peak_gib: float, *, ended: bool = False) -> None:
        """Write the new steps. TRL's metrics come after its times, so wait for them."""
        steps = json.loads(self._source.read_text())["steps"] if self._source.exists() else []
        for step in steps[self.steps :]:
            notes = step["notes"]
            if not (ended or any(name in notes for name in SHOWN["reward"])):
                return
            self.steps += 1
            row = {name: step[name] for name in ("step", "seconds", "tokens", "phases")}
            for curve, metrics in SHOWN.items():
                row[curve] = next((notes[name] for name in metrics if name in notes), None)
            self.write({**asdict(self._run), **row, "peak_gib": round(peak_gib, 2), "notes": notes})

    def write(self, row: Mapping[str, Any]) -> None:
        with self._target.open("a") as file:
            file.write(json.dumps(row) + "\n")


def perform(run: Run, options: argparse.Namespace, gpu: str, stop: Event) -> str:
    """Do one run on GPUs ("0" or "0,1"; empty: without) and return what went wrong, if anything."""
    if why := missing(run):
        return why
    folder = Path(tempfile.mkdtemp(prefix="real-"))
    lines = Lines(run, folder / "arm.json", options.out / f"{run.name}.jsonl")
    log, words = options.out / f"{run.name}.log", command(run, options, folder)

    def tick(peak_gib: float) -> bool:
        lines.update(peak_gib)
        return not stop.is_set()

    status, wall_s, peak = watch(words, log, timeout_s=options.run_s, gpu=gpu, tick=tick)
    lines.update(peak.gib, ended=True)
    whole = lines.steps >= options.steps
    reason = "" if whole else last_line(log) if status == "failed" else status
    why = "" if whole else f"{lines.steps} of {options.steps} steps: {reason}"
    content = json.loads((folder / "arm.json").read_text()) if lines.steps else {}
    facts = {"commit": commit(), "gpus": gpu, "runs at once": options.parallel, "wall_s": wall_s}
    facts |= {name: content.get(name) for name in ("versions", "settings", "first_step_at")}
    lines.write({"ended": why or "done", **facts, "command": words[3:]})
    shutil.rmtree(folder)
    return why


def perform_all(options: argparse.Namespace) -> int:
    """Do the missing runs and return the number of failures."""
    write_prompts(options.out / f"{options.tasks}.prompts", options.tasks, small=options.small)
    gpus = visible_gpus(options.gpus_per_run)
    slots: SimpleQueue[str] = SimpleQueue()
    for index in range(options.parallel):
        slots.put(gpus[index % len(gpus)])
    stop = Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def one(run: Run) -> str:
        gpu = slots.get()
        try:
            if stop.is_set():
                return "no time left"
            print(f"{run.name}: started on {gpu or 'CPUs'}", flush=True)
            why = perform(run, options, gpu, stop)
            print(f"{run.name}: {why or 'done'}", flush=True)
            return why
        finally:
            slots.put(gpu)

    pairs = product(options.seeds, options.arms)
    runs = [Run(arm=arm, seed=seed, tasks=options.tasks) for seed, arm in pairs]
    runs = [run for run in runs if not finished(run, options)]
    with ThreadPoolExecutor(options.parallel) as pool:
        futures = [pool.submit(one, run) for run in runs]
        try:
            wait(futures, timeout=options.seconds)
        finally:
            stop.set()
    return sum(bool(future.result()) for future in futures)


def visible_gpus(per_run: int) -> list[str]:
    """List the ids of the visible GPUs in groups of `per_run` ("0,1"); [""] without a GPU."""
    if gpu_reader() is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return [""]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    ids = visible.split(",") if visible else map(str, range(64))
    found = [each for each in ids if gpu_reader(each) is not None]
    if len(found) < per_run:
        raise SystemExit(f"--gpus-per-run {per_run}: only {len(found)} GPUs are visible")
    return [",".join(found[i : i + per_run]) for i in range(0, len(found) - per_run + 1, per_run)]


def finished(run: Run, options: argparse.Namespace) -> bool:
    return len(read_steps(options.out / f"{run.name}.jsonl")) >= options.steps


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean, over seeds; NaN for one seed."""
    number = len(values)
    quantile = T_95.get(number - 1, 2.0)
    return quantile * statistics.stdev(values) / math.sqrt(number) if number > 1 else math.nan


def report(out: Path, last: int) -> str:
    """Return a table of all runs in a folder, and write their curves."""
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    curves: list[dict[str, Any]] = []
    for path in sorted(out.glob("*.jsonl")):
        if not (steps := read_steps(path)):
            continue
        head = {name: steps[0][name] for name in ("tasks", "arm", "seed")}
        groups.setdefault(f"{head['tasks']} | {head['arm']}", []).append(steps)
        for curve in SHOWN:
            head[curve] = [value and round(value, 4) for value in (s[curve] for s in steps)]
        curves.append(head)
    (out / "curves.jsonl").write_text("".join(json.dumps(curve) + "\n" for curve in curves))
    lines = [
        f"| tasks | arm | seeds | steps | reward, first {last} | last {last} | 95 % over seeds "
        "| s per step | mismatch | peak GiB |",
        "|---" * 10 + "|",
    ]
    for name, runs in groups.items():
        shortest = min(map(len, runs))
        first, late = (
            [statistics.fmean(s["reward"] for s in steps[part]) for steps in runs]
            for part in (slice(0, last), slice(max(0, shortest - last), shortest))
        )
        seconds = [statistics.median(s["seconds"] for s in r[WARMUP:] or r) for r in runs]
        gaps = [s["mismatch"] for steps in runs for s in steps if s["mismatch"] is not None]
        gap = f"{statistics.median(gaps):.2g}" if gaps else "–"
        lines.append(
            f"| {name} | {len(runs)} | {shortest} | {statistics.fmean(first):.3f} "
            f"| {statistics.fmean(late):.3f} | ± {interval(late):.3f} "
            f"| {statistics.median(seconds):.2f} | {gap} | {max(r[-1]['peak_gib'] for r in runs)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="", help="model folder, or `tiny`")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["keel"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tasks", choices=list(TASKS), default="arithmetic")
    parser.add_argument("--lr", type=float, default=0.0, help="default: 1e-5, LoRA 1e-4")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per completion")
    parser.add_argument("--prompt-tokens", type=int, default=192, help="maximum tokens per prompt")
    parser.add_argument("--small", action="store_true", help="4 × 2 completions of 16 tokens")
    parser.add_argument("--parallel", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--gpus-per-run", type=int, default=1)
    parser.add_argument("--gib", type=float, default=0.0, help="`run.gpu_gib` of Keel's arms")
    parser.add_argument("--seconds", type=float, default=1e9, help="time limit for all runs")
    parser.add_argument("--run-s", type=float, default=1e9, help="time limit per run")
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    parser.add_argument("--report", action="store_true", help="print the report without running")
    parser.add_argument("--last", type=int, default=10, help="steps to average at both ends")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    if not options.report:
        if options.model != "tiny":
            options.model = str(Path(options.model).resolve())
            if not (Path(options.model) / "config.json").exists():
                parser.error(f"--model {options.model} has no config.json")
        if options.small:
            options.prompts, options.group, options.tokens = 4, 2, 16
        failed = perform_all(options)
    print(report(options.out, options.last))
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
