"""Folders that a run or an evaluation has written, or is writing, as data for the page."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import yaml

from keel.configs.hostile import tree_of
from keel.configs.schema import ConfigError
from keel.data.evaluated import Asked, read_evaluation
from keel.data.results import results
from keel.report.shape import Group, RunData, as_json, packed

METRICS, SAMPLES, CONFIG = "metrics.jsonl", "samples.jsonl", "config.yaml"
UNKNOWN = ("NaN", "Infinity")
"""What Python writes for numbers that JSON does not know."""
SUFFIX = ".jsonl.gz"
ONLY = "recipe"
"""The variant of an evaluation that has no others."""
PER_CHUNK = 20
"""Prompts of an evaluation that a page loads together."""
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError)
"""What reading a file of trajectories ends in that is damaged, or gone."""


class Chunks(MutableMapping[str, bytes]):
    """Lines of JSON, a group each, compressed; by name. Those of `add` are read when they are asked
    for, which may end in `UNREADABLE`."""

    def __init__(self) -> None:
        self._read: dict[str, Callable[[], bytes]] = {}

    def add(self, name: str, read: Callable[[], bytes]) -> None:
        self._read[name] = read

    def __getitem__(self, name: str) -> bytes:
        return self._read[name]()

    def __setitem__(self, name: str, data: bytes) -> None:
        self._read[name] = lambda: data

    def __delitem__(self, name: str) -> None:
        del self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


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


Known = dict[Path, StepFile]


def read_folder(folder: Path, known: Known | None = None) -> tuple[RunData, Chunks]:
    """What `keel train` or `keel eval` wrote there, however far it came. known: files that were
    read before, and are not read again while they are the same. Raises ConfigError for a folder
    that is neither's."""
    if not folder.is_dir():
        what = "is a file; give the folder it is in" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder}: {what}")
    try:
        if (folder / METRICS).exists() or (folder / CONFIG).exists():
            return read_run(folder, {} if known is None else known)
        if (folder / SAMPLES).exists():
            return read_evaluated(folder)
        raise ConfigError(f"{folder}: {no_run(folder)}")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error})") from error


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
    return f"{said}. Give the folder that the recipe calls run.dir, or eval.dir"


# Runs


def read_run(folder: Path, known: Known) -> tuple[RunData, Chunks]:
    run = RunData(name=folder.resolve().name, kind="run", path=str(folder))
    run.knobs = knobs_of(folder / CONFIG, run.notes)
    lines = list(json_lines(folder / METRICS, run.notes))
    kept: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if isinstance(step := line.get("step"), int):
            kept[step] = {**line, **kept.get(step, {})}  # two, of an evaluation that came late
    run.steps = sorted(kept)
    records = [kept[step] for step in run.steps]
    run.times = [float(record.get("time") or 0) for record in records]
    names = sorted({name for record in records for name in record} - {"step", "time"})
    run.metrics = {name: [number(record.get(name)) for record in records] for name in names}
    run.events = [event_of(line) for line in json_lines(folder / "events.jsonl", run.notes)]
    chunks = read_trajectories(folder / "trajectories", run, known)
    if not run.steps:
        run.notes.append("no step has ended so far")
    run.summary = summary_of(run, folder)
    return run, chunks


def number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def event_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(number(line.get("step")) or 0),
        "time": number(line.get("time")) or 0.0,
        "kind": str(line.get("kind", "")),
        "text": str(line.get("text", "")),
    }


def json_lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    """The objects of a file that may be being written: a last line without an end is left for
    later. Lines that cannot be read are left out, and `notes` says so."""
    if not path.exists():
        return
    for at, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield cast(dict[str, Any], value)
        elif text.strip():
            notes.append(f"{path}:{at}: not an object in JSON, and left out here")


