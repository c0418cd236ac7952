"""Calls reward functions that users define, as in `rewards: {my_module.my_reward: 0.5}`.

    def my_reward(prompt, trajectory):
        return 1.0 if trajectory.answer.endswith(".") else 0.0

The function takes a `keel.rl.types.Prompt` and a `TextTrajectory` and returns a number from 0 to 1.
It runs in the worker processes and has the same deadline as the verifiers. What it prints goes to
`rewards/worker_*.log` in the run folder. It may be async; calls in one process then share an event
loop and run one after another. A function whose second parameter is called `trajectories` receives
a whole group and returns one number for each trajectory.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from keel.rewards.failure_budget import error_location, format_location
from keel.rewards.pickled_functions import PREFIX, passed
from keel.rewards.text import every_turn, final_text, raw_text, thinking_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTrajectory:
    """A trajectory as text, without token arrays, so that workers need not import numpy."""

    messages: Sequence[Mapping[str, Any]]
    """The conversation, in the same form as `keel.rl.types.Trajectory.messages`."""
    finish_reason: str
    """`stop`, or `length` if the completion reached a limit and was cut off."""
    sampled_tokens: int
    """How many tokens the policy sampled in all turns."""
    opening: int = 0
    """How many of the `messages` come before the policy's first turn."""

    @property
    def answer(self) -> str:
        """The last message, without its thinking."""
        return final_text(self.messages)

    @property
    def thinking(self) -> str:
        """The thinking of the last message."""
        return thinking_text(self.messages)

    @property
    def all_said(self) -> str:
        """The policy's text from all turns, without its thinking and tool calls."""
        return every_turn(final_text, self.messages[self.opening :])

    @property
    def all_thinking(self) -> str:
        """The policy's thinking from all turns."""
        return every_turn(thinking_text, self.messages[self.opening :])

    @property
    def raw(self) -> str:
        """The last message as sampled, with the model's thinking marks written as `<think>`."""
        return raw_text(self.messages)

    def dumps(self) -> str:
        """Serialize the trajectory to JSON so that it can be sent to a worker process."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**fields, "messages": list(map(dict, self.messages))})

    @staticmethod
    def loads(text: str) -> TextTrajectory:
        return TextTrajectory(**json.loads(text))


_Function = Callable[[Any, Any], Any]
_PROMPT, _TRAJECTORY, _GROUP = "prompt", "trajectory", "trajectories"
_FOREIGN = frozenset(
    (
        *("prompts", "completions", "completion_ids", "generations", "queries"),
        *("responses", "response_str", "solution_str", "solution_strs", "solutions"),
        *("data_source", "data_sources", "ground_truth", "ground_truths"),
    )
)
"""Parameter names that reward functions for TRL, verl and OpenRLHF use for their texts."""
_ROUNDING = 1e-6
"""How far a reward may be below 0 or above 1 because of rounding, as in 0.1 * 3 / 0.3."""


def is_function(part: str) -> bool:
    """Return whether the name of a reward part refers to a user's function, i.e. contains a dot."""
    return "." in part


def load_function(name: str) -> _Function:
    """Import a user's function by its dotted name, also from the working directory.

    Raises ValueError if it cannot be imported or called as `name(prompt, trajectory)`; the message
    suggests the nearest existing name.
    """
    function = passed(name) if name.startswith(PREFIX) else _imported(name)
    _check_callable(name, function)
    return cast(_Function, function)


