"""`keel.train`: start a run from Python, in a script or a notebook.

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

This does the same as `keel train`, including checks, run folder, checkpoints and progress view, but
runs in the current process. Repeating the call resumes the run. Prompts are saved to the run folder
as JSONL.
"""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan
from numbers import Integral
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any, cast

import yaml

from keel.commands import train as main
from keel.configs.dump import yaml_line
from keel.configs.load import load_config
from keel.configs.paths import shipped_recipes, write_whole
from keel.configs.schema import ConfigError
from keel.rewards.custom import pickle_functions, recipe_name
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import steps_of
from keel.trainer.run.signals import Preempted, preemption_signal, stop_requested, watching

Reward = Callable[[Any, Any], Any]
Callback = Callable[[int, Mapping[str, float]], object]
"""A function called after each training step with the step number (from 1) and the step's metrics,
as in `metrics.jsonl`. If it returns a true value or raises, the run saves a checkpoint and ends."""
_PASSED = "passed"
"""Subfolder of the run folder for recipes and prompts passed from Python."""
_PROMPTS, _SOURCES = "keel.train(prompts=…)", "data.sources"
_SOURCE = {"name": "prompts", "source": "jsonl"}
_RESUME_COMMAND = "make the same call of keel.train again"
_RESUME = "progress is saved; the same call resumes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The metrics and trained model returned by `keel.train`."""

    folder: Path
    metrics: Sequence[Mapping[str, float]]
    """The metrics of each step, including `step` and `time` (Unix time in seconds). Step 0 is the
    evaluation before training."""
    model: Path | None
    """Folder of the trained model, or None if the run stopped early and can be resumed."""


def train(
    recipe: str | Path | Mapping[str, Any] = "quickstart",
    *,
    prompts: Any = None,
    rewards: Reward | Sequence[Reward] | Mapping[Any, float] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    knobs: Mapping[str, Any] | Sequence[str] = (),
    holdout: int = 0,
) -> Run:
    """Run the training that a recipe describes, or resume it. Returns the metrics and the trained
    model.

    Args:
        recipe: A recipe file, the name of a recipe that comes with Keel, or the recipe itself as a
            mapping.
        prompts: Prompts that replace the recipe's. Pass a list, a generator, a
            `datasets.Dataset` or a pandas table. The items are texts, or rows as in a JSONL source
            (docs/rewards.md). Additional columns are passed to reward functions in
            `prompt.reward["columns"]`, without None and NaN. The knob
            `data.sources[prompts].columns` renames columns.
        holdout: Number of prompts to hold out for evaluation.
        rewards: A reward function, several of them, or a mapping from reward functions and Keel's
            reward parts to their weights. A reward function takes a prompt and a trajectory (or a
            group, see docs/rewards.md). The rewards apply to all sources.
        callbacks: Functions to call after each step.
        knobs: Knobs to change: `{"run.steps": 20}`, `["run.steps=20"]` as on the command line, or
            `{"run": {"steps": 20}}`. Other knobs of a section stay unchanged.

    Raises:
        ConfigError: The recipe or an argument is invalid. Raised before anything starts.
        RuntimeError, ValueError, OSError: The run failed.
        KeyboardInterrupt: Ctrl-C stopped the run after a checkpoint. If SIGTERM, SIGHUP or SIGUSR1
            stopped it, the subclass `keel.Preempted` is raised.
    """
    if not recipe:
        raise ConfigError(f"keel.train(recipe={recipe!r}): must be a file, a name or a mapping")
    overrides, called = _overrides(knobs), _Callbacks(callbacks)
    if not isinstance(holdout, Integral) or isinstance(holdout, bool) or holdout < 0:
        raise ConfigError(
            f"keel.train(holdout={holdout!r}): must be a number of prompts, such as 64"
        )
    if holdout and prompts is None:
        raise ConfigError("keel.train(holdout=…): needs prompts=…; set it in the recipe's sources")
    weights = [] if rewards is None else _reward_weights(rewards)
    file: Path | None = None
    with ExitStack() as stack:
        stack.enter_context(watching())
        # Knobs of sources may refer to `prompts`, which are written into the run folder.
        others = [one for one in overrides if prompts is None or not one.startswith(_SOURCES)]
        if prompts is not None:  # before the file exists; the recipe may have no source
            others.insert(0, f"{_SOURCES}={yaml_line([{**_SOURCE, 'path': _PASSED}])}")
        path = recipe if not isinstance(recipe, Mapping) else _write_recipe(recipe, others)
        if prompts is not None:
            folder = load_config(path, others).run.folder
            file = _write_hashed(folder / _PASSED, _as_jsonl(prompts), "prompts.jsonl")
            source = {**_SOURCE, "path": str(file), "holdout": int(holdout)}
            overrides.insert(0, f"{_SOURCES}={yaml_line([source])}")
            if load_config(path, overrides).data.sources[0].path != str(file):
                raise ConfigError(f"keel.train(prompts=…, knobs={_SOURCES}): keep one")
        if weights:
            try:
                stack.enter_context(
                    pickle_functions([part for part, _ in weights if callable(part)])
                )
                names = {recipe_name(part) if callable(part) else part: of for part, of in weights}
            except ValueError as error:
                raise ConfigError(f"keel.train(rewards=…): {error}") from error
            value = yaml_line(_plain_data(names, "rewards=…"))
            # `eval.file` adds its source after the overrides are applied.
            given = [*overrides, "eval.file=''"]
            used = {source.name for source in load_config(path, given).data.sources}
            sources = load_config(path, [*given, "data.only=[]"]).data.sources
            # By index, because a name can contain `=` and brackets.
            overrides += [
                f"{_SOURCES}[{index}].rewards={value}"
                for index, source in enumerate(sources)
                if source.name in used
            ]
        run = RunFolder(load_config(path, overrides))
        try:
            main.train(str(path), overrides, after_step=called.call, resume_command=_RESUME_COMMAND)
        except ConfigError as error:
            if file is None:
                raise
            text = re.sub(rf"{re.escape(str(file))}:(\d+)", r"row \1 of prompts", str(error))
            raise ConfigError(
                text.replace(f"{_SOURCES}[prompts].holdout = ", "keel.train: holdout=")
            ) from error
        except KeyboardInterrupt as error:
            if signal := preemption_signal():  # Ray turns it into a KeyboardInterrupt
                raise Preempted(f"stopped by {signal}; {_RESUME}") from error
            raise
        if signal := preemption_signal():
            raise Preempted(f"stopped by {signal}; {_RESUME}") from called.error
        if stop_requested():
            raise KeyboardInterrupt(f"stopped; {_RESUME}") from called.error
        if called.error is not None:
            raise called.error
    return Run(
        folder=run.path,
        metrics=tuple(steps_of(run.path / "metrics.jsonl").values()),
        model=run.model if run.model.exists() else None,
    )


