"""The run folder: one run, one config, one process at a time.

config.yaml     every knob, resolved
metrics.jsonl   one object a step
tensorboard/    the same as curves
trajectories/   readable samples of each step
checkpoints/    what `run.resume: auto` continues from
rewards/        what reward functions print, a file for each worker
model/          the trained model, once the run has ended; model_60 that of an earlier end
before_1/ …     what runs that ended without a checkpoint wrote here
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Self

from keel.configs.load import check_resumable, dump_config, load_config
from keel.configs.schema import Config, ConfigError
from keel.trainer.run import checkpoint
from keel.trainer.run.checkpoint import State
from keel.trainer.run.journal import metric_lines

WRITTEN = ("config.yaml", "metrics.jsonl", "tensorboard", "trajectories", "rewards", "model")


class RunFolder:
    """Open as a context: creates the folder, refuses another run's, and holds it while open."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser()
        self._config = config
        self._checkpoints = self.path / "checkpoints"
        self._metrics = self.path / "metrics.jsonl"
        self.set_aside: Path | None = None
        """Where entering put what an earlier run wrote that cannot be continued."""

    def __enter__(self) -> Self:
        """Raises ConfigError if the folder belongs to another config or is in use."""
        self.check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"run.dir = {self.path}: cannot be written ({error.strerror})"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"run.dir = {self.path}: another process is running there; choose another folder"
            ) from error
        try:
            if self.latest is None and self._metrics.exists():
                self.set_aside = self._put_aside()
            self._write_config()
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"run.dir = {self.path}: cannot be written ({error.strerror})"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def check(self, of: tuple[str, ...] = ("",)) -> None:
        """Raises ConfigError if the folder holds a run that this config may not continue, or
        whose policy it may not use: of the knobs that begin with `of`."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"run.dir = {self.path}: is a file; choose another folder")
        saved, state = self.path / "config.yaml", self.state()
        if self.latest is None or state is None:
            return
        if self._metrics.exists():
            try:
                metric_lines(self._metrics)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        if self._config.run.resume == "never":
            raise ConfigError(
                f"run.dir = {self.path}: holds {self.latest.name}, and run.resume is never. Choose "
                "another folder, or run.resume=auto to resume there"
            )
        if saved.exists():
            check_resumable(load_config(saved), self._config, str(self.path), of=of)
        elif state.config != checkpoint.config_digest(self._config):
            raise ConfigError(
                f"run.dir = {self.path}: holds {self.latest.name} of a run with another config "
                "(its config.yaml is gone, so no knob can be named). Choose another folder"
            )

    def _write_config(self) -> None:
        """Whole or, on a full disk, not at all: a resumed run is compared with it."""
        fresh = self.path / "config.tmp"
        fresh.write_text(dump_config(self._config))
        fresh.replace(self.path / "config.yaml")

    def _put_aside(self) -> Path:
        """Without a checkpoint a run starts over: make room for its files."""
        number = 1
        while (aside := self.path / f"before_{number}").exists():
            number += 1
        aside.mkdir()
        for name in WRITTEN:
            if (self.path / name).exists():
                (self.path / name).rename(aside / name)
        return aside

    @property
    def latest(self) -> Path | None:
        """Folder of the newest finished checkpoint."""
        return checkpoint.latest(self._checkpoints)

    def state(self) -> State | None:
        """Of the newest finished checkpoint."""
        return checkpoint.read_state(self.latest) if self.latest else None

    @property
    def model(self) -> Path:
        """Where the trained model is, once `export` has been through."""
        return self.path / "model"

    @property
    def rewards(self) -> Path:
        """For what reward functions print."""
        return self.path / "rewards"

    def begin(self, step: int) -> None:
        """The run resumes from `step`: what it exported there is no longer its end."""
        if self.model.exists():
            earlier = self.path / f"model_{step}"
            shutil.rmtree(earlier, ignore_errors=True)
            self.model.rename(earlier)

    def export(self, write: Callable[[Path], None]) -> None:
        """Have `write` make `model`: all of it or, after an error, none."""
        partial = self.path / ".model"
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        partial.rename(self.model)

    def evaluations(self) -> dict[str, list[tuple[int, float]]]:
        """`<set>/<metric>`, such as `sums/pass@1` → (step, value), from `metrics.jsonl`."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step, line in metric_lines(self._metrics):
            for name, value in json.loads(line).items():
                if name.startswith("eval/"):
                    points = found.setdefault(name.removeprefix("eval/"), [])
                    points.append((step, value))
        return found

    def save(self, state: State, write: Callable[[Path], None]) -> Path:
        keep = self._config.run.keep_checkpoints
        return checkpoint.save(self._checkpoints, state, write, keep=keep)
