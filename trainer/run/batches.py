"""Saves the batches of steps without a finite gradient, for `keel replay`.

    RUN/nonfinite/step_000007.npz   arrays, and JSON text that describes their structure

The files contain no pickles, so opening one runs no code.
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
_MAX_FILES = 8
_TYPES = {
    kind.__name__: kind
    for kind in (ScoredGroup, Group, Prompt, Trajectory, Segment, SamplingMasks, Verdict, Usage)
}
_TEXT = "text"


def save_batch(
    run: Path, step: int, groups: Sequence[ScoredGroup], findings: Sequence[str]
) -> Path:
    """Save the batch of `step` and return its file. If there are too many saved batches, the oldest
    are deleted."""
    path = run / FOLDER / f"step_{step:06d}.npz"
    path.parent.mkdir(exist_ok=True)
    arrays: dict[str, NDArray[Any]] = {}
    content = {"step": step, "findings": list(findings), "groups": _encode(list(groups), arrays)}
    text = np.frombuffer(json.dumps(content, default=str).encode(), np.uint8)
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **{**arrays, _TEXT: text})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    others = [other for other in list_batches(run) if other != path]
    for old in others[: 1 - _MAX_FILES]:
        old.unlink()
    return path


def drop_after(run: Path, step: int) -> None:
    """Delete the batches of steps after `step`. A resumed run will repeat these steps."""
    for path in list_batches(run):
        if step_of(path) > step:
            path.unlink()


def list_batches(run: Path) -> list[Path]:
    """Return the files of all saved batches, oldest step first."""
    return sorted((run / FOLDER).glob("step_*.npz"), key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def read_batch(path: Path) -> tuple[list[ScoredGroup], list[str]]:
    """Return the groups and findings of a saved batch. Raises ValueError, naming the file, if it is
    invalid."""
    try:
        with np.load(path, allow_pickle=False) as file:
            content = json.loads(bytes(file[_TEXT]))
            return _decode(content["groups"], file), content["findings"]
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a saved batch ({error})") from error


def _encode(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        name = f"array_{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: _encode(getattr(value, name), arrays) for name in names}
        return {"type": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"map": {str(key): _encode(item, arrays) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, arrays) for item in value]}
    return value.item() if isinstance(value, np.generic) else value


def _decode(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "type" in value:
        fields = {name: _decode(item, arrays) for name, item in value["fields"].items()}
        return _TYPES[value["type"]](**fields)
    if "map" in value:
        return {name: _decode(item, arrays) for name, item in value["map"].items()}
    (kind,) = value
    items = [_decode(item, arrays) for item in value[kind]]
    return items if kind == "list" else tuple(items)