def _overrides(knobs: Mapping[str, Any] | Sequence[str]) -> list[str]:
    if isinstance(knobs, Mapping):
        plain = {knob: _plain_data(value, f"knobs={knob}") for knob, value in knobs.items()}
        return [f"{knob}={yaml_line(value)}" for knob, value in plain.items()]
    words = [] if isinstance(knobs, str) else list(cast(Iterable[object], knobs))
    if isinstance(knobs, str) or not all(isinstance(one, str) for one in words):
        raise ConfigError(
            f"keel.train(knobs={knobs!r:.60}): must be a list of texts, or a mapping: "
            '["run.steps=20"], or {"run.steps": 20}'
        )
    return cast(list[str], words)


def _plain_data(value: Any, argument: str) -> Any:
    def plain(one: Any) -> Any:
        if hasattr(one, "tolist"):
            return one.tolist()
        if isinstance(one, Mapping):
            return dict(cast(Mapping[Any, Any], one))
        if isinstance(one, PurePath):
            return str(one)
        raise TypeError(f"a {type(one).__name__} is not a value of a recipe")

    try:
        return json.loads(json.dumps(value, default=plain))
    except (TypeError, ValueError) as error:  # also circular values
        raise ConfigError(f"keel.train({argument}): {error}") from error


def _reward_weights(rewards: Any) -> list[tuple[Any, Any]]:
    """Convert the `rewards` argument to a list of (function or part name, weight) pairs."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(rewards, Mapping):
        pairs = list(cast(Mapping[Any, Any], rewards).items())
    elif callable(rewards):
        pairs = [(rewards, 1.0)]
    elif isinstance(rewards, Iterable) and not isinstance(rewards, str):
        pairs = [(one, 1.0) for one in cast(Iterable[Any], rewards)]
    if not pairs or not all(callable(part) or isinstance(part, str) for part, _ in pairs):
        raise ConfigError(
            f"keel.train(rewards={rewards!r:.60}): must be a function, a list of them, or weights "
            'of functions and of parts: {"correct": 1.0, my_function: 0.2}'
        )
    return pairs


def _write_recipe(recipe: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    tree = dict(recipe)
    if isinstance(base := tree.get("defaults"), (str, PurePath)):
        path = Path(os.path.expanduser(base))
        known = None if path.exists() else shipped_recipes().get(str(path).removesuffix(".yaml"))
        tree["defaults"] = known or path.absolute()
    text = yaml.safe_dump(_plain_data(tree, "recipe={…}"), sort_keys=False, allow_unicode=True)
    with TemporaryDirectory() as there:  # run.dir is in the recipe or the overrides
        path = Path(there, "recipe.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            folder = load_config(path, overrides).run.folder
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), "keel.train(recipe={…})")) from error
    return _write_hashed(folder / _PASSED, text, "recipe.yaml")


def _as_jsonl(prompts: Any) -> str:
    if hasattr(prompts, "to_dict") and hasattr(prompts, "columns"):  # pandas
        prompts = prompts.to_dict(orient="records")
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"{_PROMPTS}: must be a list of rows, "
            '[{"prompt": "…", "answer": "…"}, …]. A file of prompts is a source of the recipe '
            "(data.sources, docs/data.md)"
        )
    lines: list[str] = []
    for number, row in enumerate(cast(Iterable[Any], prompts), start=1):
        try:
            if not isinstance(row, (str, Mapping)):
                raise TypeError(f"must be text or a mapping of columns, is a {type(row).__name__}")
            columns = _drop_nulls({"prompt": row} if isinstance(row, str) else row)
            if isinstance(columns.get("prompt"), (list, tuple)):  # TRL's format
                columns["messages"] = columns.pop("prompt")
            if isinstance(turns := columns.get("messages"), (list, tuple)):
                columns["messages"] = [_drop_nulls(turn) for turn in cast(Sequence[Any], turns)]
            lines.append(json.dumps(columns, ensure_ascii=False, default=str) + "\n")
            lines[-1].encode()
        except (AttributeError, TypeError, ValueError) as error:  # no mapping, or surrogates
            raise ConfigError(f"{_PROMPTS}: row {number}: {error}") from error
    if not lines:
        raise ConfigError(f"{_PROMPTS}: is empty")
    return "".join(lines)


def _drop_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the nulls (None, NaN, pandas NaT and NA) that tabular formats use for missing columns,
    and convert numpy values to Python objects."""
    columns = {key: one.tolist() if hasattr(one, "tolist") else one for key, one in row.items()}
    return {
        key: one
        for key, one in columns.items()
        if one is not None
        and not (isinstance(one, float) and isnan(one))
        and type(one).__name__ not in ("NaTType", "NAType")
    }


