"""Read the folders that `keel eval` writes and convert them to data for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from keel.commands.report.files import UNREADABLE, brief, loads
from keel.commands.report.knobs import changed, settings_of
from keel.commands.report.shape import Chunks, ReportChunk, RunData, as_json, listed, packed
from keel.configs.schema import ConfigError
from keel.data.eval_store import Asked
from keel.data.eval_store import asked_in as as_asked
from keel.data.results import results

SAMPLES = "samples.jsonl"
ONLY = "recipe"
"""Name of the variant in an evaluation that has no variants."""
PACKED = 4
"""Approximate compression ratio of a chunk."""
PER_CHUNK = 20
"""Number of evaluation prompts that the page loads at a time."""


def read_evaluation(folder: Path) -> tuple[RunData, Chunks]:
    """Read what `keel eval` has written so far. Raises ConfigError with the file and line of a
    problem."""
    run = RunData(name=folder.resolve().name, kind="evaluation", path=str(folder))
    run.knobs = settings_of(folder / "settings.json", run.notes)
    run.changed = changed(run.knobs)
    if not (folder / "results.json").exists():
        run.notes.append("the evaluation has not ended: this is what there is so far")
    path, request, ends = folder / SAMPLES, list[Asked](), [0]
    with path.open("rb") as file:
        for at, line in enumerate(file):
            if not line.endswith(b"\n"):  # it is being written
                break
            try:
                one = asked_in(line)
                run.groups.append(listed(group_of(one), 0, chunk_name(at), at % PER_CHUNK))
                request.append(counted(one))
            except UNREADABLE as error:
                text = f"no line of an evaluation: {brief(error)}"
                raise ConfigError(f"{path}:{at + 1}: {text}") from error
            ends.append(ends[-1] + len(line))
    for variant, sets in results([one for one in request if one.number], (1,)).items():
        for name, of in sets.items():
            low, high = of["pass@1_interval"]
            label = f"pass@1 {name}" if variant == ONLY else f"pass@1 {variant}: {name}"
            run.summary[label] = (
                f"{of['pass@1']:.3f} ({low:.3f}–{high:.3f}), {of['prompts']} prompts"
            )
    chunks: Chunks = {}
    for first in range(0, len(request), PER_CHUNK):
        begin, *_, end = ends[first : first + PER_CHUNK + 1]
        read = partial(read_chunk, path, begin, end)
        chunks[chunk_name(first)] = ReportChunk(read, (end - begin) // PACKED)
    return run, chunks


def chunk_name(at: int) -> str:
    return f"prompts_{at - at % PER_CHUNK:06d}"


def read_chunk(path: Path, begin: int, end: int) -> bytes:
    """Read the lines between two offsets in the file and compress them for the page. Raises one of
    `UNREADABLE`."""
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read(end - begin).split(b"\n")[:-1]
    return packed([as_json(group_of(asked_in(line))) for line in lines])


def asked_in(line: bytes) -> Asked:
    return as_asked(loads(line.decode("utf-8", "surrogatepass")))


def counted(request: Asked) -> Asked:
    """Keep only the numbers that the results are computed from, without any text. Raises one of
    `UNREADABLE`."""
    samples = [
        {
            "correct": float(sample["correct"] or 0),
            "error": float(sample["error"] or 0),
            "tokens": int(float(sample["tokens"])),
            "finish_reason": str(sample["finish_reason"]),
        }
        for sample in request.samples
    ]
    return replace(
        request,
        variant=str(request.variant),
        source=str(request.source),
        domain=str(request.domain),
        samples=samples,
        missing=[str(reason) for reason in request.missing],
        prompt=(),
    )


def group_of(request: Asked) -> dict[str, Any]:
    """Convert a line to the group format that `keel.trainer.run.trajectory_files` writes."""
    return {
        "prompt": request.id,
        "domain": f"{request.domain} · {request.variant}",
        "messages": request.prompt,
        "reference": request.expected,
        "dropped": request.missing,
        "trajectories": [trajectory(at, sample) for at, sample in enumerate(request.samples)],
    }


def trajectory(at: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    return {
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
