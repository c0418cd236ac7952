"""Checkpoint folders: written whole or not at all, and found again.

    checkpoints/step_000123/     one finished checkpoint
        state.json               written last: its presence says the rest is there
        …                        what `write` put there (weights, optimizer, random state)
    checkpoints/.step_000124     one that is being written, or that a crash cut short

With ranks on several machines the run folder must be on a file system that all of them see.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.configs.schema import Config

STATE = "state.json"
_FINISHED = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a resumed run needs beside the trainer's own files."""

    step: int
    version: int
    """Version of the weights."""
    cursor: Mapping[str, Any] = field(default_factory=dict)
    """Where the data stream stands, as plain JSON values."""
    config: str
    """`config_digest` of the run that wrote it."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.version < 0:
            raise ValueError(
                f"checkpoint: step {self.step} and version {self.version} must be >= 0"
            )


def save(root: Path, state: State, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write the checkpoint of `state.step` under `root` and drop all but the newest `keep`.

    `write` fills the folder it is given. A crash at any moment leaves the older checkpoints as
    they were. Returns the finished folder; one of the same step is replaced.
    """
    final = root / f"step_{state.step:06d}"
    partial = root / f".{final.name}"
    for cut_short in root.glob(".step_*"):  # room that this one may need
        shutil.rmtree(cut_short, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(partial)
        (partial / STATE).write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n")
        _flush(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _flush_folder(root)
    prune(root, keep=keep)
    return final


def read_state(folder: Path) -> State:
    """Raises `ValueError` naming the file when it is not a checkpoint's state."""
    path = folder / STATE
    try:
        return State(**json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path}: not the state of a checkpoint ({error})") from error


def finished(root: Path) -> list[Path]:
    """Finished checkpoints under `root`, oldest first."""
    found = [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := _FINISHED.fullmatch(path.name)) and (path / STATE).is_file()
    ]
    return [path for _, path in sorted(found)]


def latest(root: Path) -> Path | None:
    """The finished checkpoint of the highest step, if there is one."""
    return next(reversed(finished(root)), None)


def prune(root: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what crashes left behind."""
    if keep < 1:
        raise ValueError(f"prune: keep = {keep}, at least one checkpoint must stay")
    for path in [*finished(root)[:-keep], *root.glob(".step_*")]:
        shutil.rmtree(path)


def config_digest(config: Config) -> str:
    """Digest of everything in `config` that shapes the training: all but `run` and `eval`."""
    sections = dataclasses.asdict(config)
    shaping = {name: value for name, value in sections.items() if name not in ("run", "eval")}
    text = json.dumps(shaping, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _flush(folder: Path) -> None:
    """Bring every file and folder below `folder` to the disk, so that the rename comes after."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        _flush_folder(Path(parent))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
