"""Folders that a run has written, or is writing, as data for the page; those of evaluations too."""

from __future__ import annotations

import difflib
import gzip
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from keel.configs.schema import ConfigError
from keel.report.columns import Columns
from keel.report.evaluations import SAMPLES, Lines, read_evaluated
from keel.report.files import UNKNOWN, UNREADABLE, brief, json_lines, loads, number
from keel.report.knobs import knobs_of
from keel.report.shape import Chunks, Group, RunData, as_json, listed, packed
from keel.rl.metrics import MEASURES

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
SUFFIX = ".jsonl.gz"
"""Of trajectories with their tokens: `step_000001.tokens.jsonl.gz`, `step_000001.jsonl.gz` of an
older release."""
GIVE = "give the folder that the recipe calls run.dir, or eval.dir"
SHOWN = 4
"""Folders of runs that are named to who has named none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """What is known of a file of trajectories."""

    stamp: tuple[int, int] = (0, 0)
    """Nanoseconds and bytes, by which it is known again."""
    groups: Sequence[Group] = ()
    as_is: bool = True
    """A browser can read it as it lies there."""
    wrong: str = ""
    """Why it cannot be read."""


Tell = Callable[[Path, int, int], None]
"""Told of a folder how many of how many step files are read."""


@dataclass(slots=True)
class Known:
    """What was read before, and is not read again while it is the same."""

    steps: dict[Path, StepFile] = field(default_factory=dict[Path, StepFile])
    lines: dict[Path, Lines] = field(default_factory=dict[Path, Lines])
    """Of evaluations, by their folders."""
    columns: dict[Path, Columns] = field(default_factory=dict[Path, Columns])
    """Of runs, by their folders."""


def read_folder(
    folder: Path, known: Known | None = None, tell: Tell | None = None
) -> tuple[RunData, Chunks]:
    """What `keel train` or `keel eval` wrote there, however far it came. Raises ConfigError for a
    folder that is neither's."""
    known = Known() if known is None else known
    try:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: {no_folder(folder)}")
        if (folder / METRICS).exists() or (folder / CONFIG).exists():
            return read_run(folder, known, tell)
        if (folder / SAMPLES).exists():
            return read_evaluated(folder, known.lines.setdefault(folder, Lines()))
        raise ConfigError(f"{folder}: {no_run(folder)}")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror or error})") from error


def no_folder(path: Path) -> str:
    """What to do instead."""
    if path.exists():
        held = any((path.parent / name).exists() for name in (METRICS, CONFIG, SAMPLES))
        return f"is a file; {f'give the folder it is in, {path.parent}' if held else GIVE}"
    if "=" in path.name:
        return "does not exist; this command takes folders alone, and no knobs"
    places = (path.parent, path.parent / "runs", Path("runs"))
    found = [file.parent for place in places for file in sorted(place.glob(f"*/{METRICS}"))]
    close = difflib.get_close_matches(path.name, {folder.name for folder in found}, n=SHOWN)
    near = [one for one in found if one.name in close or one.name.startswith(f"{path.name}-")]
    named = [str(one) for one in dict.fromkeys(near or found)][:SHOWN]
    if near:
        return f"does not exist; did you mean {' or '.join(named)}?"
    return f"does not exist; {GIVE}" + (f"; there are {', '.join(named)}" if named else "")


def no_run(folder: Path) -> str:
    """What to do instead."""
    said = f"holds no run ({METRICS} and {CONFIG}) and no evaluation ({SAMPLES})"
    names = (METRICS, CONFIG, SAMPLES)
    around = next((p for p in folder.resolve().parents if (p / METRICS).exists()), None)
    if around is not None:
        return f"{said}. It lies in the run {around}: give that"
    inside = {file.parent for name in names for file in folder.glob(f"*/{name}")}
    if inside:
        return f"{said}. Those inside it do: {', '.join(map(str, sorted(inside)))}"
    return f"{said}. {GIVE.capitalize()}"


def read_run(folder: Path, known: Known, tell: Tell | None) -> tuple[RunData, Chunks]:
    run = RunData(name=folder.resolve().name, kind="run", path=str(folder))
    run.knobs = knobs_of(folder / CONFIG, run.notes)
    columns = known.columns.setdefault(folder, Columns())
    columns.read(folder / METRICS)
    run.notes += columns.notes
    run.steps, run.times, run.edition = [*columns.steps], [*columns.times], columns.edition
    run.metrics = {name: [*column] for name, column in sorted(columns.metrics.items())}
    run.events = [event_of(line) for line in json_lines(folder / "events.jsonl", run.notes)]
    chunks = read_trajectories(folder / "trajectories", run, known, tell)
    if not run.steps:
        run.notes.append("no step has ended so far")
    run.summary = summary_of(run, folder)
    return run, chunks


def event_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(number(line.get("step")) or 0),
        "time": number(line.get("time")) or 0.0,
        "kind": str(line.get("kind", "")),
        "text": str(line.get("text", "")),
    }


def read_trajectories(folder: Path, run: RunData, known: Known, tell: Tell | None) -> Chunks:
    """Their list goes into `run`."""
    chunks = Chunks()
    paths = sorted(folder.glob(f"step_*{SUFFIX}"), key=attrgetter("name"))
    for done, path in enumerate(paths, start=1):
        known.steps[path] = file = step_file(path, known.steps.get(path))
        if tell is not None:
            tell(folder.parent, done, len(paths))
        if file.wrong:
            run.notes.append(f"{path}: cannot be read, and is left out here ({file.wrong})")
            continue
        run.groups += file.groups
        read = path.read_bytes if file.as_is else partial(readable, path)
        chunks.add(path.name, read, file.stamp[1])
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
    """Whether trajectories are to be had from it: `keel sft` and `keel pretrain` sample none."""
    return run.knobs.get("data.sources") != "[]" and "sft/tokens" not in run.metrics


def step_file(path: Path, known: StepFile | None) -> StepFile:
    """`known`, if the file is still that one."""
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
    """A file of trajectories as browsers read it."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return packed([as_json(loads(line)) for line in lines])


def summary_of(run: RunData, folder: Path) -> dict[str, str]:
    """What the table of runs says first."""
    wanted = run.knobs.get("run.steps", "?")
    last = max(run.steps, default=0)
    ended = " (ended)" if (folder / "model").exists() else ""
    found = {"steps": f"{last} of {wanted}{ended}"}
    if len(run.times) > 1:
        found["hours"] = f"{(run.times[-1] - run.times[0]) / 3600:.2f}"
    for name, label in (
        ("reward/mean", "reward, last 10 steps"),
        ("length/mean", "completion length, last 10 steps"),
        ("throughput/tokens_per_second", "tokens per second"),
    ):
        known = [value for value in run.metrics.get(name, [])[-10:] if value is not None]
        if known:
            found[label] = f"{sum(known) / len(known):.4g}"
    for name, values in run.metrics.items():
        if name.startswith("eval/") and name.endswith(MEASURES):
            known = [value for value in values if value is not None]
            if known:
                found[f"held-out {name.removeprefix('eval/')}"] = (
                    f"{known[0]:.3f} → {known[-1]:.3f}"
                )
    counts = {kind: sum(e["kind"] == kind for e in run.events) for kind in ("resume", "engine")}
    found["resumed, engines started again"] = f"{counts['resume']}, {counts['engine']}"
    for event in (event for event in run.events if event["kind"] == "ledger"):  # the last stays
        found["prompts, from the last start on"] = event["text"]
    return found
