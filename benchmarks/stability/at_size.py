r"""What each stabiliser does at a hundred million parameters in bfloat16: `keel train` as it is.

    python -m benchmarks.stability.at_size --out OUT --gpus 0,1 --at-once 4
    python -m benchmarks.stability.at_size --out OUT --seeds 0 --only stale \
        --try 'stale/δ = 1: algorithm.mask_delta=1'
    python -m benchmarks.stability.at_size --out OUT --small --seeds 0 --only stale    # on a CPU

Every run is the recipe `embedded-100m` with the overrides of its experiment and arm. The model of
each seed is taught once; then `--at-once` runs share a GPU, so their times say nothing. `--try`
adds an arm to an experiment. A finished run is a line of `runs.jsonl` under OUT, in the form of
benchmarks/stability/__main__.py, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.revision import commit
from benchmarks.stability.report import write_report

PASS = "/pass@1"
UNSOUND = "algorithm.allow_unsound=true"
NO_ROUTES = ("algorithm.keep_routing=false", UNSOUND)
NO_SETS = ("algorithm.keep_sampling_mask=false", UNSOUND)
SMALL = (
    "run.device=cpu",
    "model.embedded.cold_start.steps=5",
    "data.sources[spelling].holdout=8",
    "data.sources[spiral].holdout=8",
)
ON_A_GPU = ("run.eval_every=12", "rollout.sleep=false", "trainer.compile=false")
STAGGER_S = 6.0
"""Between two starts on one GPU: an engine that starts measures the memory that is free."""
TRIES = 2


@dataclass(frozen=True)
class Experiment:
    """Arms that differ in one thing, and what they have in common."""

    steps: int
    overrides: Sequence[str]
    arms: Mapping[str, Sequence[str]]


def beta(value: float) -> tuple[str, ...]:
    """The KL coefficient of all sources."""
    names = ("spelling", "spiral", "sums", "gcd")
    return tuple(f"data.sources[{name}].kl_coef={value:g}" for name in names)


STALE = ("trainer.lr=1e-4", "algorithm.updates_per_batch=4", "algorithm.publish_every=8")
EXPERIMENTS: Mapping[str, Experiment] = {
    "fresh": Experiment(steps=48, overrides=(), arms={"recipe": ()}),
    "stale": Experiment(
        steps=48,
        overrides=STALE,
        arms={
            "δ = 0.2": (),
            "no sequence mask": ("algorithm.mask_delta=null",),
            "no routing replay": NO_ROUTES,
            "no sampling mask": NO_SETS,
        },
    ),
    "kl": Experiment(
        steps=48,
        overrides=(*STALE, *beta(0.1)),
        arms={"unbiased_k3": (), "k3": ("algorithm.kl=k3",)},
    ),
    "hot": Experiment(
        steps=48,
        overrides=("rollout.sampling.temperature=1.5", "rollout.sampling.top_p=0.8"),
        arms={"sampling mask": (), "no sampling mask": NO_SETS},
    ),
}


@dataclass(frozen=True)
class Run:
    experiment: str
    arm: str
    seed: int
    steps: int
    overrides: tuple[str, ...]


@dataclass
class Machine:
    """GPUs (`""`: a CPU) with places for runs, and the time of the last start on each."""

    gpus: Sequence[str]
    at_once: int
    places: queue.Queue[str] = field(default_factory=queue.Queue)
    turns: dict[str, threading.Lock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for gpu in [*self.gpus] * self.at_once:
            self.places.put(gpu)
        self.turns = {gpu: threading.Lock() for gpu in self.gpus}


def command(options: argparse.Namespace, seed: int, overrides: Sequence[str]) -> list[str]:
    recipe = "quickstart" if options.small else "embedded-100m"
    keel = [sys.executable, "-m", "keel.trainer.cli", "train", recipe, f"run.seed={seed}"]
    keel += [f"model.embedded.cache_dir={options.out / 'models'}"]
    return [*keel, *(SMALL if options.small else ON_A_GPU), *overrides]


def carried_out(options: argparse.Namespace, machine: Machine, run: Run) -> dict[str, Any] | None:
    """The run's line, or None where it failed twice."""
    name = "-".join([run.experiment, run.arm, str(run.seed)])
    name = "".join(letter if letter.isalnum() else "_" for letter in name)
    gpu = machine.places.get()
    try:
        for attempt in range(TRIES):
            folder = options.out / "runs" / f"{name}.{attempt}"
            with machine.turns[gpu]:
                time.sleep(STAGGER_S if gpu else 0)
            began = time.monotonic()
            code = called(options, run, folder, gpu)
            if code == 0:
                return {
                    "experiment": run.experiment,
                    "arm": run.arm,
                    "seed": run.seed,
                    "steps": run.steps,
                    "recipe": "quickstart" if options.small else "embedded-100m",
                    "overrides": list(run.overrides),
                    "revision": commit(),
                    "seconds": round(time.monotonic() - began),
                    "curves": curves(folder / "metrics.jsonl"),
                }
            print(f"{name}: exit code {code}, see {folder}.log", flush=True)
    finally:
        machine.places.put(gpu)
    return None