def knobs_of(path: Path, notes: list[str]) -> dict[str, str]:
    """As written, whatever release wrote it: names and values alone are compared."""
    try:
        return dict(knobs_in(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path}: no knobs can be read there ({str(error).splitlines()[0]})")
    return {}


@lru_cache(maxsize=64)  # a tenth of a second, and the config of a run that is followed stays
def knobs_in(text: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    tree_of(text)  # aliases that stand for millions of values would all be written out
    flatten(yaml.safe_load(text), "", flat)
    return flat


def flatten(value: Any, path: str, flat: dict[str, str]) -> None:
    """`a.b` → value; sources by name, as in `keel.configs.diff`."""
    if isinstance(value, dict) and value:
        for key, item in cast(dict[Any, Any], value).items():
            flatten(item, f"{path}.{key}".lstrip("."), flat)
    elif isinstance(value, list) and all(
        isinstance(one, dict) and "name" in one for one in cast(list[Any], value)
    ):
        for one in cast(list[dict[str, Any]], value):
            flatten(one, f"{path}[{one['name']}]", flat)
    else:
        flat[path] = json.dumps(value, default=str, ensure_ascii=False)


def read_trajectories(folder: Path, run: RunData, known: Known) -> Chunks:
    """Their list goes into `run`."""
    chunks = Chunks()
    for path in sorted(folder.glob(f"step_*{SUFFIX}")):
        known[path] = file = step_file(path, known.get(path))
        if file.wrong:
            run.notes.append(f"{path}: cannot be read, and is left out here ({file.wrong})")
            continue
        run.groups += file.groups
        chunks.add(path.name, path.read_bytes if file.as_is else partial(readable, path))
    if run.steps and run.steps[-1] > 0 and not chunks:
        older = (
            " (its files of text are from an older release)" if any(folder.glob("*.txt")) else ""
        )
        run.notes.append(
            f"no trajectories to read in {folder}{older}: run.save_trajectories and "
            "run.save_tokens, both above 0, have them written at each step"
        )
    return chunks


def step_file(path: Path, known: StepFile | None) -> StepFile:
    """`known`, if the file is still that one."""
    stamp = (0, 0)
    try:
        of = path.stat()
        stamp = of.st_mtime_ns, of.st_size
        if known is not None and known.stamp == stamp:
            return known
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        step = int(path.name.removesuffix(SUFFIX).removeprefix("step_"))
        groups = [listed(json.loads(line), step, path.name, at) for at, line in enumerate(lines)]
    except UNREADABLE as error:
        return StepFile(stamp=stamp, wrong=str(error) or type(error).__name__)
    as_is = not any(name in line for line in lines for name in UNKNOWN)
    return StepFile(stamp=stamp, groups=groups, as_is=as_is)


def readable(path: Path) -> bytes:
    """A file of trajectories as browsers read it."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return packed([as_json(json.loads(line)) for line in lines])


def listed(group: Mapping[str, Any], step: int, chunk: str, line: int) -> Group:
    return Group(
        step=step,
        chunk=chunk,
        line=line,
        prompt=str(group["prompt"]),
        domain=str(group["domain"]),
        rewards=[float(one["reward"] or 0) for one in group["trajectories"]],
        tokens=[int(one["tokens"]) for one in group["trajectories"]],
    )


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
        if name.startswith("eval/") and name.endswith("/pass@1"):
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


# Evaluations


def read_evaluated(folder: Path) -> tuple[RunData, Chunks]:
    run = RunData(name=folder.resolve().name, kind="evaluation", path=str(folder))
    asked = read_evaluation(folder)
    try:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        run.knobs = {str(name): str(value) for name, value in settings.items()}
    except (OSError, ValueError, AttributeError) as error:
        run.notes.append(f"{folder / 'settings.json'}: cannot be read ({error})")
    if not (folder / "results.json").exists():
        run.notes.append("the evaluation has not ended: this is what there is so far")
    for variant, sets in results([one for one in asked if one.number], (1,)).items():
        for name, of in sets.items():
            low, high = of["pass@1_interval"]
            label = f"pass@1 {name}" if variant == ONLY else f"pass@1 {variant}: {name}"
            run.summary[label] = (
                f"{of['pass@1']:.3f} ({low:.3f}–{high:.3f}), {of['prompts']} prompts"
            )
    chunks = Chunks()
    for first in range(0, len(asked), PER_CHUNK):
        name = f"prompts_{first:06d}"
        groups = [group_of(one) for one in asked[first : first + PER_CHUNK]]
        run.groups += [listed(group, 0, name, at) for at, group in enumerate(groups)]
        chunks[name] = packed([as_json(group) for group in groups])
    return run, chunks


def group_of(asked: Asked) -> dict[str, Any]:
    """As `keel.trainer.run.saved` writes a group."""
    written = asdict(asked)
    return {
        "prompt": asked.id,
        "domain": f"{asked.domain} · {asked.variant}",
        "messages": written["prompt"],
        "reference": "",
        "dropped": written["missing"],
        "trajectories": [
            {
                "sibling": at,
                "reward": sample["correct"],
                "parts": {"correct": sample["correct"], **sample.get("parts", {})},
                "finish": sample["finish_reason"],
                "tokens": sample["tokens"],
                "messages": sample["messages"],
                "opening": 0,
                "contexts": [],
                **({"notes": {"correct": "error"}} if sample["error"] else {}),
            }
            for at, sample in enumerate(written["samples"])
        ],
    }
