"""Objects whose public methods are tools, and functions that are."""

from __future__ import annotations

import difflib
import inspect
import json
from contextlib import suppress
from typing import Any, Callable, cast  # noqa: UP035  (Python 3.9)

from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment
from keel.agents.env_runtime.type_schemas import (
    described,
    hints_of,
    object_schema,
    schema_of,
    value_of,
)

OWN: dict[str, tuple[str, ...]] = {
    "opening": ("task", "seed"),
    "reply": ("text",),
    "verdict": ("messages", "finish_reason"),
    "close": (),
}
"""Methods that are no tools, and the parameters that they may have. An attribute `done`
that is True (numpy's counts) ends the episode; `offered` is the names of the tools that the policy
is told of, where it is not all of them; or tools that only the task decides on, as they are told of
(name, description, parameters): their calls go to the method `call(name, arguments)`. `call_s`, of
one that has it, is set before each call: seconds after which the process is ended."""
_NEAR = 0.85
"""From here on a name is one of `OWN` misspelt: `openning`, `verdit`; but not `open`."""


class Tool:
    """A function, and how the policy is told of it."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._function = function
        self._hints = hints_of(function, f"tool {name}")
        about, parameters = described(inspect.getdoc(function) or "")
        properties: dict[str, Any] = {}
        required: list[str] = []
        for key, one in inspect.signature(function).parameters.items():
            where = f"tool {name}: parameter {key}"
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
                raise InvalidEnvironment(
                    f"{where} is `{one}`; a tool's parameters are passed by name"
                )
            if key not in self._hints and one.default is one.empty:
                raise InvalidEnvironment(
                    f"{where} has no type hint; write `{key}: str`, for example"
                )
            shape = schema_of(self._hints.get(key, Any), where)
            if key in parameters:
                shape.setdefault("description", parameters[key].strip())
            if one.default is one.empty:
                required.append(key)
            elif isinstance(one.default, (str, int, float, bool)):
                shape["default"] = one.default
            properties[key] = shape
        self.spec = {
            "name": name,
            "description": about,
            "parameters": object_schema(properties, required),
        }

    def __call__(self, arguments: dict[str, Any]) -> str:
        given = {key: value_of(self._hints.get(key, Any), arguments[key]) for key in arguments}
        return text_of(resolve(self._function(**given)))


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


_loop: Any = None


def resolve(value: Any) -> Any:
    """The result, where `value` is a coroutine. All of an episode's run on one loop."""
    global _loop
    if not inspect.isawaitable(value):
        return value
    import asyncio  # noqa: PLC0415  (most environments do without)

    if _loop is None:
        _loop = asyncio.new_event_loop()

    async def outcome() -> Any:
        return await value

    return _loop.run_until_complete(outcome())


