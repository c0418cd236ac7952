"""The verdict over several workloads that nobody tuned for.

    python -m benchmarks.peers.compare --out DRAWS/1 --draw 1      # and 2, 3, 4
    python -m benchmarks.peers.draws DRAWS/* --arm keel-within

Each is drawn by its seed (`workload.drawn`): model, batch, lengths, truncation, and whether
completions end by themselves. Keel runs with all defaults (`keel-auto`), or told only in how much
memory (`keel-within`); of the peer's arms the fastest counts, with its memory. Runs that did not
end by themselves count for nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.peers.keel_grpo import AUTO, WITHIN
from benchmarks.peers.report import GOALS, Summary, best_peer, earlier, summarize, whole

LEAST = 4
"""Draws for a verdict."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One workload, as both systems ran it."""

    workload: Mapping[str, Any]
    ours: Summary
    peer: Summary
    """Its fastest arm."""
    start_s: tuple[float, float]
    """Ours and its, until the first step began."""

    @property
    def speed(self) -> float:
        return self.ours.tokens_s / self.peer.tokens_s

    @property
    def memory(self) -> float:
        return self.ours.peak_gib / self.peer.peak_gib

    def row(self) -> str:
        w = self.workload
        shape = w["shape"]
        ends = f", made to end after {w['ends_after']} or so" if w["ends_after"] else ""
        return (
            f"| {w['seed']} | {shape['layers']} × {shape['hidden_size']}, {shape['vocab_size']:,} "
            f"| {w['prompts_per_step']} × {w['group_size']}, {w['prompt_tokens']} + "
            f"{w['completion_tokens']}{ends} | {w['top_p']:g}, {w['top_k']} "
            f"| {self.ours.step_s:.2f} | {self.peer.step_s:.2f} ({self.peer.arm}) "
            f"| {self.ours.tokens_s:,.0f} | {self.peer.tokens_s:,.0f} | {self.speed:.2f} "
            f"| {self.ours.peak_gib:.1f} | {self.peer.peak_gib:.1f} | {self.memory:.0%} "
            f"| {self.start_s[0]:.0f}, {self.start_s[1]:.0f} |"
        )


def read(folder: Path, arm: str = AUTO) -> Draw | str:
    """Of a folder of `compare`; or why there is none to count. arm: ours."""
    runs = earlier(folder)
    counted = whole(runs)
    summaries = summarize(counted)
    peer = best_peer(summaries)
    if arm not in summaries or peer is None:
        said = "; ".join(f"{run.arm} {run.status} {run.why}" for run in runs if run not in counted)
        return f"{folder.name}: no figures of both systems ({said})"
    starts = {run.arm: run.start_s for run in counted if run.steps}
    return Draw(
        workload=json.loads((folder / "results.json").read_text())["workload"],
        ours=summaries[arm],
        peer=peer,
        start_s=(starts[arm], starts[peer.arm]),
    )


def report(found: Sequence[Draw | str]) -> str:
    """A table, what is missing, and the verdict."""
    draws = [each for each in found if isinstance(each, Draw)]
    lines = [
        "| seed | layers × width, vocabulary | a step | top-p, top-k | s per step | peer's "
        "| tokens per second | peer's | speed ÷ peer | peak GiB | peer's | memory ÷ peer "
        "| start s |",
        "|---" * 13 + "|",
        *(each.row() for each in draws),
        "",
        *(each for each in found if isinstance(each, str)),
    ]
    if len(found) < LEAST or len(draws) < len(found):
        return "\n".join([*lines, f"no verdict: {len(draws)} draws of {max(LEAST, len(found))}"])
    met = [each.speed >= GOALS[0] and each.memory <= GOALS[1] for each in draws]
    lines.append(
        f"{geometric_mean(each.speed for each in draws):.2f} times the speed in "
        f"{geometric_mean(each.memory for each in draws):.0%} of the memory (geometric means); the "
        f"goal ({GOALS[0]:g} times, {GOALS[1]:.0%}) is met in {sum(met)} of {len(met)} draws"
    )
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folders", nargs="+", type=Path)
    options.add_argument("--arm", choices=(AUTO, WITHIN), default=AUTO)
    given = options.parse_args()
    print(report([read(folder, given.arm) for folder in given.folders]))


if __name__ == "__main__":
    main()
