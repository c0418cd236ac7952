"""Curves and tables of one run for a page of docs/, from the run's `metrics.jsonl`.

    python -m benchmarks.stability.curves runs/embedded-100m docs/learning.md

Writes a figure and the shown metrics (one line a step) into `docs/learning/`, and replaces the part
of the page between `<!-- NAME -->` and `<!-- end -->`; NAME is the run folder's, or `--name`. What
the numbers mean is written there by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.stability.report import (
    COLORS,
    Shown,
    drawn,
    replace_block,
    row,
    save_figure,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PASS = "/pass@1"
HELDOUT = Shown("eval/", "held-out pass@1")
PANELS = (
    Shown("reward/mean", "training reward"),
    HELDOUT,
    Shown("mismatch/logp_abs", "|log π_θ − log π_old|, before the step", log=True),
    Shown("kl/ref", "KL to the reference, nats per token"),
    Shown("mask/sequence_fraction", "share of completions masked"),
    Shown("routing/overlap", "recorded experts that the trainer would choose, too"),
    Shown("sampling/kept_mean", "mean size of the sampling masks"),
    Shown("time/idle_fraction", "share of a step without completions"),
)
ALSO_TABLED = (
    "mismatch/ratio_mean",
    "mismatch/ratio_max",
    "routing/fallback_fraction",
    "entropy/kept",
    "length/mean",
    "grad_norm",
    "staleness/mean",
    "rollout/dropped_completions",
    "reward/error",
)
TIMES = ("time/step", "time/rollout", "time/reward", "time/train", "time/sync")
RATE = "throughput/tokens_per_second"
WINDOW = 10
"""Steps that a table's means and the smoothed curves are over."""

Points = Sequence[tuple[int, float]]


def write_report(run: Path, page: Path, name: str) -> None:
    """All of it; `name` has a block on the page."""
    text, curves = page.read_text(), read(run / "metrics.jsonl")
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    figure = folder / f"{name}.png"
    block = [f"![{name}]({folder.name}/{figure.name})", heldout_table(curves), table(curves)]
    text = replace_block(text, name, "\n\n".join([*block, pace(curves)]))
    draw(curves, figure)
    (folder / f"{name}.jsonl").write_text("".join(compact(curves)))
    page.write_text(text)


def read(metrics: Path) -> dict[str, Points]:
    """Metric → its (step, value) pairs. A last line cut short by the run's end is left out."""
    curves: dict[str, list[tuple[int, float]]] = {}
    lines = metrics.read_text().splitlines()
    for number, line in enumerate(lines):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise
            continue
        for name, value in values.items():
            if name not in ("step", "time") and math.isfinite(value):
                curves.setdefault(name, []).append((values["step"], value))
    if not any(name == PANELS[0].metric for name in curves):
        raise ValueError(f"{metrics}: has no {PANELS[0].metric}: no step was done")
    return dict(curves)


def heldout(curves: Mapping[str, Points]) -> dict[str, Points]:
    """Held-out set → pass@1."""
    return {
        name.removeprefix(HELDOUT.metric).removesuffix(PASS): points
        for name, points in curves.items()
        if name.startswith(HELDOUT.metric) and name.endswith(PASS)
    }


def draw(curves: Mapping[str, Points], path: Path) -> None:
    """Two rows of panels; each step thin, the mean over `WINDOW` steps thick."""
    figure, axes = drawn(2, -(-len(PANELS) // 2), (13.2, 5.6))
    for axis, item in zip(axes.flat, PANELS, strict=True):
        axis.set_title(item.title, fontsize=8)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.25)
        if item is HELDOUT:
            draw_sets(axis, heldout(curves))
        elif points := curves.get(item.metric):
            steps, values = zip(*points, strict=True)
            axis.plot(steps, values, color=COLORS[1], lw=0.6, alpha=0.45)
            axis.plot(steps, smoothed(values), color=COLORS[1], lw=1.8)
            if item.log and min(values) > 0:
                axis.set_yscale("log")
        else:
            axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes)
    save_figure(figure, path)


def draw_sets(axis: Axes, sets: Mapping[str, Points]) -> None:
    for color, (name, points) in zip(COLORS[1:], sets.items(), strict=False):
        axis.plot(*zip(*points, strict=True), color=color, lw=1.5, marker=".", label=name)
    axis.set_ylim(0, 1.02)
    if sets:
        axis.legend(fontsize=7)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and up to `WINDOW` − 1 before it."""
    return [
        statistics.fmean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)
    ]


def heldout_table(curves: Mapping[str, Points]) -> str:
    """Markdown: pass@1 of each set at each evaluation, and the mean of the sets."""
    sets = {name: dict(points) for name, points in heldout(curves).items()}
    if not sets:
        return "No evaluation."
    steps = sorted(set.intersection(*(set(points) for points in sets.values())))
    rows = {name: [points[step] for step in steps] for name, points in sets.items()}
    if len(rows) > 1:
        rows["mean"] = [statistics.fmean(column) for column in zip(*rows.values(), strict=True)]
    titles = ["held-out pass@1 at step", *map(str, steps)]
    lines = [row(titles), row(["---"] * len(titles))]
    lines += [row([name, *(f"{v:.3f}" for v in values)]) for name, values in rows.items()]
    return "\n".join(lines)


def table(curves: Mapping[str, Points]) -> str:
    """Markdown: where each metric began and ended, and how far it went."""
    ends = f"{WINDOW} steps"
    titles = ["metric", f"first {ends}", f"last {ends}", "lowest", "highest"]
    lines = [row(titles), row(["---"] * len(titles))]
    for name in (*(item.metric for item in PANELS), *ALSO_TABLED):
        values = [value for _, value in curves.get(name, ())]
        if values:
            first, last = (statistics.fmean(part) for part in (values[:WINDOW], values[-WINDOW:]))
            numbers = (first, last, min(values), max(values))
            lines.append(row([f"`{name}`", *map(short, numbers)]))
    return "\n".join(lines)


def pace(curves: Mapping[str, Points]) -> str:
    """One sentence: the median step, what it went into, and tokens per second."""
    medians = {
        name: statistics.median(value for _, value in curves[name])
        for name in (*TIMES, RATE)
        if name in curves
    }
    inside = ", ".join(
        f"{name.removeprefix('time/')} {medians[name]:.2f} s"
        for name in TIMES[1:]
        if name in medians
    )
    steps = curves[PANELS[0].metric][-1][0]
    return (
        f"{steps} steps; a median step took {medians[TIMES[0]]:.2f} s ({inside}) and sampled "
        f"{medians[RATE]:,.0f} tokens per second."
    )


def compact(curves: Mapping[str, Points]) -> list[str]:
    """Lines of JSON: what is shown or tabled, at three digits, one line a step."""
    wanted = {*(item.metric for item in PANELS), *ALSO_TABLED, *TIMES, RATE}
    steps: dict[int, dict[str, float]] = {}
    for name, points in curves.items():
        if name in wanted or name.startswith(HELDOUT.metric):
            for step, value in points:
                steps.setdefault(step, {})[name] = float(f"{value:.3g}")
    return [json.dumps({"step": step, **steps[step]}) + "\n" for step in sorted(steps)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("page", type=Path)
    parser.add_argument("--name", default="", help="of the block on the page")
    given = parser.parse_args()
    write_report(given.run, given.page, given.name or given.run.name)