class Object:
    """An object whose public methods are tools, or plain functions."""

    def __init__(self, found: Any, functions: dict[str, Callable[..., Any]]) -> None:
        self._found = found
        self.grades = hasattr(found, "verdict")
        for name, known in OWN.items():
            if callable(method := getattr(found, name, None)):
                with suppress(ValueError):  # a builtin may not say what it takes
                    bind_arguments(name, parameters_of(method), dict.fromkeys(known))
        self._tools = {name: Tool(name, function) for name, function in functions.items()}
        self._of_the_task = False

    def opening(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        said = self._ask("opening", task=task, seed=seed)
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        offered = getattr(self._found, "offered", None)  # the task may decide
        names: list[Any] = list(self._tools) if offered is None else list(offered)
        if not isinstance(inspect.getattr_static(self._found, "done", None), property):
            _ = self.done  # what is wrong with it is said before a run
        self._of_the_task = any(isinstance(one, dict) for one in names)
        if self._of_the_task:
            return {"messages": messages, "tools": names}
        if unknown := [name for name in names if name not in self._tools]:
            raise InvalidEnvironment(
                f"`offered` has {unknown[0]!r}, and the tools are {', '.join(self._tools)}"
            )
        return {"messages": messages, "tools": [self._tools[name].spec for name in names]}

    def may_take(self, call_s: float) -> None:
        """The next call."""
        if hasattr(self._found, "call_s"):
            self._found.call_s = call_s

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._of_the_task:
            text = text_of(resolve(self._found.call(name, arguments)))
        else:
            text = self._tools[name](arguments)
        return {"text": text, "done": self.done}

    @property
    def done(self) -> bool:
        """Raises EnvironmentGone for what is no bool: nobody can tell when the episode ends."""
        value: Any = getattr(self._found, "done", False)
        kind = cast(Any, type(value))
        if value is None or isinstance(value, bool) or callable(value):  # that one is a tool
            return value is True
        if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
            return bool(value)
        raise EnvironmentGone(
            f"`done` is {value!r:.50} ({kind.__name__}), must be True or False; write "
            "`self.done = bool(…)`"
        )

    def reply(self, said: dict[str, Any]) -> Any:
        text = self._ask("reply", text=str(said.get("content") or ""))
        return {"role": "user", "content": text} if isinstance(text, str) else text

    def verdict(self, messages: list[Any], finish_reason: str) -> dict[str, Any]:
        said = self._ask("verdict", messages=messages, finish_reason=finish_reason)
        parts, facts = cast("tuple[Any, Any]", said if isinstance(said, tuple) else (said, {}))
        if parts is None:
            if hasattr(self._found, "verdict"):
                raise TypeError("verdict returned None; a number or a dict of numbers is wanted")
            parts = {}
        return {"parts": parts if isinstance(parts, dict) else {"correct": parts}, "facts": facts}

    def close(self) -> None:
        self._ask("close")

    def _ask(self, name: str, **given: Any) -> Any:
        """What the environment's own method says, called with what it has parameters for."""
        method = getattr(self._found, name, None)
        if method is None:
            return None
        first, named = bind_arguments(name, parameters_of(method), given)
        return resolve(method(*first, **named))


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def bind_arguments(
    name: str, wanted: list[inspect.Parameter], given: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """What of `given` the parameters `wanted` of a function take, by position and by name: all of
    it where they have `**` and none of it is named. A single one of another name takes the first.
    Raises InvalidEnvironment."""
    plain = [one for one in wanted if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    known = [one for one in plain if one.name in given]
    others = [one for one in plain if one.name not in given and one.default is one.empty]
    every = not (known or others) and any(one.kind is one.VAR_KEYWORD for one in wanted)
    rest = dict(given) if every else {one.name: given[one.name] for one in known}
    alone = others or wanted
    by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    if given and not known and len(alone) == 1 and alone[0].kind not in by_name:
        key = next(iter(given))
        rest.pop(key, None)
        return [given[key]], rest
    if named := [f"`{one.name}`" for one in others]:
        several = "s" if len(named) > 1 else ""
        cure = f"; a single one of another name is given the {next(iter(given))}" if given else ""
        raise InvalidEnvironment(
            f"{name} has the parameter{several} {' and '.join(named)}, and may have: "
            f"{', '.join(given) or 'none'}{cure}{'; a tool needs another name' * (name in OWN)}"
        )
    first = [rest.pop(one.name) for one in known if one.kind is one.POSITIONAL_ONLY]
    return first, rest


def methods_of(found: Any) -> dict[str, Callable[..., Any]]:
    made_from = cast(Any, type(found))
    names = [name for name in dir(made_from) if not name.startswith("_") and name not in OWN]
    kept = [name for name in names if inspect.isroutine(inspect.getattr_static(found, name))]
    order = list(
        cast("dict[str, Any]", vars(made_from))
    )  # as written; what is inherited after that
    for name in kept:
        _check_spelling(name, found)
    kept.sort(key=lambda name: order.index(name) if name in order else len(order))
    return {name: getattr(found, name) for name in kept}


def _check_spelling(name: str, found: Any) -> None:
    """Raise InvalidEnvironment for a tool whose name looks like a misspelt one of `OWN`."""
    missing = [own for own in OWN if not hasattr(found, own)]
    for own in difflib.get_close_matches(name.lower(), missing, n=1, cutoff=_NEAR):
        keys = set(inspect.signature(getattr(found, name)).parameters)
        if keys <= set(OWN[own]) and (keys or own in ("verdict", "close")):
            raise InvalidEnvironment(
                f"{name} would be a tool of the policy; did you mean `{own}`? If it is to be a "
                "tool, give it another name"
            )


def functions_of(found: Any) -> dict[str, Callable[..., Any]]:
    if inspect.ismodule(found):
        public = getattr(found, "__all__", [name for name in vars(found) if name[0] != "_"])
        every = [getattr(found, name) for name in public]
        found = [
            one for one in every if inspect.isfunction(one) and one.__module__ == found.__name__
        ]
    several = cast("list[Any]", found) if isinstance(found, (list, tuple)) else [found]
    return {one.__name__: one for one in several}
