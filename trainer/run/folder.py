"""The run folder: one run, one config, one process at a time.

config.yaml     every knob, resolved
chosen.json     of these, what the recipe left to Keel, and the hardware that it was chosen for
metrics.jsonl   one object a step
tensorboard/    the same as curves
events.jsonl    what happened besides: resumed, an alarm, an engine started again
trajectories/   readable samples of each step, and their tokens for `keel report`
checkpoints/    what `run.resume: auto` continues from
nonfinite/      batches of steps without a finite gradient, for `keel replay`
trackers/       how far each of `run.trackers` has been told of the run
rewards/        what reward functions print, a file for each worker
model/          the trained model, once the run has ended; model_60 that of an earlier end
before_1/ …     what runs that ended without a checkpoint wrote here
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from keel.configs.diff import stepping
from keel.configs.load import check_resumable, dump_config, load_config
from keel.configs.schema import Config, ConfigError
from keel.configs.shipped import find
from keel.trainer.run import checkpoint
from keel.trainer.run.checkpoint import State
from keel.trainer.run.journal import lacking, metric_lines, to_disk
from keel.trainer.run.manifest import (
    Entry,
    base_of,
    check_exported,
    other_than,
    said,
    write_manifest,
)

MARK = ".lock"
"""Held by the process at work in the folder. What it says, no other folder's does: by that the
trainer's ranks know that they see the same."""
WRITTEN = (
    *("config.yaml", "chosen.json", "metrics.jsonl", "events.jsonl", "tensorboard"),
    *("trajectories", "rewards", "nonfinite", "model", "trackers"),
)


