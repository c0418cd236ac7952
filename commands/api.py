"""`keel.train`: a run from Python, in a script or in a notebook.

    import keel

    def brief(prompt, trajectory):
        return max(0.0, 1 - trajectory.sampled_tokens / 100)

    run = keel.train(
        "quickstart",
        prompts=[{"prompt": "Spell cat backwards.", "answer": "tac"}, …],
        rewards={"correct": 1.0, brief: 0.2},
        knobs={"run.steps": 20, "run.dir": "runs/mine"},
    )
    run.metrics[-1]["reward/mean"], run.model

It is `keel train` in this process, with the same checks, folder, checkpoints and view. The same
call resumes a run. Prompts are written into the run folder as JSONL.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any, Self, cast

import yaml

from keel import configs
from keel.commands import train as main
from keel.commands.arguments import (
    Reward,
    as_json,
    as_value,
    held_out,
    overrides_of,
    plain_data,
    rows_of,
    weights_of,
)
from keel.configs.dump import quoted
from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.rewards.custom import named, passing
from keel.trainer.launch import Runtime
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import steps_of
from keel.trainer.run.signals import Preempted, preempted, stop_requested, watching
from keel.trainer.run.view import View

Callback = Callable[[int, Mapping[str, float]], object]
"""Called after each step with its number, from 1, and its metrics as written to `metrics.jsonl`. A
true return value or an exception ends the run with a checkpoint."""
PASSED = "passed"
"""Subfolder of the run folder that stores recipes and prompts passed from Python."""
PROMPTS, SOURCES = "keel.train(prompts=…)", "data.sources"
SOURCE = {"name": "prompts", "source": "jsonl"}
HOLDOUT = re.compile(r"\bdata\.sources\[prompts\]\.holdout = (\d+)")
AGAIN = "make the same call of keel.train again"
_RESUME = "progress is saved; the same call resumes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What `keel.train` returns: the metrics and the trained model of a run."""

    folder: Path
    metrics: Sequence[Mapping[str, float]]
    """One mapping of metrics per step, including `step` and `time` (seconds since 1970). Step 0
    holds the evaluation before training."""
    model: Path | None
    """Folder of the trained model. None if the run was stopped early, in which case it can be
    resumed."""


def train(
    recipe: str | Path | Mapping[str, Any] = "quickstart",
    *,
    prompts: Any = None,
    rewards: Reward | Sequence[Reward] | Mapping[Any, float] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    knobs: Mapping[str, Any] | Sequence[str] = (),
    holdout: int = 0,
) -> Run:
    """Run or resume a recipe.

    Args:
        recipe: A file, the name of a recipe that comes with Keel, or its contents as a mapping.
        prompts: Replaces the recipe's prompts: a list, a generator, a `datasets.Dataset` or a
            pandas table of rows as in a JSONL source (docs/rewards.md), or texts. Further columns
            reach reward functions as `prompt.reward["columns"]`; None and NaN are omitted. The knob
            `data.sources[prompts].columns` renames columns.
        holdout: Number of prompts to hold out for evaluation.
        rewards: A function of a prompt and a trajectory (or of a group, docs/rewards.md), several,
            or weights of functions and of Keel's reward parts. Applies to all sources.
        callbacks: Functions to call after each step.
        knobs: `{"run.steps": 20}`, `["run.steps=20"]` as on the command line, or
            `{"run": {"steps": 20}}`, which leaves the other knobs of a section unchanged.

    Raises:
        ConfigError: The run is invalid; raised before anything starts.
        RuntimeError, ValueError, OSError: The run failed.
        KeyboardInterrupt: Ctrl-C, or as its subclass `keel.Preempted` SIGTERM, SIGHUP or SIGUSR1
            stopped the run, after a checkpoint.
    """
    value = cast(object, recipe)
    if not isinstance(value, (str, Path, Mapping)) or (isinstance(value, str) and not value):
        raise ConfigError(f"keel.train(recipe={recipe!r}): must be a file, a name or a mapping")
    overrides, told = overrides_of(knobs), _Telling(callbacks)
    holdout, weights = held_out(holdout), [] if rewards is None else weights_of(rewards)
    with ExitStack() as stack:
        stack.enter_context(watching())
        # Knobs of sources may refer to `prompts`, which are written into the run folder.
        others = [one for one in overrides if prompts is None or not one.startswith(SOURCES)]
        if prompts is not None:  # before the file exists; the recipe may have no source
            others.insert(0, f"{SOURCES}={quoted([{**SOURCE, 'path': PASSED}])}")
        path = recipe if not isinstance(recipe, Mapping) else _written(recipe, others)
        folder = Path(load_config(path, others).run.dir).expanduser()
        if prompts is not None:
            if any(one.startswith(f"{SOURCES}=") for one in overrides):
                raise ConfigError(f"keel.train(prompts=…, knobs={SOURCES}): keep one")
            file = _passed(prompts, folder)
            source = {**SOURCE, "path": str(file), "holdout": holdout}
            overrides.insert(0, f"{SOURCES}={as_value([source], 'holdout=…')}")
            stack.enter_context(_by_row(file))
        elif holdout:
            raise ConfigError(
                "keel.train(holdout=…): needs prompts=…; set it in the recipe's sources"
            )
        if weights:
            try:
                stack.enter_context(passing([part for part, _ in weights if callable(part)]))
                names = {named(part) if callable(part) else part: of for part, of in weights}
            except ValueError as error:
                raise ConfigError(f"keel.train(rewards=…): {error}") from error
            weighted = as_value(names, "rewards=…")
            used = {source.name for source in load_config(path, overrides).data.sources}
            every = load_config(path, [*overrides, "data.only=[]"]).data.sources
            for index, source in enumerate(every):
                if source.name in used:
                    overrides.append(f"data.sources.{index}.rewards={weighted}")
        try:
            main.train(str(path), overrides, drive=partial(_driven, told=told), again=AGAIN)
        except KeyboardInterrupt as error:
            if signal := preempted():  # Ray turns it into a KeyboardInterrupt
                raise Preempted(f"stopped by {signal}; {_RESUME}") from error
            raise
        if signal := preempted():
            raise Preempted(f"stopped by {signal}; {_RESUME}") from told.error
        if stop_requested():
            raise KeyboardInterrupt(f"stopped; {_RESUME}") from told.error
        if told.error is not None:
            raise told.error
    config = load_config(path, overrides)
    run = RunFolder(config)
    return Run(
        folder=run.path,
        metrics=tuple(steps_of(run.path / "metrics.jsonl").values()),
        model=run.model if run.model.exists() else None,
    )


