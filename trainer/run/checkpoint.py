"""Checkpoint folders: written whole or not at all, found again, and verified.

    checkpoints/step_000123/     one finished checkpoint
        …                        what `write` put there (weights, optimizer, random state)
        state.json               where the run stands
        keel_manifest.json       written last: digests of all the others
    checkpoints/.step_000124     one that is being written, or that a crash cut short
    checkpoints/damaged_…        a damaged one, kept for repair

With ranks on several machines the run folder must be on a file system that all of them see.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.configs.diff import flatten_config
from keel.configs.schema import Config
from keel.trainer.run.manifest import (
    MANIFEST,
    Entry,
    find_damage,
    other_than,
    sync_folder,
    write_manifest,
)
from keel.trainer.run.restarts import CollectiveTimeout

STATE = "state.json"
FORMAT = 2
"""Number in `STATE` of the layout of a checkpoint folder."""
PROGRESS = "trainer.json"
"""The trainer's own, with the layout that it was written on."""
PICKLED = "deepspeed"
"""Folder of DeepSpeed's own files in checkpoints of early releases. They are pickles, which can run
code when they are read, so they never are."""
LAYOUT = (
    "trainer.ranks",
    "trainer.zero_stage",
    "trainer.expert_parallel",
    "trainer.sequence_parallel",
    "rollout.engines",
)
"""Knobs that say over what a run is spread."""
_FINISHED = re.compile(r"step_(\d{6,})")


class SaveError(RuntimeError):
    """A checkpoint could not be written. The run is as it was before, and can go on."""

    done = False
    """It would have been that of the last step."""


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
    model: str = ""
    """Fingerprint of the model that the run began with (`keel.trainer.run.manifest.base_of`)."""
    tokenizer: str = ""
    """The same of its tokenizer (`keel.model.load.digest_of_tokenizer`)."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.version < 0:
            raise ValueError(
                f"checkpoint: step {self.step} and version {self.version} must be >= 0"
            )


def save(
    root: Path,
    state: State,
    write: Callable[[Path], Mapping[str, Entry]],
    *,
    keep: int,
    say: Callable[[str], object] = print,
) -> Path:
    """Write the checkpoint of `state.step` under `root` and drop all but the newest `keep`.

    `write` fills the folder it is given, and returns what it has sealed of it already. A crash at
    any moment leaves the older checkpoints as they were. Returns the finished folder; one of the
    same step is replaced. Raises `SaveError` naming the folder where it cannot be written, and
    `RuntimeError` where a rank failed at it in another way (`CollectiveTimeout`, where others
    then do not answer), `WorkerLost` where it is gone.
    `say`: told of older ones that cannot be deleted.
    """
    final = root / f"step_{state.step:06d}"
    partial = root / f".{final.name}"
    try:
        for cut_short in root.glob(".step_*"):  # room that this one may need
            shutil.rmtree(cut_short, ignore_errors=True)
        root.mkdir(exist_ok=True)  # and no more of it: a run folder that is gone was deleted
        partial.mkdir()
        sealed = write(partial)
        content = {"format": FORMAT, **dataclasses.asdict(state)}
        (partial / STATE).write_text(json.dumps(content, indent=1) + "\n")
        write_manifest(partial, sealed)
        if final.exists():
            final.rename(root / f".{final.name}.replaced")
        partial.rename(final)
        sync_folder(root)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # Any other says itself what is to be done: `WorkerLost` that the run starts again.
        if (
            isinstance(error, (OSError, SaveError, CollectiveTimeout))
            or type(error) is RuntimeError
        ):
            text = f"{final}: cannot be written: {error}{_left(root)}"
            disk = isinstance(error, (OSError, SaveError)) and not isinstance(error, TimeoutError)
            kind = (
                CollectiveTimeout
                if isinstance(error, CollectiveTimeout)
                else SaveError
                if disk
                else RuntimeError
            )
            raise kind(text) from error
        raise
    try:
        prune(root, final, keep=keep)
    except OSError as error:  # this one is there all the same
        say(f"warning: {root}: older checkpoints cannot be deleted: {error}")
    return final


def read_state(folder: Path) -> State:
    """Raises `ValueError` naming the file when it is not a checkpoint's state."""
    path = folder / STATE
    try:
        return State(**{name: v for name, v in _content(path).items() if name != "format"})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not the state of a checkpoint ({error})") from error