class RunFolder:
    """Open as a context: creates the folder, refuses another run's, and holds it while open."""

    def __init__(self, config: Config, tokenizer: str = "") -> None:
        """tokenizer: `keel.model.load.digest_of_tokenizer` of the model's; empty: not known."""
        self.path = Path(config.run.dir).expanduser()
        self._config = config
        self._checkpoints = self.path / "checkpoints"
        self._metrics = self.path / "metrics.jsonl"
        self.set_aside: Path | None = None
        """Where entering put what an earlier run wrote that cannot be continued."""
        self.base, self.tokenizer = base_of(config), tokenizer
        self._words: list[str] = []
        self._changed: list[str] = []
        """Knobs of the learning rate that differ from the run's last start."""
        self._ended = 0
        """Step of the newest checkpoint on entering, damaged ones included."""
        self._problems: dict[Path, list[str]] = {}
        """Of checkpoints that have been verified: each is read once."""

    def __enter__(self) -> Self:
        """Raises ConfigError if the folder belongs to another config or is in use."""
        self._check_place()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / MARK).open("a+")
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
            self._mark()
            self.check()
            self._put_damaged_aside()
            if self.latest is None and self._metrics.exists():
                self.set_aside = self._put_aside()
            self._write_config()
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"run.dir = {self.path}: cannot be written ({error.strerror})"
            ) from error
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _mark(self) -> None:
        """Once, and on the disk: another machine may keep for a while what it has read of it."""
        self._lock.seek(0)
        if not self._lock.read():
            # Past the file's buffer, which `close` would want to write again on a full disk.
            os.write(self._lock.fileno(), f"{secrets.token_hex(8)}\n".encode())
            os.fsync(self._lock.fileno())

    def check(self, of: tuple[str, ...] = ("",)) -> None:
        """Raises ConfigError if the folder holds a run that this config may not continue (of the
        knobs that begin with `of`: whose policy it may not use), or one whose checkpoints are all
        damaged. Reads the newest checkpoint to its last bit."""
        self._check_place()
        newest = checkpoint.latest(self._checkpoints)
        if newest is None:
            return
        if self._config.run.resume == "never":
            raise ConfigError(
                f"run.dir = {self.path}: holds {newest.name}, and run.resume is never. Choose "
                "another folder, or run.resume=auto to resume there"
            )
        saved, state = self.path / "config.yaml", self.state()
        if self.latest is None or state is None:
            damaged = [f"\n  {path.name}: {said(why)}" for path, why in self.damaged.items()]
            raise ConfigError(
                f"run.dir = {self.path}: every checkpoint is damaged:{''.join(damaged)}\nPut one "
                f"back from a copy, or choose another folder; to start over here, move "
                f"{self._checkpoints} away"
            )
        try:
            metric_lines(self._metrics)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if saved.exists():
            before = load_config(saved)
            check_resumable(before, self._config, str(self.path), of=of)
            self._changed = stepping(before, self._config)
        elif state.config != checkpoint.config_digest(self._config):
            raise ConfigError(
                f"run.dir = {self.path}: holds {self.latest.name} of a run with another config "
                "(its config.yaml is gone, so no knob can be named). Choose another folder"
            )
        if of == ("",) and (other := other_than(state.model, self.base)):
            raise ConfigError(
                f"run.dir = {self.path}: model.path = {self._config.model.path!r} has "
                f"{other} than when {self.latest.name} was written. The run's reference policy, "
                "and what of the model is not trained, would be others from here on. Put the "
                "model back, or choose another run.dir"
            )

    def _check_place(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"run.dir = {self.path}: is a file; choose another folder")
        if "/_ray_pkg_" in str(self.path.absolute()):
            cure = "which it deletes: give a path that stays (run.dir=$PWD/runs/NAME)"
            raise ConfigError(f"run.dir = {self.path}: is in Ray's copy of --working-dir, {cure}")

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

    def _put_damaged_aside(self) -> None:
        """The run will come to their steps again, and must not write over them."""
        newest = checkpoint.latest(self._checkpoints)
        self._ended = checkpoint.step_of(newest) if newest else 0
        for path, why in self.damaged.items():
            aside = unused(path.with_name(f"damaged_{path.name}"))
            path.rename(aside)
            self._words.append(f"{path} is damaged ({said(why)}): it is kept as {aside.name}")

    @property
    def latest(self) -> Path | None:
        """Folder of the newest intact checkpoint."""
        for path in reversed(checkpoint.finished(self._checkpoints)):
            if path not in self._problems:
                problems = checkpoint.problems(path)
                if not path.exists():  # a run in progress has pruned it meanwhile
                    continue
                self._problems[path] = problems
            if not self._problems[path]:
                return path
        return None

    def chosen(self, knob: str, which: str) -> Path | None:
        """`last`: the newest; `base`: none; else the step of one. Raises ConfigError where there is
        none of that step, or it is damaged."""
        if which == "base":
            return None
        latest = self.latest
        if which == "last":
            return latest
        there = {checkpoint.step_of(p): p for p in checkpoint.finished(self._checkpoints)}
        knob = f"{knob} = {which}"
        if (path := there.get(int(which))) is None:
            known = ", ".join(map(str, sorted(there))) or "none"
            raise ConfigError(f"{knob}: {self._checkpoints} has checkpoints of steps: {known}")
        if problems := checkpoint.problems(path):
            raise ConfigError(f"{knob}: {path} is damaged ({said(problems)})")
        return path

    def state(self) -> State | None:
        """Of `latest`."""
        latest = self.latest
        return checkpoint.read_state(latest) if latest else None

    @property
    def damaged(self) -> dict[Path, list[str]]:
        """Checkpoints newer than `latest`, newest first, and what is wrong with them."""
        latest = self.latest
        return {
            path: self._problems[path]
            for path in reversed(checkpoint.finished(self._checkpoints))
            if path != latest and self._problems.get(path)
        }

    def words(self) -> list[str]:
        """What a user should know of checkpoints and record, after `check` or on entering."""
        latest = self.latest
        lines = [*self._words]
        lines += [f"{path} is damaged ({said(why)})" for path, why in self.damaged.items()]
        if lines and latest:
            lines.append(f"the run resumes from {latest.name}, the newest intact checkpoint")
        if latest and (other := checkpoint.exchanged(latest, self.base, self.tokenizer)):
            lines.append(
                f"model.path = {self._config.model.path!r} has {other} than when {latest.name} was "
                "written: what is sampled with it may not be what the run's policy says. Put the "
                "model back as it was"
            )
        if latest and self._changed:
            first = checkpoint.step_of(latest) + 1
            lines.append(f"from step {first} on: {', '.join(self._changed)}")
        if latest and (other := self._moved()):
            spread = any(knob.startswith("trainer.") for knob in other)
            lines.append(
                f"{latest.name} was saved with {listed(other, 0)}; this run has {listed(other, 1)}"
                + ": the optimizer's state is re-sharded, and numbers are added up in another order"
                * spread
            )
        if latest and (steps := lacking(self._metrics, checkpoint.step_of(latest))):
            lines.append(
                f"{self._metrics} lacks {steps}, which the run has done (lost in a crash, or by a "
                "copy that was not whole): its curves have a gap there. The training itself is not "
                f"affected: {latest.name} holds all that the run resumes from"
            )
        return lines

    def standing(self) -> str:
        """How far the run in it has come, for people; "" where there is none."""
        if (state := self.state()) is None:
            return ""
        steps = self._config.run.steps
        if state.step >= steps:
            return f"holds a run that has done its {state.step} steps; raise run.steps to go on"
        return f"holds a run, which goes on from step {state.step} of {steps}"

    def _moved(self) -> Mapping[str, tuple[Any, Any]]:
        """Knobs of the layout that are not those of the checkpoint: as it has them, as they are."""
        latest = self.latest
        return checkpoint.moved(latest, self._config) if latest else {}

    @property
    def model(self) -> Path:
        """Where the trained model is, once `export` has been through."""
        return self.path / "model"

    @property
    def rewards(self) -> Path:
        """For what reward functions print."""
        return self.path / "rewards"

    def check_model(self) -> None:
        """Raises ConfigError if the exported model is damaged."""
        check_exported(
            self.model, "move that folder away and start the run as before to write it again"
        )

    def begin(self, step: int) -> None:
        """The run resumes from `step`: what it exported there is no longer its end."""
        if self.model.exists():
            self.model.rename(unused(self.path / f"model_{max(step, self._ended)}"))

    def export(self, write: Callable[[Path], Mapping[str, Entry]]) -> None:
        """Have `write` make `model`, and return what it has sealed of it: all of it or, after an
        error, none. Raises `OSError` naming the folder where it cannot be written."""
        partial = self.path / ".model"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            sealed = write(partial)
            write_manifest(partial, sealed)
            partial.rename(self.model)
        except OSError as error:
            raise OSError(f"{self.model}: the model cannot be written ({error})") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # what there is of it after an error

    def evaluations(self) -> dict[str, list[tuple[int, float]]]:
        """`<set>/<metric>`, such as `sums/pass@1` → (step, value), from `metrics.jsonl`."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step, line in metric_lines(self._metrics):
            for name, value in json.loads(line).items():
                if name.startswith("eval/"):
                    points = found.setdefault(name.removeprefix("eval/"), [])
                    points.append((step, value))
        return found

    def unmeasured(self, step: int) -> bool:
        """Whether held-out sets are measured in this run, and were not at this step, which it has
        done: it was ended meanwhile."""
        points = [point for found in self.evaluations().values() for point in found]
        return bool(points) and all(at != step for at, _ in points)

    def check_heldout(self, step: int) -> None:
        """Raises ConfigError where a held-out set had fallen below `alarms.stop_below` when it was
        measured last, up to this step: the run has ended for that."""
        found = self.evaluations() if self._config.alarms.stop_below else {}
        for name, least in self._config.alarms.stop_below.items():
            points = [p for p in found.get(f"{name}/pass@1", []) if 0 < p[0] <= step]
            if points and points[-1][1] < least:
                at, value = points[-1]
                raise ConfigError(
                    f"alarms.stop_below.{name} = {least:g}: pass@1 was {value:.3f} at step {at}, "
                    f"which ended the run in {self.path}; lower it to go on from there all the "
                    "same, or take away the later checkpoints"
                )

    def save(
        self,
        state: State,
        write: Callable[[Path], Mapping[str, Entry]],
        say: Callable[[str], object] = print,
    ) -> Path:
        """As `checkpoint.save`, once what was written of the steps before is on the disk."""
        keep, before = self._config.run.keep_checkpoints, checkpoint.latest(self._checkpoints)

        def written(partial: Path) -> Mapping[str, Entry]:
            to_disk(self.path, checkpoint.step_of(before) if before else 0)
            return write(partial)

        saved = checkpoint.save(self._checkpoints, state, written, keep=keep, say=say)
        self._problems.pop(saved, None)  # of another that was there
        return saved


def check_recipe(recipe: str, overrides: Sequence[str], config: Config) -> None:
    """Raises ConfigError where a recipe is the `config.yaml` of a run in another folder than its
    `run.dir`, as after it was moved: the command would find no run there, or begin one."""
    path = find(Path(recipe))
    there = path.name == "config.yaml" and (path.parent / MARK).exists()
    said = any(re.match(r"\s*run(\.dir\s*=|\s*=.*\bdir\b)", word) for word in overrides)
    own = Path(config.run.dir).expanduser().resolve()
    if there and not said and path.parent.resolve() != own:
        raise ConfigError(
            f"{recipe}: is the recipe of the run in {path.parent}, and its run.dir is "
            f"{config.run.dir}. To go on with that run: run.dir={path.parent}; for a new one with "
            "this recipe, name another folder there"
        )


def listed(knobs: Mapping[str, tuple[Any, Any]], which: int) -> str:
    """The former (0) or the present (1) values."""
    return ", ".join(f"{knob} = {values[which]}" for knob, values in knobs.items())


def unused(path: Path) -> Path:
    """`path`, or the first of `path_2`, `path_3` … that does not exist."""
    found, number = path, 2
    while found.exists():
        found, number = path.with_name(f"{path.name}_{number}"), number + 1
    return found
