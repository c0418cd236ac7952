"""What an evaluation has written, line by line: each is read once, and again where its group is
looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from keel.configs.schema import ConfigError
from keel.data.evaluated import Asked
from keel.data.evaluated import asked_in as as_asked
from keel.data.results import results
from keel.report.files import UNREADABLE, brief, loads
from keel.report.knobs import settings_of
from keel.report.shape import Chunks, Group, RunData, as_json, listed, packed

SAMPLES = "samples.jsonl"
ONLY = "recipe"
"""The variant of an evaluation that has no others."""
PER_CHUNK = 20
"""Prompts of an evaluation that a page loads together."""


@dataclass(slots=True)
class Lines:
    """Lines that are read, whole ones alone."""

    ends: list[int] = field(default_factory=lambda: [0])
    """Where the file begins, and each of them ends."""
    last: bytes = b""
    """By which the file is known again."""
    asked: list[Asked] = field(default_factory=list[Asked])
    """With what results are made of alone."""
    groups: list[Group] = field(default_factory=list[Group])

    def read(self, path: Path) -> None:
        """Those that have come since; all of another file. Raises ConfigError, OSError."""
        with path.open("rb") as file:
            file.seek(self.ends[-1] - len(self.last))
            data = file.read()
            if not data.startswith(self.last):
                self.ends, self.last, self.asked, self.groups = [0], b"", [], []
                file.seek(0)
                data = file.read()
        for line in data.removeprefix(self.last).split(b"\n")[:-1]:
            at = len(self.asked)
            try:
                asked = asked_in(line)
                group = listed(group_of(asked), 0, chunk_name(at), at % PER_CHUNK)
                self.asked.append(counted(asked))
            except UNREADABLE as error:
                said = f"no line of an evaluation: {brief(error)}"
                raise ConfigError(f"{path}:{at + 1}: {said}") from error
            self.groups.append(group)
            self.ends.append(self.ends[-1] + len(line) + 1)
            self.last = line + b"\n"


def read_evaluated(folder: Path, lines: Lines) -> tuple[RunData, Chunks]:
    """Raises ConfigError naming file and line."""
    run = RunData(name=folder.resolve().name, kind="evaluation", path=str(folder))
    lines.read(path := folder / SAMPLES)
    run.knobs = settings_of(folder / "settings.json", run.notes)
    if not (folder / "results.json").exists():
        run.notes.append("the evaluation has not ended: this is what there is so far")
    for variant, sets in results([one for one in lines.asked if one.number], (1,)).items():
        for name, of in sets.items():
            low, high = of["pass@1_interval"]
            label = f"pass@1 {name}" if variant == ONLY else f"pass@1 {variant}: {name}"
            run.summary[label] = (
                f"{of['pass@1']:.3f} ({low:.3f}–{high:.3f}), {of['prompts']} prompts"
            )
    run.groups = list(lines.groups)
    chunks = Chunks()
    for first in range(0, len(lines.asked), PER_CHUNK):
        begin, *_, end = lines.ends[first : first + PER_CHUNK + 1]
        chunks.add(chunk_name(first), partial(chunk_of, path, begin, end))
    return run, chunks


def chunk_name(at: int) -> str:
    return f"prompts_{at - at % PER_CHUNK:06d}"


def chunk_of(path: Path, begin: int, end: int) -> bytes:
    """The lines between. Ends in `UNREADABLE`."""
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read(end - begin).split(b"\n")[:-1]
    return packed([as_json(group_of(asked_in(line))) for line in lines])


def asked_in(line: bytes) -> Asked:
    return as_asked(loads(line.decode("utf-8", "surrogatepass")))


def counted(asked: Asked) -> Asked:
    """Without what was said. Ends in `UNREADABLE`."""
    samples = [
        {
            "correct": float(sample["correct"] or 0),
            "error": float(sample["error"] or 0),
            "tokens": int(float(sample["tokens"])),
            "finish_reason": str(sample["finish_reason"]),
        }
        for sample in asked.samples
    ]
    return replace(
        asked,
        variant=str(asked.variant),
        source=str(asked.source),
        domain=str(asked.domain),
        samples=samples,
        missing=[str(reason) for reason in asked.missing],
        prompt=(),
    )


def group_of(asked: Asked) -> dict[str, Any]:
    """As `keel.trainer.run.saved` writes a group."""
    return {
        "prompt": asked.id,
        "domain": f"{asked.domain} · {asked.variant}",
        "messages": asked.prompt,
        "reference": "",
        "dropped": asked.missing,
        "trajectories": [trajectory(at, sample) for at, sample in enumerate(asked.samples)],
    }


def trajectory(at: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    return {
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
