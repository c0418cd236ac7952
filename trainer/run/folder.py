"""The run folder: one run, one config, one process at a time.

config.yaml     every knob, resolved
chosen.json     the `auto` values that Keel chose, and the hardware they were chosen for
metrics.jsonl   one JSON object per step
tensorboard/    the same metrics as curves
events.jsonl    resumes, restarts, alarms and other events
trajectories/   samples of each step, and their tokens for `keel report`
checkpoints/    what `run.resume: auto` continues from
nonfinite/      batches of steps without a finite gradient, for `keel replay`
trackers/       progress of each of `run.trackers`
rewards/        output of reward functions, one file per worker
model/          the trained model, once the run has ended; model_60/ is from an earlier end
before_1/ …     files of earlier runs that ended without a checkpoint
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from keel.configs.diff import check_resumable, learning_rate_changes
from keel.configs.dump import dump_config
from keel.configs.load import load_config
from keel.configs.paths import write_whole
from keel.configs.schema import Config, ConfigError
from keel.trainer.run import checkpoint
from keel.trainer.run.checkpoint import State
from keel.trainer.run.journal import EVENTS, metric_lines
from keel.trainer.run.manifest import (
    Entry,
    fingerprint_base,
    join_problems,
    sync,
    sync_folder,
    write_manifest,
)

MARK = ".lock"
"""Name of the lock file. It contains a random token. Trainer ranks use it to verify that they see
the same folder."""
_WRITTEN = (
    *("config.yaml", "chosen.json", "metrics.jsonl", "events.jsonl", "tensorboard"),
    *("trajectories", "rewards", "nonfinite", "model", "trackers"),
)


class RunFolder:
    """Context manager that creates, checks and locks a run folder."""

    def __init__(self, config: Config, tokenizer: str = "") -> None:
        """`tokenizer` is the digest of the model's tokenizer, or an empty string if unknown."""
        self.path = config.run.folder
        self.model = self.path / "model"  # folder for the exported model
        self.rewards = self.path / "rewards"  # folder for the output of reward functions
        self.set_aside: Path | None = None
        """Folder to which the files of an earlier run without a checkpoint were moved."""
        self.base, self.tokenizer = fingerprint_base(config), tokenizer
        self._config = config
        self._checkpoints, self._metrics = self.path / "checkpoints", self.path / "metrics.jsonl"
        self._warnings: list[str] = []
        self._last_step = 0
        """Step of the newest checkpoint when the folder was opened, even if that checkpoint was
        damaged."""
        self._problems: dict[Path, list[str]] = {}
        """Cache of the problems found in each verified checkpoint, so that each one is read only
        once."""

    def __enter__(self) -> Self:
        self._check_location()
        with self._writable():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / MARK).open("a+")
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise self._error("in use by another process; choose another folder") from error
            with self._writable():
                self._lock.seek(0)
                if not self._lock.read():
                    # Bypasses the file's buffer, which `close` would flush again on a full disk.
                    os.write(self._lock.fileno(), f"{secrets.token_hex(8)}\n".encode())
                    os.fsync(self._lock.fileno())
                self.check()
                self._set_aside()
                write_whole(self.path / "config.yaml", dump_config(self._config))
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"run.dir = {self.path}: {text}")

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(f"cannot be written ({error.strerror})") from error

    def _check_location(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise self._error("is a file; choose another folder")
        if "/_ray_pkg_" in str(self.path.absolute()):
            raise self._error(
                "is in Ray's copy of --working-dir, which Ray deletes. Set an absolute path"
            )

    def check(self, of: tuple[str, ...] = ("",)) -> None:
        """Verify the newest checkpoint. Raises ConfigError if the run can't continue from it with
        this config. Only knobs that start with one of the prefixes in `of` are compared."""
        self._check_location()
        newest = checkpoint.latest(self._checkpoints)
        if newest is None:
            return
        if self._config.run.resume == "never":
            raise self._error(
                f"holds {newest.name}, and run.resume is never. Choose another folder, or set "
                "run.resume=auto"
            )
        latest, damaged = self._find_newest_intact()
        if latest is None:
            lines = [f"\n  {path.name}: {join_problems(p)}" for path, p in damaged.items()]
            raise self._error(
                f"every checkpoint is damaged:{''.join(lines)}\nRestore one from a copy, choose "
                f"another folder, or move {self._checkpoints} away to start over"
            )
        saved, state = self.path / "config.yaml", checkpoint.read_state(latest)
        try:
            metric_lines(self._metrics)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if saved.exists():
            before = load_config(saved)
            check_resumable(before, self._config, str(self.path), of=of)
            if changed := learning_rate_changes(before, self._config):
                self._warnings.append(f"from step {state.step + 1} on: {', '.join(changed)}")
        elif state.config != checkpoint.config_digest(self._config):
            raise self._error(
                f"holds {latest.name} of a run with another config. Choose another folder"
            )
        model = f"model.path = {self._config.model.path!r}"
        if state.model and self.base and state.model != self.base:
            text = f"{model} has other weights than when {latest.name} was written. Restore them"
            if of == ("",):
                raise self._error(f"{text}, or choose another run.dir")
            self._warnings.append(text)
        if state.tokenizer and self.tokenizer and state.tokenizer != self.tokenizer:
            changed = f"{model} has another tokenizer or chat template than when"
            self._warnings.append(f"{changed} {latest.name} was written")

    def _set_aside(self) -> None:
        """Rename damaged checkpoints, or all of a run's files if it has no checkpoint."""
        newest = checkpoint.latest(self._checkpoints)
        self._last_step = checkpoint.step_of(newest) if newest else 0
        latest, damaged = self._find_newest_intact()
        if latest is None and self._metrics.exists():
            self.set_aside = _unused_path(self.path / "before", 1)
            self.set_aside.mkdir()
            for name in _WRITTEN:
                if (self.path / name).exists():
                    (self.path / name).rename(self.set_aside / name)
        for path, problems in damaged.items():
            aside = _unused_path(path.with_name(f"damaged_{path.name}"))
            path.rename(aside)
            self._warnings.append(
                f"{path} is damaged ({join_problems(problems)}). It is kept as {aside.name}, and "
                f"the run resumes from {latest and latest.name}"
            )

    @property
    def latest(self) -> Path | None:
        return self._find_newest_intact()[0]

    def _find_newest_intact(self) -> tuple[Path | None, dict[Path, list[str]]]:
        """Return the newest intact checkpoint, along with any problems found in newer ones, newest
        first."""
        damaged: dict[Path, list[str]] = {}
        for path in reversed(checkpoint.list_finished(self._checkpoints)):
            problems = self._problems.get(path)
            if problems is None:
                problems = checkpoint.find_problems(path)
                if not path.exists():  # pruned meanwhile by a run in progress
                    continue
                self._problems[path] = problems
            if not problems:
                return path, damaged
            damaged[path] = problems
        return None, damaged

    def select_checkpoint(self, knob: str, value: str) -> Path | None:
        """Return the checkpoint that the user asked for. `value` is `last`, a step number, or
        `base`, which returns None. Raises ConfigError naming the setting `knob` if the checkpoint
        is missing or damaged."""
        if value in ("base", "last"):
            return self.latest if value == "last" else None
        by_step = {checkpoint.step_of(p): p for p in checkpoint.list_finished(self._checkpoints)}
        if (path := by_step.get(int(value))) is None:
            steps = ", ".join(map(str, sorted(by_step))) or "none"
            raise ConfigError(
                f"{knob} = {value}: {self._checkpoints} has checkpoints of steps: {steps}"
            )
        if problems := checkpoint.find_problems(path):
            raise ConfigError(f"{knob} = {value}: {path} is damaged ({join_problems(problems)})")
        return path

    def state(self) -> State | None:
        latest = self.latest
        return checkpoint.read_state(latest) if latest else None

    def warnings(self) -> list[str]:
        """Return warnings about checkpoints and metrics. Call `check` or enter the folder before
        this."""
        latest, damaged = self._find_newest_intact()
        lines = [f"{path} is damaged ({join_problems(p)})" for path, p in damaged.items()]
        if damaged and latest:
            lines.append(f"the run resumes from {latest.name}, the newest intact checkpoint")
        return [*self._warnings, *lines]

    def status(self) -> str:
        """Describe the progress of the run in this folder, or return "" for a new run."""
        state, steps = self.state(), self._config.run.steps
        if state and state.step >= steps:
            return f"holds a run whose {state.step} steps are done; raise run.steps to continue"
        return f"holds a run that resumes from step {state.step} of {steps}" if state else ""

    def begin(self, step: int) -> None:
        if self.model.exists():
            self.model.rename(_unused_path(self.path / f"model_{max(step, self._last_step)}"))

    def export(self, write: Callable[[Path], Mapping[str, Entry]]) -> None:
        """Export the model atomically. `write` returns the manifest entries for the files it has
        sealed."""
        partial = self.path / ".model"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            sealed = write(partial)
            write_manifest(partial, sealed)
            partial.rename(self.model)
        except OSError as error:
            raise OSError(f"{self.model}: the model cannot be written ({error})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def evaluations(self) -> dict[str, list[tuple[int, float]]]:
        """Return the values of each evaluation metric, such as `sums/pass@1`, as (step, value)
        pairs."""
        points: dict[str, list[tuple[int, float]]] = {}
        for step, line in metric_lines(self._metrics):
            for name, value in json.loads(line).items():
                if name.startswith("eval/"):
                    points.setdefault(name.removeprefix("eval/"), []).append((step, value))
        return points

    def needs_evaluation(self, step: int) -> bool:
        steps = [at for points in self.evaluations().values() for at, _ in points]
        return bool(steps) and step not in steps

    def check_heldout(self, step: int) -> None:
        """Raise ConfigError if `alarms.stop_below` ended the run at or before `step`."""
        evaluations = self.evaluations()
        for name, limit in self._config.alarms.stop_below.items():
            points = [p for p in evaluations.get(f"{name}/pass@1", []) if 0 < p[0] <= step]
            if points and points[-1][1] < limit:
                at, value = points[-1]
                raise ConfigError(
                    f"alarms.stop_below.{name} = {limit:g}: pass@1 was {value:.3f} at step {at}, "
                    f"which ended the run in {self.path}. Lower it to continue, or delete the "
                    "later checkpoints"
                )

    def save(
        self,
        state: State,
        write: Callable[[Path], Mapping[str, Entry]],
        say: Callable[[str], object] = print,
    ) -> Path:
        keep = self._config.run.keep_checkpoints

        def synced(partial: Path) -> Mapping[str, Entry]:
            for path in (self._metrics, self.path / EVENTS):
                if path.exists():
                    sync(path)
            sync_folder(self.path)
            return write(partial)

        saved = checkpoint.save(self._checkpoints, state, synced, keep=keep, say=say)
        self._problems.pop(saved, None)  # of a replaced one
        return saved


def _unused_path(path: Path, number: int = 0) -> Path:
    """Return `path`, or the first of `path_2`, `path_3` … that doesn't exist yet."""
    candidate = path.with_name(f"{path.name}_{number}") if number else path
    return _unused_path(path, max(2, number + 1)) if candidate.exists() else candidate
