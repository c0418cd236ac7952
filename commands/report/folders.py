"""Convert run and evaluation folders to data for the report page. Files can be incomplete or
damaged; unreadable ones are listed in the notes."""

import ast
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, cast

from keel.configs.diff import flatten_config
from keel.configs.load import load_config
from keel.configs.schema import (
    Config,
    ConfigError,
    ConversationsConfig,
    DataConfig,
    SftConfig,
    SourceConfig,
)
from keel.data.eval_store import SampledPrompt
from keel.data.results import results, scores_by_steps
from keel.rl.metrics import MEASURES
from keel.trainer.run.journal import HEADER, cost_rows
from keel.trainer.run.trajectory_files import finite_json

_METRICS, _CONFIG, _SAMPLES = "metrics.jsonl", "config.yaml", "samples.jsonl"
_MEAN_OF = 10
"""Maximum number of steps to average for a run's first and last values. The average covers a tenth
of the steps, up to this limit."""
_ENTRY = re.compile(r"\[[^\]]*\]")
"""Matches the name of a list entry in a knob, such as `[spiral]` in `data.sources[spiral].size`."""
_PER_CHUNK = 20
"""Number of evaluation prompts that the page loads at a time."""
_HEAD, _TAIL = 70, 50
"""Number of characters to show from the start and from the end of a question in the list."""
_UNREADABLE = (
    OSError,
    EOFError,
    zlib.error,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors raised if a file is damaged, has unexpected contents or no longer exists."""


@dataclass(slots=True, kw_only=True)
class _Group:
    step: int
    chunk: str
    """Name of the chunk that contains the trajectories."""
    line: int
    """Line number in the chunk, counted from 0."""
    prompt: str
    question: str
    """Start and end of the prompt's last message, on one line."""
    domain: str
    rewards: list[float]
    tokens: list[int]
    """Number of sampled tokens in each trajectory."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Compressed JSON Lines with one group per line, read on demand."""

    read: Callable[[], bytes]
    """Return the chunk's contents. Raises OSError if its file has been removed."""
    size: int
    """Size in bytes, known before the chunk is read."""


Chunks = dict[str, _Chunk]


@dataclass(slots=True, kw_only=True)
class RunData:
    """Data from a run or evaluation for the report page."""

    name: str
    kind: Literal["run", "evaluation"]
    path: str
    steps: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    """End time of each step in `steps` (Unix time in seconds)."""
    metrics: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """Values of each metric, one per step in `steps`. Missing values are None."""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Step, time, kind and text of each event."""
    knobs: dict[str, str] = field(default_factory=dict[str, str])
    """Value of each knob as JSON."""
    changed: list[str] = field(default_factory=list[str])
    """Names of the knobs that differ from their defaults."""
    summary: dict[str, str] = field(default_factory=dict[str, str])
    """Labels and texts of the table at the top of the page."""
    groups: list[_Group] = field(default_factory=list[_Group])
    notes: list[str] = field(default_factory=list[str])
    """Descriptions of missing data, with the reasons."""

    @property
    def costs(self) -> dict[str, float]:
        return {
            name: sum(filter(None, values))
            for name, values in self.metrics.items()
            if name.startswith("cost/")
        }

    def plain(self) -> dict[str, Any]:
        """Convert to plain data for JSON. The result contains each metric's values and their
        positions in `steps`."""
        metrics: dict[str, dict[str, list[Any]]] = {}
        for name, values in self.metrics.items():
            at = [place for place, value in enumerate(values) if value is not None]
            metrics[name] = {"at": at, "values": [values[place] for place in at]}
        return {**asdict(replace(self, metrics={})), "metrics": metrics}


def read_folder(folder: Path) -> tuple[RunData, Chunks]:
    """Read a run or evaluation, which may still be in progress, along with its chunks of
    trajectories. Raises ConfigError for any other folder."""
    try:
        if (folder / _METRICS).exists() or (folder / _CONFIG).exists():
            return _read_run(folder)
        if (folder / _SAMPLES).exists():
            return _read_evaluation(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror or error})") from error
    why = "holds no run and no evaluation" if folder.is_dir() else "is not a folder"
    why = why if folder.exists() else "does not exist"
    raise ConfigError(f"{folder}: {why}; give the folder that the recipe calls run.dir or eval.dir")


def _read_run(folder: Path) -> tuple[RunData, Chunks]:
    run = RunData(name=folder.resolve().name, kind="run", path=str(folder))
    try:
        run.knobs = _as_json(load_config(folder / _CONFIG))
    except (*_UNREADABLE, ConfigError) as error:
        run.notes.append(f"{folder / _CONFIG}: cannot be read ({error})")
    chosen: Mapping[str, Any] = {}
    if (folder / "chosen.json").exists():
        chosen = json.loads((folder / "chosen.json").read_bytes())["values"]
    run.changed = _changed_knobs(run.knobs, chosen)
    _read_metrics(folder / _METRICS, run)
    run.events = [
        {
            "step": int(_number(line.get("step")) or 0),
            "time": _number(line.get("time")) or 0.0,
            "kind": str(line.get("kind", "")),
            "text": str(line.get("text", "")),
        }
        for line in _json_lines(folder / "events.jsonl", run.notes)
    ]
    chunks = _read_trajectories(folder / "trajectories", run)
    if not run.steps:
        run.notes.append("no step has finished yet")
    run.summary = _summary(run, folder)
    return run, chunks


def _json_lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    for at, text in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), 1):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield cast(dict[str, Any], value)
        elif text.strip():
            notes.append(f"{path}:{at}: not a JSON object; skipped")


def _as_json(config: Config) -> dict[str, str]:
    flat = flatten_config(config)
    return {
        name: json.dumps(value, default=str, ensure_ascii=False) for name, value in flat.items()
    }


@cache
def _defaults() -> Mapping[str, str]:
    source = SourceConfig(name="a", source="jsonl", path="a")
    lesson = ConversationsConfig(name="a", source="jsonl", path="a")
    config = Config(data=DataConfig(sources=(source,)), sft=SftConfig(sources=(lesson,)))
    flat = {_ENTRY.sub("[]", name): value for name, value in _as_json(config).items()}
    for section in ("data", "sft"):
        # A source's kind is never a default.
        flat |= {f"{section}.sources": "[]", f"{section}.sources[].path": '""'}
        flat[f"{section}.sources[].source"] = ""
    return flat


def _changed_knobs(knobs: Mapping[str, str], chosen: Mapping[str, Any]) -> list[str]:
    """Return the names of the knobs that differ from their defaults, leaving out source names and
    knobs that Keel chose for the hardware."""
    return [
        name
        for name, value in knobs.items()
        if name not in chosen
        and not name.endswith("].name")
        and _defaults().get(_ENTRY.sub("[]", name)) != value
    ]


def _read_metrics(path: Path, run: RunData) -> None:
    """Read a run's steps, times and metrics into `run`. If a step has several lines, for example
    because of a late evaluation, they are merged."""
    by_step: dict[int, dict[str, float | None]] = {}
    for line in _json_lines(path, run.notes):
        step = line.get("step")
        if isinstance(step, int) and _number(step) is not None:
            values = by_step.setdefault(step, {})
            for name, value in line.items():
                if values.get(name) is None:
                    values[name] = _number(value)
    run.steps = sorted(by_step)
    run.times = [by_step[step].get("time") or 0.0 for step in run.steps]
    names = sorted(set[str]().union(*by_step.values()) - {"step", "time"})
    run.metrics = {name: [by_step[step].get(name) for step in run.steps] for name in names}


def _read_trajectories(folder: Path, run: RunData) -> Chunks:
    chunks: Chunks = {}
    for path in sorted(folder.glob("step_*.jsonl.gz"), key=attrgetter("name")):
        try:
            stat = path.stat()
            run.groups += _groups_of_step(path, stat.st_mtime_ns, stat.st_size)
        except _UNREADABLE as error:
            run.notes.append(f"{path}: cannot be read ({error}); skipped")
            continue
        chunks[path.name] = _Chunk(path.read_bytes, stat.st_size)
    samples = run.knobs.get("data.sources") != "[]" and "sft/tokens" not in run.metrics
    if run.steps and run.steps[-1] > 0 and not chunks and samples:
        run.notes.append(
            f"{folder}: no trajectories. To save them, set run.save_trajectories and "
            "run.save_tokens above 0"
        )
    return chunks


# Cached, because `keel watch` reads a run's folder again whenever it changes.
@lru_cache(maxsize=10_000)
def _groups_of_step(path: Path, modified_ns: int, size: int) -> Sequence[_Group]:
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    step = int(path.name.partition(".")[0].removeprefix("step_"))
    return [_list_entry(json.loads(line), step, path.name, at) for at, line in enumerate(lines)]


def _summary(run: RunData, folder: Path) -> dict[str, str]:
    named = map(re.compile(r"(?:data|sft)\.sources\[(.*)\]\.name").fullmatch, run.knobs)
    ended = " (ended)" if (folder / "model").exists() else ""
    seconds = run.times[-1] - run.times[0] if run.times else 0.0
    minutes = f"{seconds / 60:.0f} min" if seconds else ""
    rows = {
        "model": run.knobs.get("model.path", "").strip('"'),
        "trained on": ", ".join(match[1] for match in named if match),
        "steps": f"{max(run.steps, default=0)} of {run.knobs.get('run.steps', '?')}{ended}",
        "time": f"{seconds / 3600:.1f} h" if seconds >= 3600 else minutes,
    }
    known = {name: [v for v in all_ if v is not None] for name, all_ in run.metrics.items()}
    for name, values in known.items():
        if values and name.startswith("eval/") and name.endswith(MEASURES):
            change = f" ({values[-1] - values[0]:+.3f})" if len(values) > 1 else ""
            label = f"held-out {name.removeprefix('eval/')}"
            rows[label] = f"{values[0]:.3f} → {values[-1]:.3f}{change}"
    for name, label in (("reward/mean", "reward"), ("length/mean", "completion length")):
        if values := known.get(name):
            few = max(1, min(_MEAN_OF, len(values) // _MEAN_OF))
            first, after = sum(values[:few]) / few, sum(values[-few:]) / few
            rows[label] = f"{first:.3g} → {after:.3g}" + f" (means of {few} steps)" * (few > 1)
    if values := known.get("throughput/tokens_per_second", [])[-_MEAN_OF:]:
        rows["tokens per second"] = f"{sum(values) / len(values):,.0f}"
    if costs := run.costs:
        spent = zip(HEADER[1:4], cost_rows({"": costs})[1][1:4], strict=True)
        rows["cost"] = ", ".join(f"{value} {label}" for label, value in spent)
    labels = {"alarm": "alarms", "resume": "resumed", "engine": "engine restarts"}
    for kind, label in {**labels, "restart": "restarts from a checkpoint"}.items():
        events = [event for event in run.events if event["kind"] == kind]
        if events:
            last = events[-1]
            rows[label] = f"{len(events)}, the last at step {last['step']}: {last['text']}"
        elif kind == "alarm" and run.steps:
            rows[label] = "none"
    return {label: text for label, text in rows.items() if text}


def _read_evaluation(folder: Path) -> tuple[RunData, Chunks]:
    run = RunData(name=folder.resolve().name, kind="evaluation", path=str(folder))
    try:
        settings: Mapping[str, Any] = json.loads((folder / "settings.json").read_bytes())
        run.knobs = {name: _from_repr(str(value)) for name, value in settings.items()}
    except _UNREADABLE as error:
        run.notes.append(f"{folder / 'settings.json'}: cannot be read ({error})")
    run.changed = _changed_knobs(run.knobs, {})
    if not (folder / "results.json").exists():
        run.notes.append("the evaluation has not finished; these are the results so far")
    path, asked, lines = folder / _SAMPLES, list[SampledPrompt](), list[str]()
    for at, line in enumerate(path.read_bytes().split(b"\n")[:-1]):  # the last is being written
        try:
            one = SampledPrompt(**json.loads(line.decode("utf-8", "surrogatepass")))
            group = _group_of(one)
            run.groups.append(_list_entry(group, 0, _chunk_name(at), at % _PER_CHUNK))
        except _UNREADABLE as error:
            raise ConfigError(f"{path}:{at + 1}: not a line of an evaluation: {error}") from error
        asked.append(one)
        lines.append(finite_json(group))
    for variant, sets in results([one for one in asked if one.number], (1,)).items():
        for name, of in sets.items():
            low, high = of["pass@1_interval"]
            label = f"pass@1 {name}" if variant == "recipe" else f"pass@1 {variant}: {name}"
            interval = f"{of['pass@1']:.3f} ({low:.3f}–{high:.3f})"
            run.summary[label] = f"{interval}, {of['prompts']} prompts"
    _plot_steps(run, asked)
    chunks: Chunks = {}
    for first in range(0, len(lines), _PER_CHUNK):
        text = "".join(f"{line}\n" for line in lines[first : first + _PER_CHUNK])
        data = gzip.compress(text.encode(), 6)
        chunks[_chunk_name(first)] = _Chunk(partial(bytes, data), len(data))
    return run, chunks


def _plot_steps(run: RunData, asked: Sequence[SampledPrompt]) -> None:
    curves: dict[str, dict[int, float]] = {}
    for variant, source in sorted({(one.variant, one.source) for one in asked}):
        same = [one for one in asked if (one.variant, one.source) == (variant, source)]
        curves[f"{source}: {variant}"], wider = scores_by_steps(same)
        if variant in ("recipe", "none"):
            curves[f"{source}: parallel-fewest-step"] = wider
    run.steps = sorted({step for curve in curves.values() for step in curve})
    run.times = [0.0] * len(run.steps)
    for name, curve in curves.items():
        if curve:
            run.metrics[f"eval/{name}/score by steps"] = [curve.get(step) for step in run.steps]


def _chunk_name(at: int) -> str:
    return f"prompts_{at - at % _PER_CHUNK:06d}"


def _from_repr(text: str) -> str:
    try:
        return json.dumps(ast.literal_eval(text), default=str, ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _group_of(asked: SampledPrompt) -> dict[str, Any]:
    trajectories: list[dict[str, Any]] = [
        {
            "sibling": at,
            "reward": sample["correct"],
            "parts": {"correct": sample["correct"], **sample.get("parts", {})},
            "finish": sample["finish_reason"],
            "tokens": sample["tokens"],
            "answer": sample.get("answer", ""),
            "messages": sample["messages"],
            "opening": 0,
            "contexts": [],
            **({"notes": {"correct": "error"}} if sample["error"] else {}),
        }
        for at, sample in enumerate(asked.samples)
    ]
    return {
        "prompt": asked.id,
        "domain": f"{asked.domain} · {asked.variant}",
        "messages": asked.prompt,
        "reference": asked.expected,
        "dropped": asked.missing,
        "trajectories": trajectories,
    }


def _list_entry(group: Mapping[str, Any], step: int, chunk: str, line: int) -> _Group:
    return _Group(
        step=step,
        chunk=chunk,
        line=line,
        prompt=str(group["prompt"]),
        question=_question(group),
        domain=str(group["domain"]),
        rewards=[_number(one["reward"]) or 0.0 for one in group["trajectories"]],
        tokens=[int(one["tokens"]) for one in group["trajectories"]],
    )


def _question(group: Mapping[str, Any]) -> str:
    messages = list(group.get("messages") or ())
    for one in group["trajectories"]:
        messages = messages or list(one.get("messages") or ())[: one.get("opening") or 0]
    content: Any = (messages[-1].get("content") if messages else "") or ""
    text = " ".join((content if isinstance(content, str) else finite_json(content)).split())
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} … {text[-_TAIL:]}"


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and isfinite(value) else None
    except OverflowError:  # an integer that is too large
        return None
