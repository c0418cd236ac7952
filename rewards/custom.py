"""Rewards of one's own: `rewards: {my_module.my_reward: 0.5}` in a recipe.

    def my_reward(prompt, trajectory):
        return 1.0 if trajectory.answer.endswith(".") else 0.0

It gets an `keel.rl.types.Prompt` and a `TextTrajectory`, and returns a number from 0 to 1. It
runs in the worker processes, under the same deadline as the verifiers, and may print: to the run
folder's `rewards/worker_*.log`. It may be async: calls come one after another, all of a process on
one event loop. One whose second parameter is called `trajectories` gets all of a group at once, and
returns as many numbers.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import functools
import importlib
import inspect
import json
import math
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from keel.rewards.failure_budget import explain, place, shown
from keel.rewards.pickled_functions import PREFIX, passed
from keel.rewards.text import every_turn, final_text, raw_text, thinking_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTrajectory:
    """What a trajectory says, without its tokens: the worker processes need no arrays."""

    messages: Sequence[Mapping[str, Any]]
    """As `keel.rl.types.Trajectory.messages`."""
    finish_reason: str
    """`stop`, or `length` where the completion was cut off, at whichever limit."""
    sampled_tokens: int
    """In all turns."""
    opening: int = 0
    """How many of `messages` stood there before the policy first spoke."""

    @property
    def answer(self) -> str:
        """What was said after the thinking, in the last message."""
        return final_text(self.messages)

    @property
    def thinking(self) -> str:
        """What was thought before it."""
        return thinking_text(self.messages)

    @property
    def all_said(self) -> str:
        """What was said after the thinking in all turns, calls left out."""
        return every_turn(final_text, self.messages[self.opening :])

    @property
    def all_thinking(self) -> str:
        """What was thought in all turns."""
        return every_turn(thinking_text, self.messages[self.opening :])

    @property
    def raw(self) -> str:
        """The last message as it was sampled, with its thinking between `<think>` and `</think>`
        whatever the model's own marks are."""
        return raw_text(self.messages)

    def dumps(self) -> str:
        """For `loads`, in another process."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**fields, "messages": list(map(dict, self.messages))})

    @staticmethod
    def loads(text: str) -> TextTrajectory:
        return TextTrajectory(**json.loads(text))


Function = Callable[[Any, Any], Any]
"""Of a prompt and a `TextTrajectory`, or a group of them, to a number, or as many."""
PROMPT, TRAJECTORY = "prompt", "trajectory"
GROUP = "trajectories"
"""Name of the second parameter of a function that sees all of a group."""
ELSEWHERE = frozenset(
    (
        *("prompts", "completions", "completion_ids", "generations", "queries"),
        *("responses", "response_str", "solution_str", "solution_strs", "solutions"),
        *("data_source", "data_sources", "ground_truth", "ground_truths"),
    )
)
"""Parameters of reward functions in TRL, verl, OpenRLHF and their like, which pass texts."""

ROUNDING = 1e-6
"""A reward may be so far below 0 or above 1, and counts as that: 0.1 * 3 / 0.3 is more than 1, and
so may be the cosine of a text with itself."""


def load_function(name: str) -> Function:
    """The function with the dotted name `name`; modules are found in the working directory too.

    Raises ValueError naming the nearest function that would do, and for one that could not be
    called as `name(prompt, trajectory)`, or is a class.
    """
    if name.startswith(PREFIX):
        found = passed(name)
        _check_callable(name, found)
        return cast(Function, found)
    module_name, _, attribute = name.rpartition(".")
    if not all(map(str.isidentifier, name.split("."))):
        near = f"; did you mean {known}?" if (known := meant(name)) else ""
        raise ValueError(
            f"reward {name!r}: must be a module's name, a dot and a function's, for example "
            f"my_rewards.brief for `def brief` in my_rewards.py of this folder{near}"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # after everything: a file called `json.py` must not replace json
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"reward {name!r}: {module_name} cannot be imported: {error}"
            ) from error
        outer, _, inner = module_name.rpartition(".")
        if outer and inner in _names_in(outer):
            hint = (
                f"; {inner} is in {outer}.py, and only what that names at its top level can be a "
                f"reward: write `{attribute} = {inner}.{attribute}` there, and here "
                f"{outer}.{attribute}"
            )
        else:
            files = [path.stem for path in Path(here).glob("*.py")]
            near = difflib.get_close_matches(module_name, files, n=1)
            hint = _near(near[0], attribute, _names_in(near[0])) if near else ""
        raise ValueError(
            f"reward {name!r}: there is no module {error.name!r} (looked in {here}, and where "
            f"Python does){hint}"
        ) from error
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        at = "" if isinstance(error, (ImportError, SyntaxError)) else f" ({place(error)})"
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise ValueError(
            f"reward {name!r}: {module_name} cannot be imported: {kind}{error}{at}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        near = [key for key, value in vars(module).items() if callable(value) and _loads(value)]
        own = Path(here, *module_name.split(".")).with_suffix(".py")
        if own.is_file() and module.__file__ and not own.samefile(module.__file__):
            hint = f"; it is {module.__file__}, which hides {own}: rename the file"
        else:
            hint = _near(module_name, attribute, near)
        if not hint and (known := meant(name)):  # my_rewards.py
            hint = f"; did you mean {known}?"
        raise ValueError(f"reward {name!r}: {module_name} has no function {attribute!r}{hint}")
    _check_callable(name, found)
    return cast(Function, found)


def _near(module_name: str, attribute: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(attribute, names, n=1)
    return f"; did you mean {module_name}.{near[0]}?" if near else ""


def meant(name: str) -> str:
    """The function that `my_rewards:brief` or `./my_rewards.py` means, where the working directory
    has it (of several the first), else ""."""
    words = [word for word in re.findall(r"\w+", name) if word != "py"]
    if len(words) > 1 and words[-1] in _names_in(".".join(words[:-1])):
        return ".".join(words)
    of_module = _names_in(".".join(words), functions=True) if words else []
    return ".".join([*words, of_module[0]]) if of_module else ""


def _names_in(module_name: str, *, functions: bool = False) -> list[str]:
    """What a module of the working directory names at its top level, without running it.
    functions: only those that take two parameters, or more."""
    path = Path(os.getcwd(), *module_name.split(".")).with_suffix(".py")
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    if functions:
        found = [one for one in body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return [one.name for one in found if len(one.args.args) > 1]
    names: list[str] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return names


def _loads(found: Callable[..., Any]) -> bool:
    try:
        _check_callable("", found)
    except ValueError:
        return False
    return True


def _check_callable(name: str, found: Callable[..., Any]) -> None:
    """Raise ValueError for what could not be called as `name(prompt, trajectory)`."""
    if inspect.isclass(found):
        low = found.__name__.lower()
        raise ValueError(
            f"reward {name!r}: is a class; name an instance: write `{low} = {found.__name__}()` "
            f"below it, and {name.rpartition('.')[0]}.{low} in the recipe"
        )
    if isinstance(found, functools._lru_cache_wrapper):  # pyright: ignore[reportPrivateUsage]
        raise ValueError(
            f"reward {name!r}: is cached by functools, which has to hash its "
            "arguments, and a prompt cannot be hashed; cache a function of trajectory.answer, and "
            "call that from it"
        )
    if any(inspect.isasyncgenfunction(one) for one in (found, type(found).__call__)):
        raise ValueError(
            f"reward {name!r}{_where(found)}: is an async generator; return the number"
        )
    signature = _signature(found)
    if signature is None:
        return
    takes = f"reward {name!r}{_where(found)}: takes {signature}, and is called with "
    plain = name.rpartition(".")[2]
    cure = (
        f"Write def {plain}(prompt, trajectory), or def {plain}(prompt, {GROUP}) for all of a "
        "group: trajectory.answer is a completion's text, prompt.reward what its prompt's line "
        "says (docs/rewards.md)"
    )
    try:
        signature.bind("prompt", "trajectory")
    except TypeError as error:
        raise ValueError(f"{takes}one prompt and one trajectory: {error}. {cure}") from error
    names = _parameters(found)[:2]
    turned = names in ([TRAJECTORY, PROMPT], [GROUP, PROMPT])
    if turned or (names[:1] != [PROMPT] and not ELSEWHERE.isdisjoint(names)):
        theirs = "in that order" if turned else "not with the texts and columns of other libraries"
        raise ValueError(f"{takes}one prompt and one trajectory, {theirs}. {cure}")


def _parameters(found: Callable[..., Any]) -> list[str]:
    """Names of what it takes; none where it does not tell."""
    signature = _signature(found)
    return list(signature.parameters) if signature else []


def _signature(found: Callable[..., Any]) -> inspect.Signature | None:
    """Of the function that is called: a decorator may supply what the one inside it takes."""
    try:
        return inspect.signature(found, follow_wrapped=False)
    except ValueError:  # some built-in ones do not tell
        return None


def _where(found: Callable[..., Any]) -> str:
    """` (my_rewards.py:12 in brief)`, where that is known."""
    at = _defined(found)
    return f" ({at})" if at else ""


def _defined(found: Callable[..., Any]) -> str:
    """`my_rewards.py:12 in brief`, or ""."""
    inner = inspect.unwrap(found)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return shown(code.co_filename, code.co_firstlineno, code.co_name) if code else ""


def prompt_fields(prompt: Any) -> dict[str, Any]:
    """`prompt` in terms of JSON, as `function` takes it."""
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
    """Whether the function with this dotted name takes all trajectories of a group at once. Raises
    as `load_function`."""
    return _parameters(load_function(name))[1:2] == [GROUP]


def function(spec: Mapping[str, Any]) -> Callable[[str], float | dict[str, float]]:
    """Judges `TextTrajectory.dumps()`. Spec: `name`, and `prompt` from `prompt_fields`. With
    `group` it judges a JSON list of them, to `{"correct": their mean, "0": …, "1": …}`."""
    # It brings numpy along, and the workers of a run without such rewards do without.
    from keel.rl.types import Prompt  # noqa: PLC0415

    name = str(spec["name"])
    reward = load_function(name)
    fields: dict[str, Any] = dict(spec["prompt"])
    fields |= {key: tuple(fields[key]) for key in ("messages", "tools")}
    prompt = Prompt(**fields)

    def returned(what: Any) -> Any:
        try:
            found = reward(prompt, what)
            return _awaited(found) if inspect.isawaitable(found) else found
        except SystemExit as error:  # would end the worker, or the run
            left = RuntimeError(f"called exit({error.code})")
            raise left.with_traceback(error.__traceback__) from error
        except (AttributeError, KeyError, TypeError) as error:
            explain(error, prompt, what)
            raise

    def number(score: Any) -> float:
        found = _number(score)
        if isinstance(found, str):
            raise BadReward(f"returned {found}", _defined(reward))
        return found

    def verify(text: str) -> float:
        return number(returned(TextTrajectory.loads(text)))

    def verify_group(text: str) -> dict[str, float]:
        trajectories = tuple(map(TextTrajectory.loads, json.loads(text)))
        scores = returned(trajectories)
        try:
            if issubclass(type(scores), (str, bytes, Mapping, Set)):  # whose items are no numbers
                raise TypeError
            scores = list(scores)
        except TypeError:
            kind = type(scores).__name__
            raise BadReward(f"returned a {kind}; a list is wanted", _defined(reward)) from None
        if len(scores) != len(trajectories):
            raise BadReward(
                f"returned {len(scores)} numbers for {len(trajectories)} trajectories",
                _defined(reward),
            )
        numbers = {str(index): number(score) for index, score in enumerate(scores)}
        return {"correct": math.fsum(numbers.values()) / len(numbers), **numbers}

    return verify_group if spec.get("group") else verify


@functools.cache
def _runner() -> asyncio.Runner:
    """One event loop for all calls of this process: what a function keeps in a global, an HTTP
    client say, belongs to the loop that it was made on."""
    return asyncio.Runner(loop_factory=asyncio.new_event_loop)


_CALLING = threading.Lock()
"""The loop is one thread's at a time. (Without worker processes, each scorer has its own.)"""


def _awaited(found: Awaitable[Any]) -> Any:
    async def result() -> Any:
        return await found

    with _CALLING:
        return _runner().run(result())


class BadReward(ValueError):
    """A function returned what is no reward."""

    def __init__(self, message: str, at: str) -> None:
        super().__init__(message)
        self.at = at
        """Where the function is."""


def _number(score: Any) -> float | str:
    """As a number from 0 to 1, else what it is and what to do."""
    if score is None:
        return "None; is there a way through it without a `return`?"
    try:
        if issubclass(type(score), (str, bytes, bytearray)):  # `float` would read them
            raise TypeError
        number = float(score)
    except (TypeError, ValueError):
        return f"a {type(score).__name__} ({str(score)[:50]!r}); a number from 0 to 1 is wanted"
    if math.isnan(number):
        return "NaN; is it a mean of nothing?"
    if not -ROUNDING <= number <= 1.0 + ROUNDING:
        side = "below 0" if number < 0 else "above 1"
        return f"{number!r}, {side}; scale it to 0 … 1, its weight is in the recipe"
    return min(max(number, 0.0), 1.0)
