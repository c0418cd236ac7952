"""Write checkpoint folders atomically, find them again and verify them.

    checkpoints/step_000123/    a finished checkpoint
      …                         weights, optimizer, random state
      state.json                step, version, data position
      keel_manifest.json        written last: digests of all other files
    checkpoints/.step_000124    a checkpoint in progress, or one cut short by a crash
    checkpoints/damaged_…       a damaged checkpoint, kept for repair

If ranks run on several machines, the run folder must be on a file system that all of them share.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.configs.schema import Config
from keel.trainer.run.manifest import MANIFEST, Entry, find_damage, sync_folder, write_manifest

_STATE = "state.json"
PROGRESS = "trainer.json"  # name of the file that contains the trainer's progress
_FINISHED = re.compile(r"step_(\d{6,})")


class SaveError(RuntimeError):
    """Raised if a checkpoint couldn't be written. The run itself can continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State that a resumed run needs in addition to the trainer's own files."""

    step: int
    version: int  # version number of the weights
    cursor: Mapping[str, Any] = field(default_factory=dict)
    """Position in the data stream, as JSON values."""
    config: str  # digest of the run's config (`config_digest`)
    model: str = ""  # fingerprint of the run's initial model (`manifest.fingerprint_base`)
    tokenizer: str = ""  # digest of the tokenizer (`keel.model.load.digest_of_tokenizer`)


def save(
    root: Path,
    state: State,
    write: Callable[[Path], Mapping[str, Entry]],
    *,
    keep: int,
    say: Callable[[str], object] = print,
) -> Path:
    """Write the checkpoint for `state.step`, and delete all but the newest `keep` checkpoints.
    `write` writes the trainer's files to the folder it is given and returns the manifest entries
    for the files it has sealed. Raises `SaveError` if a file can't be written to disk."""
    final = root / f"step_{state.step:06d}"
    partial = root / f".{final.name}"
    try:
        for unfinished in root.glob(".step_*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        root.mkdir(exist_ok=True)  # not its parents: a deleted run folder must not reappear
        partial.mkdir()
        sealed = write(partial)
        (partial / _STATE).write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n")
        write_manifest(partial, sealed)
        if final.exists():
            final.rename(root / f".{final.name}.replaced")
        partial.rename(final)
        sync_folder(root)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, SaveError | OSError) and not isinstance(error, TimeoutError):
            raise SaveError(f"{final}: cannot be written: {error}") from error
        raise
    try:
        old = [path for path in list_finished(root) if step_of(path) <= state.step][:-keep]
        for path in old:
            path.rename(root / f".{path.name}")  # atomic for concurrent readers
        for path in root.glob(".step_*"):
            if path.is_symlink():  # moved elsewhere by the user
                path.unlink()
            else:
                shutil.rmtree(path)
    except OSError as error:
        say(f"warning: {root}: older checkpoints cannot be deleted: {error}")
    return final


def read_state(folder: Path) -> State:
    """Read a checkpoint's state. Raises ValueError with the file name if it is invalid."""
    path = folder / _STATE
    try:
        return State(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not the state of a checkpoint ({error})") from error


def list_finished(root: Path) -> list[Path]:
    folders = [
        path
        for path in (root.iterdir() if root.is_dir() else ())
        if _FINISHED.fullmatch(path.name)
        and any((path / name).is_file() for name in (_STATE, MANIFEST))
    ]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def latest(root: Path) -> Path | None:
    return next(reversed(list_finished(root)), None)


def latest_complete(root: Path) -> Path | None:
    """Return the newest checkpoint in which all files have the right size."""
    return next(
        (p for p in reversed(list_finished(root)) if not find_problems(p, bits=False)), None
    )


def find_problems(folder: Path, *, bits: bool = True) -> list[str]:
    """Return the reasons why a checkpoint can't be used, one line per file. With `bits`, the
    contents of all files are checked too."""
    if damage := find_damage(folder, extra=True, bits=bits):
        return damage
    try:
        step = read_state(folder).step
    except ValueError as error:
        return [str(error)]
    if step != step_of(folder):
        return [f"{_STATE}: of step {step}, so this is another checkpoint under its name"]
    return []


def config_digest(config: Config) -> str:
    """Return a digest of the config sections that affect training, which are all except `run` and
    `eval`."""
    sections = dataclasses.asdict(config)
    shaping = {name: value for name, value in sections.items() if name not in ("run", "eval")}
    text = json.dumps(shaping, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
