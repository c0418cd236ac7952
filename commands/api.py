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

It is `keel train` in this process: the same checks, folder, checkpoints and view, and called again
it goes on. What is passed is written into the run folder, prompts as JSONL.
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
from keel.rewards.pickled_functions import named, passing
from keel.trainer.launch import Runtime
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import steps_of
from keel.trainer.run.signals import Preempted, preempted, stop_requested, watching
from keel.trainer.run.view import View

Callback = Callable[[int, Mapping[str, float]], object]
"""Called after each step with its number, from 1 on, and its metrics, as they stand in
`metrics.jsonl`, once they are written. The run ends with a checkpoint after a step for which one
returned something true, or raised."""
PASSED = "passed"
"""In the run folder: what a recipe and prompts from Python were written into."""
PROMPTS, SOURCES = "keel.train(prompts=…)", "data.sources"
SOURCE = {"name": "prompts", "source": "jsonl"}
HOLDOUT = re.compile(r"\bdata\.sources\[prompts\]\.holdout = (\d+)")
AGAIN = "make the same call of keel.train again"
GOES_ON = "what was saved is there, and the same call goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of it."""

    folder: Path
    metrics: Sequence[Mapping[str, float]]
    """One mapping a step, `step` and `time` (seconds since 1970) among them; step 0 has the
    held-out sets as they were before."""
    model: Path | None
    """Folder of the trained model; None: the run has not come to its end, and goes on when it is
    called again."""


def train(
    recipe: str | Path | Mapping[str, Any] = "quickstart",
    *,
    prompts: Any = None,
    rewards: Reward | Sequence[Reward] | Mapping[Any, float] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    knobs: Mapping[str, Any] | Sequence[str] = (),
    holdout: int = 0,
) -> Run:
    """Run a recipe, or go on with it.

    recipe: a file, the name of one that comes along, or what would stand in one (its `defaults` is
    either of the two). prompts: in place of the recipe's, rows as the lines of a JSONL source have
    them (docs/rewards.md): a list, a generator, a `datasets.Dataset`, a pandas table, or a text a
    row; further columns reach reward functions as `prompt.reward["columns"]`, and None and NaN are
    no columns; which column is what, the knob `data.sources[prompts].columns` says. holdout: how
    many of them are set aside for evaluation. rewards: a function of a prompt and a trajectory (or
    all of a group's: docs/rewards.md), several, or weights of functions and of Keel's own parts;
    for all sources. knobs: as on the command line, `{"run.steps": 20}` or `["run.steps=20"]`, or
    by their sections, `{"run": {"steps": 20}}`: the others of a section stay as the recipe has
    them.

    Raises ConfigError for what cannot be run, before anything starts; RuntimeError, ValueError or
    OSError where the run fails; and what a callback raised. It does not return from a run that
    Ctrl-C or a scheduler has ended, so that no script takes it for one that is done: after the
    checkpoint it raises KeyboardInterrupt, which `keel.Preempted` is, too (SIGTERM, SIGHUP or
    SIGUSR1). What was saved is there, whatever it was.
    """
    given = cast(object, recipe)
    if not isinstance(given, (str, Path, Mapping)) or (isinstance(given, str) and not given):
        raise ConfigError(f"keel.train(recipe={recipe!r}): must be a file, a name or a mapping")
    overrides, told = overrides_of(knobs), _Telling(callbacks)
    holdout, weights = held_out(holdout), [] if rewards is None else weights_of(rewards)
    with ExitStack() as stack:
        stack.enter_context(watching())
        # Knobs of sources may be of `prompts`, which are kept in the run folder.
        others = [one for one in overrides if prompts is None or not one.startswith(SOURCES)]
        if prompts is not None:  # before they are a file; the recipe may have no source of its own
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
            raise ConfigError("keel.train(holdout=…): is for prompts=…; a recipe's sources say it")
        if weights:
            try:
                stack.enter_context(passing([part for part, _ in weights if callable(part)]))
                names = {named(part) if callable(part) else part: of for part, of in weights}
            except ValueError as error:
                raise ConfigError(f"keel.train(rewards=…): {error}") from error
            said = as_value(names, "rewards=…")
            used = {source.name for source in load_config(path, overrides).data.sources}
            every = load_config(path, [*overrides, "data.only=[]"]).data.sources
            for index, source in enumerate(every):
                if source.name in used:
                    overrides.append(f"data.sources.{index}.rewards={said}")
        try:
            main.train(str(path), overrides, drive=partial(_driven, told=told), again=AGAIN)
        except KeyboardInterrupt as error:
            if signal := preempted():  # of which Ray makes a mere KeyboardInterrupt
                raise Preempted(f"stopped by {signal}; {GOES_ON}") from error
            raise
        if signal := preempted():
            raise Preempted(f"stopped by {signal}; {GOES_ON}") from told.error
        if stop_requested():
            raise KeyboardInterrupt(f"stopped; {GOES_ON}") from told.error
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
    """A recipe that stands in Python, as a file of its run folder, named by what it says."""
    tree = dict(recipe)
    if isinstance(base := tree.get("defaults"), (str, PurePath)):
        tree["defaults"] = _base(Path(os.path.expanduser(base)))
    tree = plain_data(tree, "recipe={…}")
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    with TemporaryDirectory() as there:  # where it is to lie, it says itself, or the overrides do
        path = Path(there, "recipe.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            folder = Path(load_config(path, overrides).run.dir).expanduser()
        except ConfigError as error:
            said = str(error).replace(str(path), "keel.train(recipe={…})")
            raise ConfigError(said) from error
    return _kept(folder / PASSED, text, "recipe.yaml")


def _base(path: Path) -> Path:
    """What a recipe in Python builds on: a file of the working folder, or one that comes along."""
    shipped = Path(configs.__file__).parent / f"{path.name.removesuffix('.yaml')}.yaml"
    alone = path.name == str(path) and not path.exists() and shipped.is_file()
    return shipped if alone else path.absolute()


@contextmanager
def _by_row(file: Path) -> Iterator[None]:
    """What is said of lines of `file` is said of the rows that were passed, and what of their
    source's `holdout` of the argument."""
    try:
        yield
    except ConfigError as error:
        said = re.sub(rf"{re.escape(str(file))}:(\d+)", rf"{PROMPTS}: row \1", str(error))
        said = HOLDOUT.sub(r"keel.train(holdout=\1)", said)
        if said == str(error) and str(file) not in said:
            raise
        raise ConfigError(said.replace(str(file), PROMPTS)) from error


def _passed(prompts: Any, folder: Path) -> Path:
    """The rows of `prompts`, as a file."""
    lines: list[str] = []
    for number, row in enumerate(rows_of(prompts), start=1):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, default=as_json) + "\n")
            lines[-1].encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"keel.train(prompts=…): row {number} holds half of a surrogate pair "
                "(\\ud800 … \\udfff), which is no character; take it out"
            ) from error
        except (TypeError, ValueError) as error:  # keys that are no text, or what holds itself
            raise ConfigError(f"keel.train(prompts=…): row {number}: {error}") from error
    if not lines:
        raise ConfigError("keel.train(prompts=…): there is none")
    return _kept(folder / PASSED, "".join(lines), "prompts.jsonl")


