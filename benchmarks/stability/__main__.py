"""What each stabiliser does, seen on embedded models: real engine, real trainer, three seeds.

    python -m benchmarks.stability --out runs/stability --report docs/stability    # the small one
    python -m benchmarks.stability --out runs/stability --only staleness --seeds 0 --steps 10
    CUDA_VISIBLE_DEVICES=0 python -m benchmarks.stability --out OUT --recipe embedded-100m
    … --only stale_100m --try 'stale_100m/δ = 1: algorithm.mask_delta=1'

Every run is a recipe, `quickstart` on a CPU or `embedded-100m` on a GPU, with the overrides of its
experiment and arm (`experiments.py`), which the report lists. `--try` adds an arm. A run goes
through `keel.trainer.loop` as in `keel train`, with one difference: the trainer's engine lives in
this process and vLLM actors are kept from run to run (each run begins by loading its own initial
weights), because starting them would take longer than many a run.

A finished run is a line of `runs.jsonl` in the output folder; what is there already, of this
commit, is not run again. The line of another commit goes to `replaced.jsonl` once the same run has
been done at this one; with `--revisions` those of some count, too. `report.py` turns the lines into
`docs/stability`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before torch and DeepSpeed are imported; see `keel.trainer.worker`.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not os.environ.setdefault("CUDA_VISIBLE_DEVICES", ""):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import ray
import torch

from benchmarks.common.in_process import Engines, LocalLearner
from benchmarks.common.revision import commit
from benchmarks.stability.experiments import COMMON, EXPERIMENTS, LARGE, SMALL
from benchmarks.stability.gradients import Probe
from benchmarks.stability.report import write_report
from keel.rewards.scorer import Scorer
from keel.rl.metrics import Metric, values
from keel.rl.types import ScoredGroup
from keel.trainer import loop
from keel.trainer.cluster.nodes import start_ray
from keel.trainer.prepare import prepare
from keel.trainer.system import System, model_folder


@dataclass(frozen=True)
class Run:
    experiment: str
    arm: str
    seed: int
    steps: int
    knobs: tuple[str, ...]
    """Of the arm."""


@dataclass
class Curves:
    """The loop's journal: keeps each step's numbers."""

    name: str
    learner: LocalLearner
    probe: Probe | None
    values: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def begin(self, activity: str) -> None:
        pass

    def reach(self, done: int, total: int, unit: str) -> None:
        pass

    def evaluated(self, step: int) -> bool:
        return step in self.values["heldout"]

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        sample: Sequence[ScoredGroup],
        discarded: Sequence[ScoredGroup] = (),
    ) -> None:
        for name, value in values(metrics).items():
            self.values[name][step] = value
        passed = [v for k, v in values(metrics).items() if k.endswith("/pass@1")]
        if passed:
            self.values["heldout"][step] = sum(passed) / len(passed)
        if self.probe is not None:
            self.probe.record(step, self.learner.engine, sample)
        shown = ("reward/mean", "heldout", "time/step")
        text = "  ".join(f"{n} {self.values[n][step]:.3f}" for n in shown if step in self.values[n])
        print(f"{self.name}  step {step}  {text}", flush=True)


def run_arm(run: Run, engines: Engines, folder: Path) -> dict[str, Any]:
    """One run, from the cold-started model of its seed. Returns its line of `runs.jsonl`."""
    spec, arm, overrides = EXPERIMENTS[run.experiment], run.arm, overrides_of(run)
    changes = [*overrides, f"run.seed={run.seed}", f"run.steps={run.steps}"]
    task = prepare(spec.recipe, changes)
    config = task.config
    model = model_folder(task)
    began = time.monotonic()
    gc.collect()  # the run before's engine, which refers to itself
    learner = LocalLearner(model, config)
    pool = engines.ready(task, model, learner)
    probe = Probe(folder / "policies", reference=model) if arm == spec.probe else None
    curves = Curves(f"{run.experiment} / {arm} / {run.seed}", learner, probe)
    rewards = config.rewards
    with Scorer(
        config.data.rewards_by_domain, workers=rewards.workers, deadline_s=rewards.deadline_s
    ) as scorer:
        system = System(task=task, pool=pool, ranks=learner, scorer=scorer)  # type: ignore[arg-type]
        parts = loop.Parts(
            prompts=task.dataset.train,
            rollouts=system,
            rewards=scorer,
            learner=learner,
            journal=curves,
            heldout=task.dataset.heldout,
            save=lambda step, unfinished: None,
            keep=lambda step, groups, findings: None,
            stop=lambda: False,
        )
        loop.train(parts, config)
    line: dict[str, Any] = {
        "experiment": run.experiment,
        "arm": arm,
        "seed": run.seed,
        "steps": run.steps,
        "recipe": spec.recipe,
        "overrides": overrides,
        "revision": commit(),
        "seconds": round(time.monotonic() - began),
        "curves": {
            name: {step: float(f"{value:.4g}") for step, value in points.items()}
            for name, points in curves.values.items()
        },
    }
    if probe is not None:
        line["gradients"] = probe.measure()
    return line


def overrides_of(run: Run) -> list[str]:
    spec = EXPERIMENTS[run.experiment]
    return [*COMMON[spec.recipe], *spec.overrides, *run.knobs]


def done_runs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_of(line: Mapping[str, Any], run: Run) -> bool:
    """Whether it is a line of the same seed, length and knobs, of whatever commit."""
    asked = {
        "experiment": run.experiment,
        "arm": run.arm,
        "seed": run.seed,
        "steps": run.steps,
        "overrides": overrides_of(run),
    }
    return all(line[name] == value for name, value in asked.items())


def keep(line: Mapping[str, Any], run: Run, path: Path) -> None:
    """Add the line of `run`. Others of it, which are of other commits, are kept beside `path`."""
    lines = done_runs(path)
    others = [one for one in lines if not is_of(one, run)]
    if replaced := [one for one in lines if is_of(one, run)]:
        with path.with_name("replaced.jsonl").open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in replaced)
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(json.dumps(one) + "\n" for one in [*others, line]))
    fresh.replace(path)


def mixed(lines: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> list[str]:
    """A line for each experiment of `runs` whose arms and seeds are of several commits."""
    found: list[str] = []
    for name in dict.fromkeys(run.experiment for run in runs):
        counts = Counter(line["revision"] for line in lines if line["experiment"] == name)
        if len(counts) > 1:
            each = ", ".join(f"{number} of {revision}" for revision, number in counts.items())
            found.append(f"{name}: runs of several commits: {each}")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    parser.add_argument("--recipe", choices=[SMALL, LARGE], default=SMALL)
    parser.add_argument(
        "--only", nargs="*", choices=list(EXPERIMENTS), help="default: the recipe's"
    )
    parser.add_argument("--arms", nargs="*", help="only these arms")
    parser.add_argument("--try", dest="tried", action="append", default=[], metavar="X/ARM: KNOBS")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of each experiment's own number")
    parser.add_argument(
        "--revisions", nargs="*", default=[], help="of runs that need not be done again at this one"
    )
    parser.add_argument("--report", type=Path, help="folder for docs/stability; default: none")
    return parser.parse_args()


def wanted(options: argparse.Namespace) -> list[Run]:
    """Arm by arm, so that one engine serves all seeds. Raises SystemExit for an arm to try of an
    experiment that there is not."""
    only = options.only
    if only is None:
        only = [name for name, each in EXPERIMENTS.items() if each.recipe == options.recipe]
    arms = {
        (name, arm): tuple(knobs)
        for name in only
        for arm, knobs in EXPERIMENTS[name].arms.items()
        if options.arms is None or arm in options.arms
    }
    for text in options.tried:
        where, _, knobs = text.partition(":")
        name, _, arm = where.partition("/")
        if name not in EXPERIMENTS or not arm:
            raise SystemExit(f"--try {text!r}: must be EXPERIMENT/ARM: KNOBS, of {[*EXPERIMENTS]}")
        arms[name, arm] = tuple(knobs.split())
    return [
        Run(name, arm, seed, options.steps or EXPERIMENTS[name].steps, knobs)
        for (name, arm), knobs in arms.items()
        for seed in options.seeds
    ]


def still_to_do(
    runs: Sequence[Run], done: Sequence[Mapping[str, Any]], revisions: Sequence[str]
) -> list[Run]:
    """Those without a line of one of these commits; says where there is one of another."""
    left: list[Run] = []
    for run in runs:
        of = [line["revision"] for line in done if is_of(line, run)]
        if set(of) & set(revisions):
            continue
        left.append(run)
        if of:
            name = f"{run.experiment} / {run.arm} / {run.seed}"
            print(f"{name}: again, it was done at {of[-1]} (--revisions {of[-1]} keeps it)")
    return left


def run_all(options: argparse.Namespace) -> None:
    path = options.out / "runs.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    asked = wanted(options)
    runs = still_to_do(asked, done_runs(path), [commit(), *options.revisions])
    torch.set_num_threads(2)
    start_ray()
    engines = Engines()
    try:
        for run in runs:
            keep(run_arm(run, engines, options.out), run, path)
    finally:
        engines.close()
        ray.shutdown()
        for line in mixed(done_runs(path), asked):
            print(line, flush=True)


if __name__ == "__main__":
    chosen = parse()
    run_all(chosen)
    if chosen.report:
        write_report(chosen.out / "runs.jsonl", chosen.report)
