"""Read run and evaluation folders and convert them to data for the page."""

from __future__ import annotations

import difflib
import gzip
import re
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from keel.commands.report.evaluations import SAMPLES, read_evaluation
from keel.commands.report.files import UNKNOWN, UNREADABLE, brief, json_lines, loads, number
from keel.commands.report.knobs import changed, chosen_in, knobs_of
from keel.commands.report.shape import (
    Chunks,
    ReportChunk,
    ReportGroup,
    RunData,
    as_json,
    listed,
    packed,
)
from keel.configs.schema import ConfigError
from keel.rl.metrics import MEASURES

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
SUFFIX = ".jsonl.gz"
"""Suffix of trajectory files. `step_000001.tokens.jsonl.gz` includes the tokens; older releases
wrote `step_000001.jsonl.gz`."""
SHOWN = 4
"""Maximum number of folders that an error message suggests."""
PROGRESS_S = 2.0
"""Seconds between two progress lines during a long read."""
MEANT = 10
"""The values at the beginning and end of a run are averaged over a tenth of its steps, and over at
most this many."""
APART = ("step", "time")
"""Keys in a line of `METRICS` that are not metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """A trajectory file that has been read."""

    stamp: tuple[int, int] = (0, 0)
    """Modification time in nanoseconds and size in bytes at the time of reading."""
    groups: Sequence[ReportGroup] = ()
    as_is: bool = True
    """Whether a browser can read the file unchanged."""
    wrong: str = ""
    """The reason why the file cannot be read. Empty if it can."""


Known = MutableMapping[Path, StepFile]
"""Files that have already been read. They are read again only if they have changed."""


def read_folder(folder: Path, known: Known | None = None) -> tuple[RunData, Chunks]:
    """Read what `keel train` or `keel eval` has written so far. Raises ConfigError for any other
    folder."""
    try:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: {no_run(folder)}")
        if (folder / METRICS).exists() or (folder / CONFIG).exists():
            return read_run(folder, {} if known is None else known)
        if (folder / SAMPLES).exists():
            return read_evaluation(folder)
        raise ConfigError(f"{folder}: {no_run(folder)}")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror or error})") from error


def no_run(path: Path) -> str:
    """Return an error that explains why `path` is not a run folder and suggests folders that may be
    meant."""
    if path.is_dir():
        why = f"holds no run ({METRICS} and {CONFIG}) and no evaluation ({SAMPLES})"
        places = (path, *path.resolve().parents[:2])
    else:
        why = "is a file" if path.exists() else "does not exist"
        places = (path.parent, path.parent / "runs", Path("runs"))
    files = [f for place in places for f in (place / METRICS, *sorted(place.glob(f"*/{METRICS}")))]
    runs = {str(file.parent): None for file in files if file.exists()}
    near = difflib.get_close_matches(str(path), runs, n=SHOWN, cutoff=0.8) or [*runs][:SHOWN]
    there = f"; there are {', '.join(near)}" if near else ""
    return f"{why}; give the folder that the recipe calls run.dir, or eval.dir{there}"


def read_run(folder: Path, known: Known) -> tuple[RunData, Chunks]:
    run = RunData(name=folder.resolve().name, kind="run", path=str(folder))
    run.knobs = knobs_of(folder / CONFIG, run.notes)
    run.changed = changed(run.knobs, chosen_in(folder))
    read_metrics(folder / METRICS, run)
    run.events = [event_of(line) for line in json_lines(folder / "events.jsonl", run.notes)]
    chunks = read_trajectories(folder / "trajectories", run, known)
    if not run.steps:
        run.notes.append("no step has ended so far")
    run.summary = summary_of(run, folder)
    return run, chunks


def read_metrics(path: Path, run: RunData) -> None:
    """Fill in the steps, times and metrics of a run. Several lines for one step, for example from a
    late evaluation, are merged."""
    by_step: dict[int, dict[str, float | None]] = {}
    for line in json_lines(path, run.notes):
        step = line.get("step")
        if isinstance(step, int) and number(step) is not None:
            values = by_step.setdefault(step, {})
            for name, value in line.items():
                if values.get(name) is None:
                    values[name] = number(value)
    run.steps = sorted(by_step)
    run.times = [by_step[step].get("time") or 0.0 for step in run.steps]
    names = sorted(set[str]().union(*by_step.values()) - {*APART})
    run.metrics = {name: [by_step[step].get(name) for step in run.steps] for name in names}


def event_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(number(line.get("step")) or 0),
        "time": number(line.get("time")) or 0.0,
        "kind": str(line.get("kind", "")),
        "text": str(line.get("text", "")),
    }


def read_trajectories(folder: Path, run: RunData, known: Known) -> Chunks:
    """Read the trajectory files and list their groups in `run`."""
    chunks: Chunks = {}
    last_line = time.monotonic()
    paths = sorted(folder.glob(f"step_*{SUFFIX}"), key=attrgetter("name"))
    for done, path in enumerate(paths, start=1):
        known[path] = file = step_file(path, known.get(path))
        if time.monotonic() - last_line >= PROGRESS_S:
            last_line = time.monotonic()
            text = f"{folder.parent}: read {done:,} of {len(paths):,} step files"
            print(text, file=sys.stderr, flush=True)
        if file.wrong:
            run.notes.append(f"{path}: cannot be read ({file.wrong}); skipped")
            continue
        run.groups += file.groups
        read = path.read_bytes if file.as_is else partial(readable, path)
        chunks[path.name] = ReportChunk(read, file.stamp[1])
    if run.steps and run.steps[-1] > 0 and not chunks and samples(run):
        older = (
            " (its files of text are from an older release)" if any(folder.glob("*.txt")) else ""
        )
        run.notes.append(
            f"no trajectories to read in {folder}{older}: run.save_trajectories and "
            "run.save_tokens, both above 0, have them written at each step"
        )
    return chunks


def samples(run: RunData) -> bool:
    """Return whether the run samples trajectories. `keel sft` and `keel pretrain` do not."""
    return run.knobs.get("data.sources") != "[]" and "sft/tokens" not in run.metrics


def step_file(path: Path, known: StepFile | None) -> StepFile:
    """Read a trajectory file, or return `known` if the file has not changed since."""
    stamp = (0, 0)
    try:
        of = path.stat()
        stamp = of.st_mtime_ns, of.st_size
        if known is not None and known.stamp == stamp:
            return known
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        step = int(path.name.partition(".")[0].removeprefix("step_"))
        groups = [listed(loads(line), step, path.name, at) for at, line in enumerate(lines)]
    except UNREADABLE as error:
        return StepFile(stamp=stamp, wrong=brief(error))
    as_is = not any(name in line for line in lines for name in UNKNOWN)
    return StepFile(stamp=stamp, groups=groups, as_is=as_is)


def readable(path: Path) -> bytes:
    """Rewrite a trajectory file without the numbers that browsers cannot parse."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return packed([as_json(loads(line)) for line in lines])


