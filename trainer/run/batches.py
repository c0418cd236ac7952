"""Batches that went wrong, in files: what `keel replay` trains on again.

    RUN/nonfinite/step_000007.npz   arrays, and a text that says how they belong together

Neither pickled nor executed: whoever is sent one can open it.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import (
    Group,
    Prompt,
    SamplingMasks,
    ScoredGroup,
    Segment,
    Trajectory,
    Usage,
    Verdict,
)

FOLDER = "nonfinite"
KEPT = 8
"""The newest so many stay."""
_TYPES = {
    kind.__name__: kind
    for kind in (ScoredGroup, Group, Prompt, Trajectory, Segment, SamplingMasks, Verdict, Usage)
}
_TEXT = "text"


def save_batch(
    run: Path, step: int, groups: Sequence[ScoredGroup], findings: Sequence[str]
) -> Path:
    """Write the batch of `step` into the run folder. Returns the file."""
    path = run / FOLDER / f"step_{step:06d}.npz"
    path.parent.mkdir(exist_ok=True)
    arrays: dict[str, NDArray[Any]] = {}
    content = {"step": step, "findings": list(findings), "groups": _packed(list(groups), arrays)}
    text = np.frombuffer(json.dumps(content, default=str).encode(), np.uint8)
    fresh = path.with_suffix(".tmp")
    try:
        with fresh.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **{**arrays, _TEXT: text})
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)  # of a full disk, say
    others = [other for other in list_batches(run) if other != path]
    for old in others[: 1 - KEPT]:
        old.unlink()
    return path


def drop_after(run: Path, step: int) -> None:
    """A run that goes on after `step` comes to later ones again."""
    for path in list_batches(run):
        if step_of(path) > step:
            path.unlink()


def list_batches(run: Path) -> list[Path]:
    """Oldest step first."""
    return sorted((run / FOLDER).glob("step_*.npz"), key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def read_batch(path: Path) -> tuple[list[ScoredGroup], list[str]]:
    """Groups, and what was found about them. Raises `ValueError` naming the file if it is none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            content = json.loads(bytes(file[_TEXT]))
            return _unpacked(content["groups"], file), content["findings"]
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a batch that a run kept ({error})") from error


def _packed(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    """As JSON; arrays go into `arrays`, by the names that stand in their place."""
    if isinstance(value, np.ndarray):
        name = f"array_{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: _packed(getattr(value, name), arrays) for name in names}
        return {"type": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"map": {str(key): _packed(item, arrays) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_packed(item, arrays) for item in value]}
    return value.item() if isinstance(value, np.generic) else value


def _unpacked(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "type" in value:
        fields = {name: _unpacked(item, arrays) for name, item in value["fields"].items()}
        return _TYPES[value["type"]](**fields)
    if "map" in value:
        return {name: _unpacked(item, arrays) for name, item in value["map"].items()}
    (kind,) = value
    items = [_unpacked(item, arrays) for item in value[kind]]
    return items if kind == "list" else tuple(items)
