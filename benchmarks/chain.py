"""The chain of `keel distill` over seeds, and what comes of it by domain.

    python -m keel.tasks.small small-tasks && keel sft sft-specialists
    python -m benchmarks.chain --out runs/chain --seeds 0 1 2 [knob=value …]

Every link is the command that `keel distill specialists` would run, in this process
(`benchmarks.common.in_process`); the supervised start is measured besides. What is there already is
not run again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

# Before torch is imported; see `keel.trainer.worker`.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.common.in_process import in_this_process
from benchmarks.common.revision import commit
from keel.configs.distillation import DistillConfig
from keel.configs.load import load_config, load_distillation
from keel.data.estimates import paired_difference
from keel.data.evaluated import Asked, read_evaluation
from keel.data.results import aligned
from keel.trainer.cli import main as keel
from keel.trainer.distill import distill

STAGES = ("start", "specialist", "distilled", "mixed")
Rates = dict[str, dict[str, float]]
"""Stage → prompt → share of its completions that are right."""


def run_seed(config: DistillConfig, seed: int) -> None:
    """Raises RuntimeError where a link has failed."""
    if distill(config, lambda link: keel(list(link))):
        raise RuntimeError(f"seed {seed}: a link has failed")
    folder = Path(config.dir) / "eval" / "start"
    sources = [name for each in config.specialists for name in each.sources]
    words = [config.recipe, *config.overrides, f"data.only={json.dumps(sources)}"]
    words += [f"run.dir={folder.parent / 'runs' / 'start'}", f"eval.dir={folder}"]
    words += [f"eval.samples={config.eval_samples}"]
    if not (folder / "results.json").exists() and keel(["eval", *words]):
        raise RuntimeError(f"seed {seed}: the start could not be measured")


def measured(config: DistillConfig, seed: int) -> dict[str, Rates]:
    """By domain."""
    folder = Path(config.dir) / "eval"
    found: dict[str, Rates] = defaultdict(lambda: defaultdict(dict))
    home = {source: each.name for each in config.specialists for source in each.sources}

    def add(stage: str, asked: Sequence[Asked]) -> None:
        for one in asked:
            found[one.domain][stage][f"{seed}/{one.id}"] = one.passes / one.number

    for stage in ("start", "distilled", "mixed"):
        add(stage, read_evaluation(folder / stage))
    for name in dict.fromkeys(home.values()):
        asked = read_evaluation(folder / f"specialist-{name}")
        add("specialist", [one for one in asked if home[one.source] == name])
    return found


def table(seeds: Sequence[dict[str, Rates]]) -> list[str]:
    """pass@1 of each domain, a mean over the prompts of all seeds; and differences pair by pair,
    with the range of their mean over prompts, and of several seeds each one's by itself."""
    pairs = list(pairwise(STAGES))
    rows = [["", "prompts", *STAGES, *(f"{after} − {before}" for before, after in pairs)]]
    for domain in seeds[0]:
        all_of = {
            stage: {k: v for seed in seeds for k, v in seed[domain][stage].items()}
            for stage in STAGES
        }
        names = list(all_of["mixed"])
        rates = {stage: [all_of[stage][name] for name in names] for stage in STAGES}
        cells = [f"{sum(rates[stage]) / len(names):.3f}" for stage in STAGES]
        for before, after in pairs:
            of = paired_difference(rates[before], rates[after])
            cells.append(f"{of.mean:+.3f} ({of.low:+.3f} … {of.high:+.3f})")
            if len(seeds) > 1:
                own = [difference(seed[domain], before, after) for seed in seeds]
                cells[-1] += f" [{', '.join(f'{one:+.2f}' for one in own)}]"
        rows.append([domain, f"{len(names)}", *cells])
    return aligned(rows)


def difference(rates: Rates, before: str, after: str) -> float:
    """Of one seed."""
    return sum(rates[after][name] - rates[before][name] for name in rates[after]) / len(
        rates[after]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/chain"))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("override", nargs="*", help="knobs of the recipe of keel distill")
    given = parser.parse_args()
    found: list[dict[str, Rates]] = []
    with in_this_process():
        for seed in given.seeds:
            words = [*given.override, f"dir={given.out / str(seed)}"]
            plain = load_distillation("specialists", words)
            knobs = [*plain.overrides, f"run.seed={seed}"]
            config = load_distillation("specialists", [*words, f"overrides={json.dumps(knobs)}"])
            load_config(config.recipe, config.overrides)
            run_seed(config, seed)
            found.append(measured(config, seed))
            for count, one in enumerate(found):
                print(f"seed {given.seeds[count]}", *table([one]), sep="\n")
            print(f"{len(found)} seeds, commit {commit()}", *table(found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