def summary_of(run: RunData, folder: Path) -> dict[str, str]:
    """Return the rows of the table at the top of the page as labels and texts."""
    model = run.knobs.get("model.path", "").strip('"')
    named = map(re.compile(r"(?:data|sft)\.sources\[(.*)\]\.name").fullmatch, run.knobs)
    sources = [match[1] for match in named if match]
    last = max(run.steps, default=0)
    ended = " (ended)" if (folder / "model").exists() else ""
    rows = {
        "model": model,
        "trained on": ", ".join(sources),
        "steps": f"{last} of {run.knobs.get('run.steps', '?')}{ended}",
        "time": duration(run.times[-1] - run.times[0]) if len(run.times) > 1 else "",
    }
    for name, values in run.metrics.items():
        known = [value for value in values if value is not None]
        if known and name.startswith("eval/") and name.endswith(MEASURES):
            change = f" ({known[-1] - known[0]:+.3f})" if len(known) > 1 else ""
            label = f"held-out {name.removeprefix('eval/')}"
            rows[label] = f"{known[0]:.3f} → {known[-1]:.3f}{change}"
    for name, label in (("reward/mean", "reward"), ("length/mean", "completion length")):
        if known := [value for value in run.metrics.get(name, []) if value is not None]:
            few = max(1, min(MEANT, len(known) // MEANT))
            first, after = sum(known[:few]) / few, sum(known[-few:]) / few
            rows[label] = f"{first:.3g} → {after:.3g}" + f" (means of {few} steps)" * (few > 1)
    if known := [v for v in run.metrics.get("throughput/tokens_per_second", [])[-MEANT:] if v]:
        rows["tokens per second"] = f"{sum(known) / len(known):,.0f}"
    for kind, label in (
        ("alarm", "alarms"),
        ("resume", "resumed"),
        ("engine", "engine restarts"),
        ("restart", "restarts from a checkpoint"),
    ):
        of_kind = [event for event in run.events if event["kind"] == kind]
        if of_kind:
            latest = of_kind[-1]
            rows[label] = f"{len(of_kind)}, the last at step {latest['step']}: {latest['text']}"
        elif kind == "alarm" and run.steps:
            rows[label] = "none"
    return {label: text for label, text in rows.items() if text}


def duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"