def exchanged(folder: Path, base: str, tokenizer: str) -> str:
    """What of a run's model is another now than when it wrote this checkpoint; "" where nothing is
    or nobody knows. base, tokenizer: as `State` has them, of now."""
    state = read_state(folder)
    found = [other_than(state.model, base)]
    if state.tokenizer and tokenizer and state.tokenizer != tokenizer:
        found.append("another tokenizer or chat template")
    return " and ".join(filter(None, found))


def finished(root: Path) -> list[Path]:
    """Finished checkpoints under `root`, oldest first, damaged ones among them."""
    found = [
        path
        for path in (root.iterdir() if root.is_dir() else ())
        if _FINISHED.fullmatch(path.name)
        and any((path / name).is_file() for name in (STATE, MANIFEST))
    ]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """Of a finished checkpoint, by its name."""
    return int(folder.name.removeprefix("step_"))


def latest(root: Path) -> Path | None:
    """The finished checkpoint of the highest step, if there is one."""
    return next(reversed(finished(root)), None)


def latest_complete(root: Path) -> Path | None:
    """The same without those that lack files, or have some of another size: at once, where a look
    at every bit reads all of it."""
    return next((p for p in reversed(finished(root)) if not problems(p, bits=False)), None)


def problems(folder: Path, *, bits: bool = True) -> list[str]:
    """List why a checkpoint cannot be resumed, a line for each file. Reads all files to their last
    byte, unless `bits` is False."""
    if (folder / PICKLED).exists():
        return [
            f"{PICKLED}/: pickles of an early release of Keel, which could run code and are not "
            "read; export its model with that release and start a new run from it"
        ]
    found = find_damage(folder, extra=True, bits=bits)
    if not found:
        try:
            step = read_state(folder).step
        except ValueError as error:
            return [str(error)]
        if step != step_of(folder):
            return [f"{STATE}: of step {step}, so this is another checkpoint under its name"]
    return found


def layout_of(config: Config) -> dict[str, Any]:
    """Knob → value: over what a run is spread."""
    knobs = flatten_config(config)
    return {knob: knobs[knob] for knob in LAYOUT}


def moved(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Knobs of the layout that differ → as the checkpoint was written, as `config` has them."""
    try:
        saved = _content(folder / PROGRESS)
    except (OSError, ValueError):
        return {}
    now = layout_of(config)
    return {k: (saved[k], now[k]) for k in LAYOUT if k in saved and saved[k] != now[k]}


def prune(root: Path, newest: Path, *, keep: int) -> None:
    """Delete what comes before `keep` checkpoints, `newest` being the last of these, and what
    crashes left behind. Any after it are damaged, or the run would have gone on from them."""
    if keep < 1:
        raise ValueError(f"prune: keep = {keep}, at least one checkpoint must stay")
    until = [path for path in finished(root) if step_of(path) <= step_of(newest)]
    for path in until[:-keep]:
        path.rename(root / f".{path.name}")  # gone at once for whoever reads it meanwhile
    for path in root.glob(".step_*"):
        if path.is_symlink():
            path.unlink()  # to where somebody has moved it
        else:
            shutil.rmtree(path)


def config_digest(config: Config) -> str:
    """Digest of everything in `config` that shapes the training: all but `run` and `eval`."""
    sections = dataclasses.asdict(config)
    shaping = {name: value for name, value in sections.items() if name not in ("run", "eval")}
    text = json.dumps(shaping, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _left(root: Path) -> str:
    """What there is at `root` after a checkpoint failed."""
    if not root.is_dir():
        return ""
    last, free = latest(root), shutil.disk_usage(root).free
    there = f"{last.name} is there to resume from" if last else "there is no earlier checkpoint"
    room = f"{free / 2**30:.1f} GiB" if free >= 2**30 else f"{free / 2**20:.1f} MiB"
    return f"\n{there}; {room} are free"


def _content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
