"""Save the batches of steps without a finite gradient for `keel replay`, as
`nonfinite/step_000007.npz`. These files contain no pickles, so opening one runs no code."""

import dataclasses
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from keel.model import ray_timeouts
from keel.rl.types import ScoredGroup, Segment

BATCHES = "nonfinite"  # the folder's name
_MAX_FILES = 8
_TEXT = "text"


def save_batch(
    run: Path, step: int, groups: Sequence[ScoredGroup], findings: Sequence[str]
) -> Path:
    """Save the batch of `step` and return its file. Only the newest files are kept. Raises
    LookupError if recordings of the batch are lost."""
    path = run / BATCHES / f"step_{step:06d}.npz"
    path.parent.mkdir(exist_ok=True)
    content: dict[str, Any] = {"step": step, "findings": list(findings)}
    partial = path.with_suffix(".tmp")
    try:
        # As `np.savez_compressed`, but with the recordings of only one segment in memory.
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
            content["groups"] = _encode(list(groups), file)
            text = np.frombuffer(json.dumps(content, default=str).encode(), np.uint8)
            _write_array(file, _TEXT, text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    others = [other for other in list_batches(run) if other != path]
    for old in others[: 1 - _MAX_FILES]:
        old.unlink()
    return path


def list_batches(run: Path) -> list[Path]:
    return sorted((run / BATCHES).glob("step_*.npz"), key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def read_batch(path: Path) -> tuple[list[ScoredGroup], list[str]]:
    """Return the groups and findings from a saved batch. Raises ValueError if it is invalid."""
    try:
        with np.load(path, allow_pickle=False) as file:
            content = json.loads(bytes(file[_TEXT]))
            groups = msgspec.convert(
                content["groups"], list[ScoredGroup], dec_hook=lambda _, name: file[name]
            )
            return groups, content["findings"]
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a saved batch ({error})") from error


def _write_array(file: zipfile.ZipFile, name: str, value: NDArray[Any]) -> None:
    with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, value, allow_pickle=False)


def _encode(value: Any, file: zipfile.ZipFile) -> Any:
    """Convert a value to JSON and write its arrays to `file`, which leaves their names."""
    if isinstance(value, np.ndarray):
        name = f"array_{len(file.filelist)}"
        _write_array(file, name, value)
        return name
    if dataclasses.is_dataclass(value):
        if isinstance(value, Segment) and value.stored:
            refs = value.recording_refs
            value = value.loaded(ray_timeouts.fetch(refs, seconds=ray_timeouts.CALL_S))
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _encode(getattr(value, name), file) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _encode(item, file) for key, item in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [_encode(item, file) for item in value]
    return value.item() if isinstance(value, np.generic) else value