def _kept(folder: Path, text: str, name: str) -> Path:
    """A file named by its content, so that the same again is the same run."""
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
    """Callbacks, and whether one has had enough."""

    def __init__(self, callbacks: Callback | Sequence[Callback]) -> None:
        given: object = [callbacks] if callable(callbacks) else callbacks
        if not isinstance(given, Iterable):
            raise ConfigError(f"keel.train(callbacks={given!r}): must be a list of functions")
        self._callbacks = list(cast(Iterable[Callback], given))
        for one in self._callbacks:
            if wrong := _no_callback(one):
                raise ConfigError(
                    f"keel.train(callbacks=…): {one!r} {wrong}; it must be a plain function of "
                    "step and metrics: def callback(step, metrics)"
                )
        self.enough = False
        self.error: Exception | SystemExit | None = None
        """What the first raised that did; the run is to be saved before it is heard of."""

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            try:
                found = callback(step, numbers)
                if found is not None and bool(found):  # True of numpy's is no `True`
                    self.enough = True
            except (Exception, SystemExit) as error:  # it is anybody's
                self.enough, self.error = True, self.error or error


def _no_callback(one: Any) -> str:
    """Why it cannot be called after a step, or ""."""
    if not callable(one):
        return "is no function"
    if inspect.isclass(one):
        return "is a class"
    for called in (one, type(one).__call__):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            return "is async, and nobody would await it"
        if inspect.isgeneratorfunction(called):
            return "is a generator, and nobody would iterate over it"
    try:
        inspect.signature(one, follow_wrapped=False).bind(1, {})
    except TypeError as error:
        return f"cannot be called with a step and its metrics ({error})"
    except ValueError:  # some built-in ones do not tell
        pass
    return ""


class _Heard:
    """A view that tells callbacks of each step, too. (Of evaluations alone they do not hear: before
    the first step, and of a last one that is made up for.)"""

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
