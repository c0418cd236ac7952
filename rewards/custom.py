"""Calls user-defined reward functions, as in `rewards: {my_module.my_reward: 0.5}`.

    def my_reward(prompt, trajectory):
        return 1.0 if trajectory.answer.endswith(".") else 0.0

A function takes a `keel.rl.types.Prompt` and a `TextTrajectory`, and returns a number from 0 to 1.
It runs in the worker processes, with the same time limit as the verifiers. Its output goes to
`rewards/worker_*.log` in the run folder. It may be async. All async calls in a process share an
event loop and run one after another.

If the second parameter of a function is called `trajectories`, the function scores a whole group at
once and returns one number per trajectory.

Functions passed to `keel.train` are pickled into a folder, from which the worker processes load
them.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import math
import os
import pickle
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from keel.rewards.failures import error_location
from keel.rewards.text import every_turn, final_text, raw_text, thinking_text

PREFIX = "python."  # prefix that marks functions given to `keel.train` in a recipe
_FOLDER = "KEEL_PASSED_FUNCTIONS"
"""Environment variable with the path of the folder that contains the pickled functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTrajectory:
    """A trajectory in text form. It contains no arrays, so workers don't have to import numpy."""

    messages: Sequence[Mapping[str, Any]]
    """The conversation, in the format of `keel.rl.types.Trajectory.messages`."""
    finish_reason: str
    """`length` if the completion was truncated at a limit, and `stop` otherwise."""
    sampled_tokens: int
    """Number of tokens that the policy sampled in all turns."""
    opening: int = 0
    """Number of `messages` before the policy's first turn."""

    @property
    def answer(self) -> str:
        """The policy's last message without its thinking."""
        return final_text(self.messages)

    @property
    def thinking(self) -> str:
        """The thinking from the policy's last message."""
        return thinking_text(self.messages)

    @property
    def all_said(self) -> str:
        """The text of all policy turns, without thinking or tool calls."""
        return every_turn(final_text, self.messages[self.opening :])

    @property
    def all_thinking(self) -> str:
        """The thinking from all policy turns."""
        return every_turn(thinking_text, self.messages[self.opening :])

    @property
    def raw(self) -> str:
        """The policy's last message verbatim, with its thinking in `<think>` tags."""
        return raw_text(self.messages)

    def dumps(self) -> str:
        """Serialize the trajectory to JSON for a worker process."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**fields, "messages": list(map(dict, self.messages))})

    @staticmethod
    def loads(text: str) -> TextTrajectory:
        return TextTrajectory(**json.loads(text))


# --- Functions given to `keel.train` ---


def recipe_name(function: Callable[..., Any]) -> str:
    """Return the name that recipes use for a function. Raises ValueError for functions without a
    name, such as lambdas and partials."""
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise ValueError(f"reward {name}: the function has no name; define it with def")
    return PREFIX + name


@contextmanager
def pickle_functions(functions: Sequence[Callable[..., Any]]) -> Generator[None]:
    """Pickle functions for the worker processes started inside the `with` block. Raises ValueError
    if two functions have the same name or one can't be pickled."""
    with TemporaryDirectory() as folder:
        for function in functions:
            name = recipe_name(function)
            path = Path(folder, f"{name}.pkl")
            if path.exists():
                raise ValueError(f"reward {name}: two functions have this name; rename one")
            try:
                path.write_bytes(cloudpickle.dumps(function))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            except Exception as error:  # captured objects may raise anything when pickled
                raise ValueError(
                    f"reward {name} cannot be pickled ({error}). Create such objects at first call"
                ) from error
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_FOLDER]


def pickled_functions() -> dict[str, bytes]:
    """Read the functions stored by `pickle_functions` so they can be sent to another node. Returns
    a mapping from file names to contents."""
    folder = os.environ.get(_FOLDER)
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()} if folder else {}


def store_functions(functions: Mapping[str, bytes]) -> None:
    """Write functions from another node (see `pickled_functions`) to a folder. Worker processes
    started by this process load them from there."""
    if functions:
        folder = os.environ[_FOLDER] = mkdtemp(prefix="keel-functions-")
        for name, pickled in functions.items():
            Path(folder, name).write_bytes(pickled)


@functools.cache
def _unpickle(path: Path) -> Any:
    """Load a pickled function once per process, so that its globals persist between calls."""
    return pickle.loads(path.read_bytes())  # written by `pickle_functions` in our own process


def _load_pickled(name: str) -> Any:
    folder = os.environ.get(_FOLDER)
    path = Path(folder or ".", f"{name}.pkl")
    is_plain = name.removeprefix(PREFIX).isidentifier()  # a recipe may hold any path
    if not folder or not is_plain or not path.is_file():
        raise ValueError(
            f"reward {name!r} was passed to keel.train; run that script again, or name the "
            "function as module.function"
        )
    try:
        return _unpickle(path)
    except Exception as error:  # unpickling imports modules, which may raise anything
        raise ValueError(
            f"reward {name!r} cannot be unpickled: {type(error).__name__}: {error}"
        ) from error


# --- Loading ---

_FOREIGN = frozenset(
    "prompts completions queries responses solution_str data_source ground_truth".split()  # noqa: SIM905
)
"""Parameter names that reward functions have in TRL, verl or OpenRLHF."""