def _imported(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.rpartition(".")
    if not all(map(str.isidentifier, name.split("."))):
        raise ValueError(
            f"reward {name!r} must be MODULE.FUNCTION, for example my_rewards.brief for "
            "`def brief` in my_rewards.py"
        )
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a local `json.py` does not replace the library's
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"reward {name!r}: {module_name} cannot be imported: {error}"
            ) from error
        hint = _did_you_mean(module_name, [path.stem for path in Path(folder).glob("*.py")])
        raise ValueError(
            f"reward {name!r}: there is no module {error.name!r} in {folder} or on Python's path"
            f"{hint}"
        ) from error
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        where = "" if isinstance(error, (ImportError, SyntaxError)) else error_location(error)
        raise ValueError(
            f"reward {name!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
            f"{where and f' ({where})'}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        hint = _did_you_mean(attribute, [k for k, v in vars(module).items() if callable(v)])
        raise ValueError(
            f"reward {name!r}: {module_name} ({module.__file__}) has no function "
            f"{attribute!r}{hint}"
        )
    return function


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _check_callable(name: str, function: Callable[..., Any]) -> None:
    where = _location(function)
    label = f"reward {name!r}{where and f' ({where})'}"
    if inspect.isclass(function):
        raise ValueError(f"{label} is a class; create an instance in the module and name that")
    if isinstance(function, functools._lru_cache_wrapper):  # pyright: ignore[reportPrivateUsage]
        raise ValueError(
            f"{label} is cached by functools, but a prompt cannot be hashed; cache a helper that "
            "takes trajectory.answer"
        )
    if any(inspect.isasyncgenfunction(f) for f in (function, type(function).__call__)):
        raise ValueError(f"{label} is an async generator; return the number instead")
    signature = _signature(function)
    if signature is None:
        return
    plain = name.rpartition(".")[2]
    cure = (
        f"Write def {plain}(prompt, trajectory), or def {plain}(prompt, {_GROUP}) for all of a "
        "group (docs/rewards.md)"
    )
    try:
        signature.bind("prompt", "trajectory")
    except TypeError as error:
        raise ValueError(
            f"{label} takes {signature}, not one prompt and one trajectory: {error}. {cure}"
        ) from error
    names = list(signature.parameters)[:2]
    swapped = names in ([_TRAJECTORY, _PROMPT], [_GROUP, _PROMPT])
    if swapped or (names[:1] != [_PROMPT] and not _FOREIGN.isdisjoint(names)):
        reason = "in that order" if swapped else "not another library's texts and columns"
        raise ValueError(
            f"{label} takes {signature}, but gets one prompt and one trajectory, {reason}. {cure}"
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of the outermost function, since a decorator may supply arguments."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except ValueError:  # some built-in functions have none
        return None


def _location(function: Callable[..., Any]) -> str:
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return format_location(code.co_filename, code.co_firstlineno, code.co_name) if code else ""


def prompt_fields(prompt: Any) -> dict[str, Any]:
    """Convert a prompt to JSON data that can be sent to the verifier `function`."""
    return {
        "prompt_id": prompt.prompt_id,
        "domain": prompt.domain,
        "messages": [dict(message) for message in prompt.messages],
        "tools": [dict(tool) for tool in prompt.tools],
        "thinking": prompt.thinking,
        "reward": {"columns": {}, **prompt.reward},
        "kl_coef": prompt.kl_coef,
    }


def sees_group(name: str) -> bool:
    """Return whether a function takes a whole group. Raises ValueError if it cannot be loaded."""
    signature = _signature(load_function(name))
    return signature is not None and list(signature.parameters)[1:2] == [_GROUP]


def function(spec: Mapping[str, Any]) -> Callable[[str], float | dict[str, float]]:
    """Build a verifier that calls a user's function on the output of `TextTrajectory.dumps()`.

    `spec` contains the function's `name` and a `prompt` made by `prompt_fields`. If `spec` sets
    `group`, the verifier takes a JSON list of trajectories and returns `{"correct": mean, "0": …,
    "1": …}`.
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
            return _awaited(value) if inspect.isawaitable(value) else value
        except SystemExit as error:  # would end the worker, or the run
            exited = RuntimeError(f"called exit({error.code})")
            raise exited.with_traceback(error.__traceback__) from error
        except (AttributeError, KeyError) as error:
            _add_names(error, prompt, argument)
            raise

    def number(value: Any) -> float:
        score = _number(value)
        if isinstance(score, str):
            raise BadReward(f"returned {score}", _location(reward))
        return score

    def verify(text: str) -> float:
        return number(call(TextTrajectory.loads(text)))

    def verify_group(text: str) -> dict[str, float]:
        trajectories = tuple(map(TextTrajectory.loads, json.loads(text)))
        values = call(trajectories)
        try:
            if issubclass(type(values), (str, bytes, Mapping, Set)):  # iterable, but not numbers
                raise TypeError
            values = list(values)
        except TypeError:
            kind = type(values).__name__
            raise BadReward(f"returned a {kind}; return a list", _location(reward)) from None
        if len(values) != len(trajectories):
            raise BadReward(
                f"returned {len(values)} numbers for {len(trajectories)} trajectories",
                _location(reward),
            )
        scores = {str(index): number(value) for index, value in enumerate(values)}
        return {"correct": math.fsum(scores.values()) / len(scores), **scores}

    return verify_group if spec.get("group") else verify


class BadReward(ValueError):
    """Raised if a function returns something that is not a reward; `at` locates the function."""

    def __init__(self, message: str, at: str) -> None:
        super().__init__(message)
        self.at = at


def _number(value: Any) -> float | str:
    """Return a number from 0 to 1, or a description of what is wrong with the value."""
    if value is None:
        return "None; check for a path without `return`"
    try:
        if issubclass(type(value), (str, bytes, bytearray)):  # `float` would parse these
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__} ({str(value)[:50]!r}); return a number from 0 to 1"
    if math.isnan(number):
        return "NaN"
    if not -_ROUNDING <= number <= 1.0 + _ROUNDING:
        side = "below 0" if number < 0 else "above 1"
        return f"{number!r}, {side}; scale it to 0 … 1, since the recipe holds its weight"
    return min(max(number, 0.0), 1.0)


def _add_names(error: AttributeError | KeyError, prompt: Any, argument: Any) -> None:
    """Add the keys or attributes that do exist to an error about a prompt or trajectory."""
    trajectory = cast(Any, argument)[0] if isinstance(argument, tuple) else argument
    if isinstance(error, KeyError):
        names: list[str] = [*prompt.reward, *(f"columns.{k}" for k in prompt.reward["columns"])]
        error.add_note(f"prompt.reward has {', '.join(names)}")
    elif type(error.obj) in (type(prompt), type(trajectory)):
        names = [name for name in dir(error.obj) if not name.startswith("_")]
        error.add_note(f"a {type(error.obj).__name__} has {', '.join(names)}")


@functools.cache
def _runner() -> asyncio.Runner:
    """Return this process's event loop, which is kept so that clients in globals stay usable."""
    return asyncio.Runner(loop_factory=asyncio.new_event_loop)


_LOOP_LOCK = threading.Lock()
"""Allows one use of the event loop at a time. Without workers, several scorers share the loop."""


def _awaited(value: Awaitable[Any]) -> Any:
    async def result() -> Any:
        return await value

    with _LOOP_LOCK:
        return _runner().run(result())