def called(options: argparse.Namespace, run: Run, folder: Path, gpu: str) -> int:
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = options.scratch / f"r{abs(hash(folder)) % 10**6}"
    own.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "RAY_TMPDIR": str(own)}
    knobs = [*run.overrides, f"run.steps={run.steps}", f"run.dir={folder}"]
    with Path(f"{folder}.log").open("w") as log:
        return subprocess.run(
            command(options, run.seed, knobs),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=options.seconds,
            check=False,
        ).returncode


def curves(path: Path) -> dict[str, dict[str, float]]:
    """Metric → step → value; `heldout`: the mean of pass@1 over the held-out sets."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for text in path.read_text().splitlines():
        line: dict[str, float] = json.loads(text)
        step = str(int(line.pop("step")))
        passed = [value for name, value in line.items() if name.endswith(PASS)]
        if passed:
            line["heldout"] = sum(passed) / len(passed)
        for name, value in line.items():
            if isinstance(value, int | float):
                found[name][step] = float(f"{value:.4g}")
    return found


def teach(options: argparse.Namespace, gpus: Sequence[str]) -> None:
    """The model of every seed, side by side: none of them fills a GPU."""
    options.out.mkdir(parents=True, exist_ok=True)
    started = []
    for number, seed in enumerate(options.seeds):
        code = (
            "import sys; from keel.trainer.prepare import prepare; "
            "from keel.trainer.system import model_folder; "
            "print(model_folder(prepare(sys.argv[1], sys.argv[2:])))"
        )
        words = command(options, seed, ())[4:]
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *words],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]},
            )
        )
    if any(process.wait(timeout=options.seconds) for process in started):
        raise SystemExit("a cold start failed")


def summary(line: Mapping[str, Any]) -> str:
    ends = {
        name: list(line["curves"][name].values())[-1]
        for name in ("heldout", "reward/mean", "mismatch/ratio_mean", "mask/sequence_fraction")
        if line["curves"].get(name)
    }
    said = "  ".join(f"{name} {value:.3g}" for name, value in ends.items())
    return f"{line['experiment']} / {line['arm']} / {line['seed']}: {said}, {line['seconds']} s"


def wanted(options: argparse.Namespace, done: set[tuple[str, str, int]]) -> list[Run]:
    arms = {
        (name, arm): knobs
        for name in options.only
        for arm, knobs in EXPERIMENTS[name].arms.items()
        if options.arms is None or arm in options.arms
    }
    for text in options.tried:
        where, knobs = text.split(": ", 1)
        name, arm = where.split("/", 1)
        arms[name, arm] = knobs.split()
    runs = []
    for seed in options.seeds:
        for (name, arm), knobs in arms.items():
            if (name, arm, seed) not in done:
                experiment = EXPERIMENTS[name]
                steps = options.steps or experiment.steps
                runs.append(Run(name, arm, seed, steps, (*experiment.overrides, *knobs)))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/keel-at-size"))
    parser.add_argument("--gpus", default="0", help="such as 0,1")
    parser.add_argument("--at-once", type=int, default=4, help="runs that share a GPU")
    parser.add_argument("--only", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--arms", nargs="*", help="only these arms")
    parser.add_argument(
        "--try", dest="tried", action="append", default=[], metavar="EXPERIMENT/ARM: KNOBS"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of each experiment's own number")
    parser.add_argument("--seconds", type=float, default=900, help="longest time of a run")
    parser.add_argument("--small", action="store_true", help="the quickstart's model, on a CPU")
    parser.add_argument("--report", type=Path, help="folder for docs/stability; default: none")
    options = parser.parse_args()
    options.out = options.out.resolve()
    gpus = [""] if options.small else options.gpus.split(",")
    teach(options, gpus)
    path = options.out / "runs.jsonl"
    known = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    runs = wanted(options, {(each["experiment"], each["arm"], each["seed"]) for each in known})
    machine = Machine(gpus, 1 if options.small else options.at_once)
    writing = threading.Lock()

    def one(run: Run) -> bool:
        line = carried_out(options, machine, run)
        if line is not None:
            with writing, path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(summary(line), flush=True)
        return line is not None

    with ThreadPoolExecutor(len(gpus) * machine.at_once) as pool:
        finished = list(pool.map(one, runs))
    if options.report:
        write_report(path, options.report)
    if not all(finished):
        raise SystemExit(f"{finished.count(False)} of {len(finished)} runs failed")


if __name__ == "__main__":
    main()
