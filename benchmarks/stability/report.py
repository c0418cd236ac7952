"""Figures, tables and raw numbers of `docs/stability` from the runs' lines.

    python -m benchmarks.stability.report runs/stability/runs.jsonl docs/stability

Writes `runs.jsonl` (compact) and a figure for each experiment into the folder, and replaces the
parts of `docs/stability.md` between `<!-- EXPERIMENT -->` and `<!-- end -->`. What the numbers mean
is written there by hand.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST = 8
"""Steps at the end of a run that its training reward is averaged over."""


@dataclass(frozen=True)
class Shown:
    """A metric in figures and tables."""

    metric: str
    title: str
    log: bool = False


REWARD = Shown("reward/mean", "training reward")
HELDOUT = Shown("heldout", "held-out pass@1")
OUTSIDE = Shown("mismatch/ratio_outside_fraction", "share of ratios outside [0.9, 1.1]")
DRIFT = Shown("mismatch/kl", "KL(π_old ‖ π_θ) before the step", log=True)
MASKED = Shown("mask/sequence_fraction", "share of completions masked")
STALE = (DRIFT, MASKED, OUTSIDE)
EXPLAINED_BY: Mapping[str, Sequence[Shown]] = {
    "staleness": (
        Shown("mismatch/kl", "KL(π_old ‖ π_θ) before the step"),
        MASKED,
        Shown("mask/logp_gap_max", "largest gap of a completion, nats per token"),
    ),
    "kl": (
        Shown("kl/ref", "KL to the reference, nats per token"),
        Shown("grad_norm", "gradient norm", log=True),
    ),
    "kl_stale": (
        Shown("kl/ref", "the estimator's value, nats per token", log=True),
        Shown("grad_norm", "gradient norm", log=True),
    ),
    "routing": (
        DRIFT,
        Shown("mismatch/ratio_max", "largest ratio"),
        OUTSIDE,
    ),
    "truncation": (Shown("mismatch/ratio_mean", "mean ratio π_θ/π_old"), OUTSIDE),
    "truncation_hot": (Shown("mismatch/ratio_mean", "mean ratio π_θ/π_old"), OUTSIDE),
    "stale_100m": STALE,
    "stale_fast_100m": STALE,
    "kl_100m": (Shown("kl/ref", "KL to the reference, nats per token"),),
    **dict.fromkeys(
        ("kept_mass", "kept_mass_ahead", "kept_mass_100m", "kept_mass_fast_100m"),
        (Shown("sampling/kept_mass", "what the policy gives to the masks"), DRIFT),
    ),
}
ALSO_KEPT = (
    "mismatch/logp_abs",
    "clip/fraction",
    "entropy/kept",
    "length/mean",
    "staleness/mean",
    "routing/overlap",
    "sampling/kept_mean",
    "sampling/mass_shortfall",
)
COLORS = ("#7f7f7f", "#1f77b4", "#d62728", "#ff9896", "#2ca02c", "#9467bd")

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Arm → its runs, one a seed."""


def write_report(source: Path, folder: Path) -> None:
    """All of it; experiments that `source` has nothing of are left as they were. Raises ValueError
    where `source` has only some of an experiment's runs, or an arm's have different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "runs.jsonl"
    runs = [json.loads(line) for line in source.read_text().splitlines()]
    runs = [run for run in runs if run["experiment"] in EXPLAINED_BY]
    new = {run["experiment"] for run in runs}
    before = raw.read_text().splitlines() if raw.exists() else []
    lost = {key(json.loads(line)) for line in before} - {key(run) for run in runs}
    if lost := {each for each in lost if each[0] in new}:
        raise ValueError(f"{source} lacks runs that {raw} has, which would be lost: {sorted(lost)}")
    lengths: dict[tuple[str, str], set[int]] = defaultdict(set)
    for run in runs:
        lengths[run["experiment"], run["arm"]].add(run["steps"])
    if mixed := {each: some for each, some in lengths.items() if len(some) > 1}:
        raise ValueError(
            f"{source} has runs of different lengths of one arm: {mixed}; remove the lines of "
            "those that were for trial"
        )
    kept = [line for line in before if json.loads(line)["experiment"] not in new]
    raw.write_text("\n".join([*kept, *(json.dumps(compact(run)) for run in runs)]) + "\n")
    page = folder.with_suffix(".md")
    text = page.read_text()
    for experiment in EXPLAINED_BY:
        arms: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for run in runs:
            if run["experiment"] == experiment:
                arms[run["arm"]].append(run)
        if arms:
            draw(experiment, arms, folder / f"{experiment}.png")
            block = "\n\n".join([f"![{experiment}](stability/{experiment}.png)", *tables(arms)])
            text = replace_block(text, experiment, block)
    page.write_text(text)


def key(run: Mapping[str, Any]) -> tuple[str, str, int]:
    return run["experiment"], run["arm"], run["seed"]


def replace_block(text: str, name: str, block: str) -> str:
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page has no block <!-- {name} --> … <!-- end -->")
    return pattern.sub(lambda match: f"{match[1]}{block}\n{match[2]}", text)


def shown(experiment: str) -> tuple[Shown, ...]:
    return (REWARD, HELDOUT, *EXPLAINED_BY[experiment])


def compact(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run with the metrics of the report alone, as lists from step 0 on."""
    kept = [*(item.metric for item in shown(run["experiment"])), *ALSO_KEPT]
    steps = range(run["steps"] + 1)
    curves = {
        name: [rounded(points.get(str(step))) for step in steps]
        for name in kept
        if (points := finite(run, name))
    }
    return {**{k: v for k, v in run.items() if k != "curves"}, "curves": curves}


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def finite(run: Mapping[str, Any], metric: str) -> dict[str, float]:
    points = run["curves"].get(metric, {})
    return {step: value for step, value in points.items() if math.isfinite(value)}


