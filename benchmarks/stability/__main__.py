"""What each stabiliser does, seen on the embedded model: real engine, real trainer, three seeds.

    python -m benchmarks.stability --out runs/stability --report docs/stability    # everything
    python -m benchmarks.stability --out runs/stability --only staleness --seeds 0 --steps 10

Every run is the recipe `quickstart` with the overrides of its experiment and arm, which the report
lists. It goes through `keel.trainer.loop` as in `keel train`, with one difference: the trainer's
engine lives in this process and the vLLM actor is kept from run to run (each begins by loading its
own initial weights), because starting them would take longer than many a run.

A finished run is a line of `runs.jsonl` in the output folder; what is there already is not run
again. `stability_report.py` turns the lines into `docs/stability`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before torch and DeepSpeed are imported; see `keel.trainer.worker`.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import ray
import torch

from benchmarks.common.in_process import Engines, LocalLearner
from benchmarks.common.revision import commit
from benchmarks.stability.gradients import Probe
from benchmarks.stability.report import write_report
from keel.rewards.scorer import Scorer
from keel.rl.metrics import Metric, values
from keel.rl.types import ScoredGroup
from keel.trainer import loop
from keel.trainer.cluster.nodes import start_ray
from keel.trainer.prepare import prepare
from keel.trainer.system import System, model_folder

COMMON = (
    "rollout.engines=1",
    "rewards.workers=1",
    "run.device=cpu",
    "run.eval_every=8",
)
WHOLE_VOCABULARY = ("rollout.sampling.top_p=1", "rollout.sampling.top_k=0")
STALE = (
    "trainer.lr=5e-4",
    "algorithm.updates_per_batch=4",
)
LAGGING = "algorithm.publish_every=8"


def beta(value: float) -> tuple[str, ...]:
    """The KL coefficient of both sources."""
    return tuple(f"data.sources[{name}].kl_coef={value:g}" for name in ("spelling", "spiral"))


@dataclass(frozen=True)
class Experiment:
    """Arms that differ in one thing, and what they have in common."""

    steps: int
    overrides: Sequence[str]
    arms: Mapping[str, Sequence[str]]
    probe: str = ""
    """Arm in whose course the gradient of the KL term is measured."""


TRUNCATION_ARMS: Mapping[str, Sequence[str]] = {
    "sampling mask": (),
    "no sampling mask": ("algorithm.keep_sampling_mask=false", "algorithm.allow_unsound=true"),
}

EXPERIMENTS: Mapping[str, Experiment] = {
    "staleness": Experiment(
        steps=48,
        overrides=STALE,
        arms={
            "fresh weights, mask": (),
            **{
                f"stale, δ = {delta:g}": (LAGGING, f"algorithm.mask_delta={delta:g}")
                for delta in (0.1, 0.2, 0.5, 2.0)
            },
            "stale, no mask": (LAGGING, "algorithm.mask_delta=null"),
        },
    ),
    "kl": Experiment(
        steps=32,
        overrides=WHOLE_VOCABULARY,
        arms={
            "no KL term": beta(0),
            "unbiased_k3": ("algorithm.kl=unbiased_k3", *beta(0.3)),
            "k3": ("algorithm.kl=k3", *beta(0.3)),
            "k3, half of β": ("algorithm.kl=k3", *beta(0.15)),
        },
        probe="no KL term",
    ),
    "kl_stale": Experiment(
        steps=32,
        overrides=(*WHOLE_VOCABULARY, *beta(0.3), "algorithm.publish_every=4"),
        arms={
            "unbiased_k3": ("algorithm.kl=unbiased_k3",),
            "k3": ("algorithm.kl=k3",),
        },
    ),
    "routing": Experiment(
        steps=32,
        overrides=(),
        arms={
            "same precision, replay": (),
            "bfloat16 engine, replay": ("rollout.dtype=bfloat16",),
            "bfloat16 engine, no replay": (
                "rollout.dtype=bfloat16",
                "algorithm.keep_routing=false",
                "algorithm.allow_unsound=true",
            ),
        },
    ),
    "truncation": Experiment(
        steps=32, overrides=("rollout.sampling.top_p=0.8",), arms=TRUNCATION_ARMS
    ),
    "truncation_hot": Experiment(
        steps=32,
        overrides=("rollout.sampling.top_p=0.8", "rollout.sampling.temperature=1.5"),
        arms=TRUNCATION_ARMS,
    ),
}


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

    def record(
        self, step: int, metrics: Mapping[str, Metric], sample: Sequence[ScoredGroup]
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


def run_arm(
    experiment: str, arm: str, seed: int, steps: int, engines: Engines, folder: Path
) -> dict[str, Any]:
    """One run, from the cold-started model of `seed`. Returns its line of `runs.jsonl`."""
    spec = EXPERIMENTS[experiment]
    overrides = [*COMMON, *spec.overrides, *spec.arms[arm]]
    changes = [*overrides, f"run.seed={seed}", f"run.steps={steps}"]
    task = prepare("quickstart", changes)
    config = task.config
    model = model_folder(task)
    began = time.monotonic()
    learner = LocalLearner(model, config)
    pool = engines.ready(task, model, learner)
    probe = Probe(folder / "policies", reference=model) if arm == spec.probe else None
    curves = Curves(f"{experiment} / {arm} / {seed}", learner, probe)
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
        "experiment": experiment,
        "arm": arm,
        "seed": seed,
        "steps": steps,
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


def done_runs(path: Path) -> set[tuple[str, str, int]]:
    if not path.exists():
        return set()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["experiment"], line["arm"], line["seed"]) for line in lines}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    parser.add_argument("--only", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--arms", nargs="*", help="only these arms")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of each experiment's own number")
    parser.add_argument("--report", type=Path, help="folder for docs/stability; default: none")
    return parser.parse_args()


def run_all(options: argparse.Namespace) -> None:
    path = options.out / "runs.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    done = done_runs(path)
    wanted = [
        (experiment, arm, seed)
        for experiment in options.only
        for arm in EXPERIMENTS[experiment].arms
        for seed in options.seeds
        if (options.arms is None or arm in options.arms) and (experiment, arm, seed) not in done
    ]
    torch.set_num_threads(2)
    start_ray()
    engines = Engines()
    try:
        for experiment, arm, seed in wanted:
            steps = options.steps or EXPERIMENTS[experiment].steps
            line = run_arm(experiment, arm, seed, steps, engines, options.out)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
    finally:
        engines.close()
        ray.shutdown()


if __name__ == "__main__":
    chosen = parse()
    run_all(chosen)
    if chosen.report:
        write_report(chosen.out / "runs.jsonl", chosen.report)