def is_function(part: str) -> bool:
    """Return whether a reward part is a user-defined function. Only user-defined functions
    have a dot in their name."""
    return "." in part


def load_function(name: str) -> Callable[[Any, Any], Any]:
    """Import a user-defined function by its dotted name, searching the working directory too.

    Raises ValueError if it can't be imported or doesn't accept `(prompt, trajectory)`.
    """
    function = _load_pickled(name) if name.startswith(PREFIX) else _import_function(name)
    try:
        names = _parameters(function)
        inspect.signature(function, follow_wrapped=False).bind("prompt", "trajectory")
        if names[:1] != ["prompt"] and not {"prompt", *_FOREIGN}.isdisjoint(names[:2]):
            raise TypeError(f"the parameters are {', '.join(names)}")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward {name!r} must take (prompt, trajectory), or (prompt, trajectories) for a "
            f"whole group: {error}"
        ) from error
    return function


def _import_function(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.rpartition(".")
    if not all(map(str.isidentifier, name.split("."))):
        raise ValueError(f"reward {name!r} must be MODULE.FUNCTION, such as my_rewards.brief")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a local `json.py` does not replace the library's
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        where = "" if isinstance(error, (ImportError, SyntaxError)) else error_location(error)
        raise ValueError(
            f"reward {name!r}: {module_name} cannot be imported from {os.getcwd()} or Python's "
            f"path: {type(error).__name__}: {error}{where and f' ({where})'}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(
            f"reward {name!r}: {module_name} ({module.__file__}) has no function {attribute!r}"
        )
    return function


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function, follow_wrapped=False).parameters)


def scores_group(name: str) -> bool:
    """Return whether a reward function scores a whole group at once."""
    return _parameters(load_function(name))[1:2] == ["trajectories"]


# --- Calling ---

_ROUNDING = 1e-6  # tolerance for rewards below 0 or above 1, such as 0.1 * 3 / 0.3


def prompt_fields(prompt: Any) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "domain": prompt.domain,
        "messages": [dict(message) for message in prompt.messages],
        "tools": [dict(tool) for tool in prompt.tools],
        "thinking": prompt.thinking,
        "reward": {"columns": {}, **prompt.reward},
        "kl_coef": prompt.kl_coef,
    }


class BadReward(ValueError):
    """Raised if a reward function doesn't return a valid reward."""


def function_verifier(spec: Mapping[str, Any]) -> Callable[[str], float | dict[str, float]]:
    """Build a verifier that calls the user-defined function `spec["name"]` on a trajectory
    serialized by `TextTrajectory.dumps`.

    If `spec["group"]` is true, the verifier takes a JSON list of serialized trajectories and
    returns `{"correct": mean, "0": …, "1": …}`, with one score per trajectory.
    """
    # Imports numpy, which workers of runs without user functions do not need.
    from keel.rl.types import Prompt  # noqa: PLC0415

    reward = load_function(str(spec["name"]))
    fields: dict[str, Any] = dict(spec["prompt"])
    fields |= {key: tuple(fields[key]) for key in ("messages", "tools")}
    prompt = Prompt(**fields)

    def call(argument: Any) -> Any:
        try:
            value = reward(prompt, argument)
            if inspect.isawaitable(value):
                with _LOOP_LOCK:
                    value = _event_loop().run(_await_value(value))
            return list(value) if issubclass(type(value), Iterator) else value
        except SystemExit as error:  # would end the worker, or the run
            exited = RuntimeError(f"called exit({error.code})")
            raise exited.with_traceback(error.__traceback__) from error

    def verify_group(text: str) -> dict[str, float]:
        trajectories = tuple(map(TextTrajectory.loads, json.loads(text)))
        values, count = call(trajectories), len(trajectories)
        wrong = issubclass(type(values), (str, bytes, Mapping, Set)) or not hasattr(
            values, "__len__"
        )
        if wrong or len(values) != count:
            raise BadReward(f"must return a list of {count} numbers, one per trajectory")
        scores = {str(index): _to_score(value) for index, value in enumerate(values)}
        return {"correct": math.fsum(scores.values()) / count, **scores}

    if spec.get("group"):
        return verify_group
    return lambda text: _to_score(call(TextTrajectory.loads(text)))


def _to_score(value: Any) -> float:
    score = math.nan
    if not isinstance(value, (str, bytes, bytearray)):  # `float` would parse it
        with suppress(TypeError, ValueError):
            score = float(value)
    if not -_ROUNDING <= score <= 1.0 + _ROUNDING:
        shown = f"{type(value).__name__} ({str(value)[:50]!r})"
        raise BadReward(f"returned a {shown}; return a number from 0 to 1")
    return min(max(score, 0.0), 1.0)


@functools.cache
def _event_loop() -> asyncio.Runner:
    """Return this process's event loop. It is never closed, so async clients stored in globals keep
    working."""
    return asyncio.Runner(loop_factory=asyncio.new_event_loop)


_LOOP_LOCK = threading.Lock()  # several scorers without workers share the loop


async def _await_value(value: Awaitable[Any]) -> Any:
    return await value