def draw(experiment: str, arms: Runs, path: Path) -> None:
    """One panel a metric: the mean over seeds, each seed thin."""
    panels = shown(experiment)
    figure, axes = drawn(1, len(panels), (3.3 * len(panels), 2.9))
    for axis, item in zip(axes, panels, strict=True):
        for color, (arm, runs) in zip(COLORS, arms.items(), strict=False):
            curves = [finite(run, item.metric) for run in runs]
            if not all(curves):
                continue
            for curve in curves:
                axis.plot(
                    [int(s) for s in curve], list(curve.values()), color=color, lw=0.6, alpha=0.45
                )
            common = [step for step in curves[0] if all(step in curve for curve in curves)]
            middle = [statistics.fmean(curve[step] for curve in curves) for step in common]
            axis.plot([int(s) for s in common], middle, color=color, lw=1.8, label=arm)
        axis.set_title(item.title, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.25)
        if item.log:
            axis.set_yscale("log")
    axes[0].legend(fontsize=7)
    save_figure(figure, path)


def drawn(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Figure, Any]:
    """An empty figure, and its panels."""
    # Importing it takes most of a second, and the tables do without.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=inches)
    return figure, figure.subplots(rows, columns)


def save_figure(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    with io.BytesIO() as buffer:
        figure.savefig(buffer, dpi=80)
        # A palette, or a figure would weigh 120 kB.
        Image.open(buffer).convert("RGB").quantize(48).save(path, optimize=True)


def tables(arms: Runs) -> list[str]:
    """Markdown: the metrics of each arm, gradients where they were measured, the commands."""
    experiment = next(iter(arms.values()))[0]["experiment"]
    measured = EXPLAINED_BY[experiment]
    titles = [
        "arm",
        "held-out, end",
        "mean of its course",
        f"reward, last {LAST} steps",
        *(m.title for m in measured),
    ]
    lines = [row(titles), row(["---"] * len(titles))]
    for arm, runs in arms.items():
        cells = [
            spread([list(finite(run, "heldout").values())[-1] for run in runs]),
            spread([statistics.fmean(list(finite(run, "heldout").values())[1:]) for run in runs]),
            spread(
                [
                    statistics.fmean(list(finite(run, "reward/mean").values())[-LAST:])
                    for run in runs
                ]
            ),
        ]
        for item in measured:
            curves = [list(finite(run, item.metric).values()) for run in runs]
            cells.append(spread([statistics.fmean(c) for c in curves]) if all(curves) else "–")
        lines.append(row([arm, *cells]))
    found = [
        "\n".join(lines),
        "Mean over seeds (lowest – highest). The course leaves out step 0; the columns after "
        "the reward are means over all steps.",
    ]
    gradients = [row for runs in arms.values() for run in runs for row in run.get("gradients", [])]
    if gradients:
        found.append(gradient_table(gradients))
    return [*found, commands(arms)]


def gradient_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each case and estimator, over steps and seeds."""
    cases: dict[tuple[int, int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for item in rows:
        cases[item["step"], item["behind"], item["estimator"]].append(item)
    titles = ["batch of step", "π_old", "estimator", "KL", "bias", "cosine", "deviation"]
    lines = [row(titles), row(["---"] * len(titles))]
    for (step, behind, estimator), items in sorted(cases.items()):
        age = f"{behind} steps older" if behind else "= π_θ"
        numbers = [
            spread([i[name] for i in items]) for name in ("kl", "bias", "cosine", "deviation")
        ]
        lines.append(row([str(step), age, estimator, *numbers]))
    return "\n".join(lines)


def commands(arms: Runs) -> str:
    """The command of each arm's runs, as one would give it to `keel`."""
    lines: list[str] = []
    for arm, runs in arms.items():
        seeds = "|".join(str(run["seed"]) for run in runs)
        options = [*runs[0]["overrides"], f"run.steps={runs[0]['steps']}", f"run.seed={seeds}"]
        at = ", ".join(dict.fromkeys(str(run["revision"]) for run in runs))
        lines += [f"# {arm} ({sum(run['seconds'] for run in runs)} s for all seeds; {at})"]
        lines += [f"keel train {runs[0].get('recipe', 'quickstart')} " + " ".join(options)]
    return "```\n" + "\n".join(lines) + "\n```"


def spread(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    middle = statistics.fmean(numbers)
    return f"{short(middle)} ({short(low)} – {short(high)})" if low != high else short(middle)


def short(number: float) -> str:
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        return f"{number:.3g}"
    return f"{number:.1e}"


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="the runs' lines (runs.jsonl)")
    parser.add_argument("folder", type=Path, help="of figures and tables")
    options = parser.parse_args()
    write_report(options.runs, options.folder)


if __name__ == "__main__":
    main()
