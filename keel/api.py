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
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import yaml

from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.rewards.passed import named, passing
from keel.trainer import main
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.interrupt import watching
from keel.trainer.run.journal import metric_lines
from keel.trainer.run.view import View
from keel.trainer.system import System

Reward = Callable[[Any, Any], Any]
Callback = Callable[[int, Mapping[str, float]], object]
"""Called with the step and its metrics, as they stand in `metrics.jsonl`, once it is written. The
run ends with a checkpoint after a step for which one returned True."""
PASSED = "passed"
"""In the run folder: what a recipe and prompts from Python were written into."""


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
    callbacks: Sequence[Callback] = (),
    knobs: Mapping[str, Any] | Sequence[str] = (),
    holdout: int = 0,
) -> Run:
    """Run a recipe, or go on with it.

    recipe: a file, the name of one that comes along, or what would stand in one. prompts: in place
    of the recipe's, rows as the lines of a JSONL source have them (docs/rewards.md): a list, a
    generator, a `datasets.Dataset`, a pandas table, or a text a row; further columns reach reward
    functions as `prompt.reward["columns"]`. holdout: how many of them are set aside for evaluation.
    rewards: a function of a prompt and a trajectory (or all of a group's: docs/rewards.md),
    several, or weights of functions and of Keel's own parts; for all sources. knobs: as on the
    command line, `{"run.steps": 20}` or `["run.steps=20"]`.

    Raises ConfigError for what cannot be run, before anything starts, and RuntimeError, ValueError
    or OSError where the run fails; what was saved is there.
    """
    overrides = _overrides(knobs)
    with ExitStack() as stack:
        stack.enter_context(watching())
        path = recipe if not isinstance(recipe, Mapping) else _written(recipe, overrides)
        folder = Path(load_config(path, overrides).run.dir).expanduser()
        if prompts is not None:
            overrides.append(_sources(prompts, folder, holdout))
        elif holdout:
            raise ConfigError("keel.train(holdout=…): is for prompts=…; a recipe's sources say it")
        if rewards is not None:
            weights = _weights(rewards)
            functions = [part for part in weights if callable(part)]
            try:
                stack.enter_context(passing(functions))
                names = {named(p) if callable(p) else p: weight for p, weight in weights.items()}
            except ValueError as error:
                raise ConfigError(f"keel.train(rewards=…): {error}") from error
            for index in range(len(load_config(path, overrides).data.sources)):
                overrides.append(f"data.sources.{index}.rewards={json.dumps(names)}")
        told = _Telling(callbacks)
        main.train(str(path), overrides, drive=partial(_driven, told=told))
    config = load_config(path, overrides)
    run = RunFolder(config)
    lines = metric_lines(run.path / "metrics.jsonl")
    return Run(
        folder=run.path,
        metrics=tuple(json.loads(text) for _, text in lines),
        model=run.model if run.model.exists() else None,
    )


def _overrides(knobs: Mapping[str, Any] | Sequence[str]) -> list[str]:
    if isinstance(knobs, Mapping):
        return [f"{knob}={json.dumps(value)}" for knob, value in knobs.items()]
    if isinstance(knobs, str):
        raise ConfigError(f"keel.train(knobs={knobs!r}): must be a list of them, or a mapping")
    return list(knobs)


def _written(recipe: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    """A recipe that stands in Python, as a file named by what it says."""
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    folder = Path(dict(recipe).get("run", {}).get("dir", "runs/default")).expanduser()
    return _kept(folder / PASSED, text, "recipe.yaml")


def _sources(prompts: Any, folder: Path, holdout: int) -> str:
    """An override: the rows of `prompts`, as a file, are the recipe's one source."""
    lines = [json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in _rows(prompts)]
    if not lines:
        raise ConfigError("keel.train(prompts=…): there is none")
    path = _kept(folder / PASSED, "".join(lines), "prompts.jsonl")
    source = {"name": "prompts", "source": "jsonl", "path": str(path), "holdout": holdout}
    return f"data.sources={json.dumps([source])}"


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


def _rows(prompts: Any) -> Iterator[dict[str, Any]]:
    """As the lines of a JSONL source."""
    if hasattr(prompts, "to_dict") and hasattr(prompts, "columns"):  # of pandas
        prompts = prompts.to_dict(orient="records")
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        kind = type(cast(object, prompts)).__name__
        raise ConfigError(f"keel.train(prompts=…): must be rows, is one {kind}")
    for number, row in enumerate(cast(Iterable[Any], prompts), start=1):
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise ConfigError(
                f"keel.train(prompts=…): row {number} is a {kind}; a mapping of columns is wanted, "
                "or a text"
            )
        columns = dict(cast(Mapping[str, Any], row))
        if isinstance(columns.get("prompt"), (list, tuple)):  # a conversation, as TRL has it
            columns["messages"] = list(columns.pop("prompt"))
        yield columns


def _plain(value: Any) -> Any:
    """What JSON has no word for: numbers and arrays of numpy, times."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _weights(rewards: Any) -> dict[Any, float]:
    """Function or part's name → weight."""
    if isinstance(rewards, Mapping):
        return dict(cast(Mapping[Any, float], rewards))
    if callable(rewards):
        return {rewards: 1.0}
    return dict.fromkeys(cast(Sequence[Any], rewards), 1.0)


class _Telling:
    """Callbacks, and whether one has had enough."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self.enough = False

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            self.enough = callback(step, numbers) is True or self.enough


class _Heard:
    """A view that tells callbacks of each step, too."""

    def __init__(self, view: View, told: _Telling) -> None:
        self._view, self._told = view, told

    def begin(self, activity: str) -> None:
        self._view.begin(activity)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        self._view.record(step, numbers)
        self._told.step(step, numbers)

    def say(self, text: str) -> None:
        self._view.say(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _driven(system: System, folder: RunFolder, view: View, start: int, *, told: _Telling) -> int:
    return main.run_loop(system, folder, _Heard(view, told), start, enough=lambda: told.enough)