def _written(recipe: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    tree = dict(recipe)
    if isinstance(base := tree.get("defaults"), (str, PurePath)):
        tree["defaults"] = _base(Path(os.path.expanduser(base)))
    tree = plain_data(tree, "recipe={…}")
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    with TemporaryDirectory() as there:  # run.dir is in the recipe or the overrides
        path = Path(there, "recipe.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            folder = Path(load_config(path, overrides).run.dir).expanduser()
        except ConfigError as error:
            message = str(error).replace(str(path), "keel.train(recipe={…})")
            raise ConfigError(message) from error
    return _kept(folder / PASSED, text, "recipe.yaml")


def _base(path: Path) -> Path:
    shipped = Path(configs.__file__).parent / f"{path.name.removesuffix('.yaml')}.yaml"
    bare = path.name == str(path) and not path.exists() and shipped.is_file()
    return shipped if bare else path.absolute()


@contextmanager
def _by_row(file: Path) -> Iterator[None]:
    """Rewrite errors that name lines of `file` so that they name the rows and arguments the caller
    passed."""
    try:
        yield
    except ConfigError as error:
        message = re.sub(rf"{re.escape(str(file))}:(\d+)", rf"{PROMPTS}: row \1", str(error))
        message = HOLDOUT.sub(r"keel.train(holdout=\1)", message)
        if message == str(error) and str(file) not in message:
            raise
        raise ConfigError(message.replace(str(file), PROMPTS)) from error


def _passed(prompts: Any, folder: Path) -> Path:
    lines: list[str] = []
    for number, row in enumerate(rows_of(prompts), start=1):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, default=as_json) + "\n")
            lines[-1].encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"keel.train(prompts=…): row {number} contains half of a surrogate pair "
                "(\\ud800 … \\udfff). Remove it"
            ) from error
        except (TypeError, ValueError) as error:  # keys that are not text, or circular values
            raise ConfigError(f"keel.train(prompts=…): row {number}: {error}") from error
    if not lines:
        raise ConfigError("keel.train(prompts=…): is empty")
    return _kept(folder / PASSED, "".join(lines), "prompts.jsonl")


def _kept(folder: Path, text: str, name: str) -> Path:
    """Write `text` to a file named after its content, so that repeating the same call resumes the
    same run."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = folder / f"{digest}-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            fresh = path.with_suffix(".tmp")
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from error
    return path


class _Telling:
    """Holds the callbacks and remembers whether one of them has ended the run."""

    def __init__(self, callbacks: Callback | Sequence[Callback]) -> None:
        functions: object = [callbacks] if callable(callbacks) else callbacks
        if not isinstance(functions, Iterable):
            raise ConfigError(f"keel.train(callbacks={functions!r}): must be a list of functions")
        self._callbacks = list(cast(Iterable[Callback], functions))
        for one in self._callbacks:
            if wrong := _no_callback(one):
                raise ConfigError(
                    f"keel.train(callbacks=…): {one!r} {wrong}. Pass a plain function: "
                    "def callback(step, metrics)"
                )
        self.enough = False
        self.error: Exception | SystemExit | None = None
        """The first exception raised by a callback. It is raised once the run has been saved."""

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            try:
                result = callback(step, numbers)
                if result is not None and bool(result):  # numpy's True is not `True`
                    self.enough = True
            except (Exception, SystemExit) as error:  # any error of user code
                self.enough, self.error = True, self.error or error


def _no_callback(one: Any) -> str:
    """Return the reason why a value cannot be used as a callback, or "" if it can."""
    if not callable(one):
        return "is not a function"
    if inspect.isclass(one):
        return "is a class"
    for called in (one, type(one).__call__):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            return "is async"
        if inspect.isgeneratorfunction(called):
            return "is a generator"
    try:
        inspect.signature(one, follow_wrapped=False).bind(1, {})
    except TypeError as error:
        return f"cannot be called with a step and its metrics ({error})"
    except ValueError:  # some built-in functions have no signature
        pass
    return ""


class _Heard:
    """A view that also calls the callbacks after each training step, but not for separate
    evaluations."""

    def __init__(self, view: View, told: _Telling) -> None:
        self._view, self._told = view, told

    def begin(self, activity: str) -> None:
        self._view.begin(activity)

    def reach(self, done: int, total: int, unit: str) -> None:
        self._view.reach(done, total, unit)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        self._view.record(step, numbers)
        if "time/step" in numbers:
            self._told.step(step, numbers)

    def say(self, text: str) -> None:
        self._view.say(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _driven(system: Runtime, folder: RunFolder, view: View, start: int, *, told: _Telling) -> int:
    return main.run_loop(system, folder, _Heard(view, told), start, should_end=lambda: told.enough)