def _write_hashed(folder: Path, text: str, name: str) -> Path:
    """Write `text` to a file named after its hash and return the path, so that calling `keel.train`
    again with the same input resumes the same run."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = folder / f"{digest}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_whole(path, text)
    return path


class _Callbacks:
    def __init__(self, callbacks: Callback | Sequence[Callback]) -> None:
        functions = [callbacks] if callable(callbacks) else callbacks
        self._callbacks = list(cast(Iterable[Callback], functions))
        for one in self._callbacks:
            try:
                inspect.signature(one, follow_wrapped=False).bind(1, {})
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"keel.train(callbacks=…): {one!r} must take the step and its metrics: {error}"
                ) from error
            if inspect.iscoroutinefunction(one):
                raise ConfigError(f"keel.train(callbacks=…): {one!r} must not be async")
        self.error: Exception | SystemExit | None = None
        """The first exception raised by a callback, re-raised once the run is saved."""
        self._ended = False
        """True once a callback has ended the run. Kept when the run restarts before it is saved."""

    def call(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Run the callbacks after a training step, but not after a standalone evaluation. Return
        True if the run should end."""
        for callback in self._callbacks if "time/step" in numbers else ():
            try:
                self._ended = bool(callback(step, numbers)) or self._ended
            except (Exception, SystemExit) as error:  # any error of user code
                self._ended, self.error = True, self.error or error
        return self._ended
