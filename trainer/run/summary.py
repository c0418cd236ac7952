"""What a command says when it ends."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which

from keel.configs.schema import Config
from keel.rl.metrics import MEASURES
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.signals import preempted


def closing_summary(
    folder: RunFolder, config: Config, reached: int, command: Sequence[str], *, again: str = ""
) -> str:
    """What came of it, and where to look or how to go on. command: the user's, without `keel`;
    again: in place of it, how to go on."""
    path = folder.path
    lines = [""]
    evaluations = folder.evaluations()
    for name, points in evaluations.items():
        if not name.endswith(MEASURES) and not _in_part(name, evaluations):
            continue
        (first, before), (last, after) = points[0], points[-1]
        then = f", {after:.3f} at step {last} ({after - before:+.3f})" if last > first else ""
        lines.append(f"held-out {name}: {before:.3f} at step {first}{then}")
        unscored = evaluations.get(f"{name.rpartition('/')[0]}/unscored", [(last, 0.0)])[-1][1]
        if unscored:
            lines.append(f"  {unscored:.0f} completions of step {last} had no score: counted wrong")
    if reached < config.run.steps or preempted():  # the model is exported when it goes on
        called, again = again, again or shlex.join([program(), *command])
        if reached:
            lines.append(f"stopped after step {reached} of {config.run.steps}; to go on: {again}")
        else:
            lines.append(f"stopped before step 1; nothing was trained or saved. To begin: {again}")
        by_epochs = command[0] in ("sft", "pretrain") and config.sft.epochs > 0
        if reached and reached < config.run.steps and not by_epochs:
            knob = f"run.steps={reached}"
            export = f"the same with the knob {knob}" if called else f"{again} {knob}"
            lines.append(f"to export it now: {export}")
    else:
        lines.append(f"trained model   {folder.model}")
    if not reached and not evaluations:
        return "\n".join(lines)
    lines += [
        f"report          {shlex.join([program(), 'report', str(path)])}",
        f"curves          {shlex.join(['tensorboard', '--logdir', str(path)])}",
        f"numbers         {path / 'metrics.jsonl'}",
    ]
    if config.data.sources:
        lines.append(f"completions     {path / 'trajectories'}")
    return "\n".join(lines)


def program() -> str:
    """`keel`, or the path by which this process was started where that is not on PATH."""
    started = Path(sys.argv[0])
    return "keel" if started.name != "keel" or which("keel") else str(started)


def _in_part(name: str, evaluations: Mapping[str, Sequence[tuple[int, float]]]) -> bool:
    """Whether it is the score of a set of which nothing was wholly right, as by a function of the
    user's that seldom gives 1, and something in part."""
    held, _, metric = name.rpartition("/")
    wholly = evaluations.get(f"{held}/pass@1", [])
    return (
        metric == "score"
        and not any(value for _, value in wholly)
        and any(value for _, value in evaluations[name])
    )
