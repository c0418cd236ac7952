"""Turns functions or the public methods of an object into tools. Defines the errors that
environments raise."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import os
import re
import traceback
import types
from collections import abc
from contextlib import suppress
from typing import Any, Callable, Literal, Union, cast, get_args, get_origin, get_type_hints  # noqa: UP035  (Python 3.9)

_RESERVED: dict[str, tuple[str, ...]] = {
    "opening": ("task", "seed"),
    "reply": ("text",),
    "verdict": ("messages", "finish_reason"),
    "close": (),
}
"""Methods that are not tools, with the parameters that they may declare. There are three reserved
attributes. `done` ends the episode. `call_s` is the time limit of the next call. `offered` lists
the names of the available tools or, if the tools depend on the task, their specs. In the second
case, all calls go to a method `call(name, arguments)`."""


class Tool:
    """A function offered to the policy, along with the description that the policy sees."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._function = function
        self._hints = _hints_of(function, f"tool {name}")
        description, parameters = _docstring_parts(inspect.getdoc(function) or "")
        properties: dict[str, Any] = {}
        required: list[str] = []
        for key, one in inspect.signature(function).parameters.items():
            where = f"tool {name}: parameter {key}"
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
                message = f"{where} is `{one}`; a tool's parameters are passed by name"
                raise InvalidEnvironment(message)
            if key not in self._hints and one.default is one.empty:
                message = f"{where} has no type hint; write `{key}: str`, for example"
                raise InvalidEnvironment(message)
            shape = _schema_of(self._hints.get(key, Any), where)
            if key in parameters:
                shape.setdefault("description", parameters[key].strip())
            if one.default is one.empty:
                required.append(key)
            elif isinstance(one.default, (str, int, float, bool)):
                shape["default"] = one.default
            properties[key] = shape
        self.spec: dict[str, Any] = {
            "name": name,
            "description": description,
            "parameters": object_schema(properties, required),
        }

    def __call__(self, arguments: dict[str, Any]) -> str:
        values = {key: _value_of(self._hints.get(key, Any), arguments[key]) for key in arguments}
        return text_of(await_result(self._function(**values)))


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


_loop: Any = None


def await_result(value: Any) -> Any:
    """Return the value. If it is a coroutine, run it on the episode's event loop and return its
    result."""
    global _loop
    if not inspect.isawaitable(value):
        return value
    import asyncio  # noqa: PLC0415  (rarely needed)

    if _loop is None:
        _loop = asyncio.new_event_loop()

    async def outcome() -> Any:
        return await value

    return _loop.run_until_complete(outcome())


class ObjectEnvironment:
    """An environment whose tools are the public methods of `target`, or the given functions."""

    def __init__(self, target: Any, functions: Any = None) -> None:
        functions = functions or methods_of(target)
        self._target = target
        self.grades = hasattr(target, "verdict")
        for name, known in _RESERVED.items():
            if callable(method := getattr(target, name, None)):
                with suppress(ValueError):  # a builtin may have no signature
                    bind_arguments(name, method, dict.fromkeys(known))
        self._tools = {name: Tool(name, function) for name, function in functions.items()}
        self._tools_from_task = False

    def opening(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        result = self._call_reserved("opening", task=task, seed=seed)
        messages = [{"role": "user", "content": result}] if isinstance(result, str) else result
        offered = getattr(self._target, "offered", None)  # set by `opening`
        tools: list[Any] = list(self._tools) if offered is None else list(offered)
        self._tools_from_task = any(isinstance(one, dict) for one in tools)
        if self._tools_from_task:
            return {"messages": messages, "tools": tools}
        if unknown := [name for name in tools if name not in self._tools]:
            known = ", ".join(self._tools)
            raise InvalidEnvironment(f"`offered` has {unknown[0]!r}, which is not among {known}")
        return {"messages": messages, "tools": [self._tools[name].spec for name in tools]}

    def set_call_time(self, call_s: float) -> None:
        if hasattr(self._target, "call_s"):
            self._target.call_s = call_s

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._tools_from_task:
            text = text_of(await_result(self._target.call(name, arguments)))
        else:
            text = self._tools[name](arguments)
        return {"text": text, "done": self.done}

    @property
    def done(self) -> bool:
        value: Any = getattr(self._target, "done", False)
        if isinstance(value, str):
            message = f"`done` is the text {value!r:.50}; write `self.done = True` or `= False`"
            raise InvalidEnvironment(message)
        return bool(value) and not callable(value)  # a callable is a tool

    def reply(self, turn: dict[str, Any]) -> Any:
        text = self._call_reserved("reply", text=str(turn.get("content") or ""))
        return {"role": "user", "content": text} if isinstance(text, str) else text

    def verdict(self, messages: list[Any], finish_reason: str) -> dict[str, Any]:
        if not self.grades:
            return {"parts": {}}
        result = self._call_reserved("verdict", messages=messages, finish_reason=finish_reason)
        return verdict_fields(result)

    def close(self) -> None:
        self._call_reserved("close")

    def _call_reserved(self, name: str, **values: Any) -> Any:
        """Call a reserved method with the parameters it declares. Returns None if the method isn't
        defined."""
        method = getattr(self._target, name, None)
        if method is None:
            return None
        return await_result(method(**bind_arguments(name, method, values)))


def verdict_fields(result: Any) -> dict[str, Any]:
    """Convert a verdict (a number, a dict of numbers, or a pair of either and facts) to a dict."""
    parts, facts = cast("Any", result if isinstance(result, tuple) else (result, {}))
    if not isinstance(parts, dict):
        message = f"{parts!r:.50} is not a verdict; return a number or a dict of numbers"
        if isinstance(parts, (str, bytes)):  # which `float` would parse
            raise TypeError(message)
        try:
            parts = {"correct": float(parts)}
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(message) from error
    return {"parts": parts, "facts": facts}


def bind_arguments(
    name: str, function: Callable[..., Any], values: dict[str, Any]
) -> dict[str, Any]:
    """Select the `values` that `function` declares as parameters, or all of them if it takes
    `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    unknown = [
        f"`{one.name}`"
        for one in parameters
        if one.name not in values and one.default is one.empty and one.kind not in variable
    ]
    if unknown:
        allowed = ", ".join(values) or "none"
        tool = "; a tool needs another name" if name in _RESERVED else ""
        names = " and ".join(unknown)
        raise InvalidEnvironment(f"{name} declares {names}; it may have: {allowed}{tool}")
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return values
    return {one.name: values[one.name] for one in parameters if one.name in values}


def methods_of(target: Any) -> dict[str, Callable[..., Any]]:
    """List an object's public methods in source order. Inherited methods come last."""
    kind = cast(Any, type(target))
    names = [name for name in dir(kind) if not name.startswith("_") and name not in _RESERVED]
    names = [name for name in names if inspect.isroutine(inspect.getattr_static(target, name))]
    order = list(cast("dict[str, Any]", vars(kind)))
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    return {name: getattr(target, name) for name in names}


def public_functions(target: Any) -> dict[str, Callable[..., Any]]:
    """Return functions keyed by name, given a module, a list of functions or a single function. A
    module's private functions are skipped."""
    if inspect.ismodule(target):
        public = getattr(target, "__all__", [name for name in vars(target) if name[0] != "_"])
        values = [getattr(target, name) for name in public]
        target = [
            one for one in values if inspect.isfunction(one) and one.__module__ == target.__name__
        ]
    functions = cast("list[Any]", target) if isinstance(target, (list, tuple)) else [target]
    return {one.__name__: one for one in functions}


_UNIONS: tuple[Any, ...] = (Union, getattr(types, "UnionType", Union))
_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_PLAIN[type(None)] = "null"
_ITERABLES = (abc.Sequence, abc.Iterable, abc.Collection, abc.Set)
_ARRAYS: tuple[Any, ...] = (list, tuple, set, frozenset, *_ITERABLES)
_NUMBERS: tuple[Any, ...] = (int, float)
_OBJECTS: tuple[Any, ...] = (dict, abc.Mapping)


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    kind, inner = _parts(hint)
    if hasattr(hint, "__metadata__"):  # Annotated[int, "a description"]
        texts = [one for one in hint.__metadata__ if isinstance(one, str)]
        schema = _schema_of(hint.__origin__, where)
        return {**schema, "description": texts[0]} if texts else schema
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if kind is Literal:
        return {"enum": list(inner)}
    if kind in _UNIONS:
        return {"anyOf": [_schema_of(one, where) for one in inner]}
    if _is_fixed(kind, inner):
        shapes = [_schema_of(one, where) for one in inner]
        size = len(shapes)
        return {"type": "array", "prefixItems": shapes, "minItems": size, "maxItems": size}
    if kind in _ARRAYS:
        return {"type": "array", **({"items": _schema_of(inner[0], where)} if inner else {})}
    if kind in _OBJECTS:
        values = _schema_of(inner[1], where) if inner else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if _is_enum(kind):
        return {"enum": [one.value for one in kind]}
    if _is_dataclass(kind):
        hints = _hints_of(kind, where)
        fields = [one for one in dataclasses.fields(kind) if one.init]
        missing = dataclasses.MISSING
        return object_schema(
            {one.name: _schema_of(hints[one.name], f"{where}.{one.name}") for one in fields},
            [f.name for f in fields if f.default is missing and f.default_factory is missing],
        )
    raise InvalidEnvironment(
        f"{where} has the type {hint!r}, which has no JSON schema. Use str, int, float, bool, "
        "None, list, tuple, dict, Literal, Optional, Union, Enum, Any, or a dataclass"
    )


def object_schema(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        shape["required"] = required
    return {**shape, "additionalProperties": False}


def _hints_of(owner: Any, where: str) -> dict[str, Any]:
    try:
        return get_type_hints(owner, include_extras=True)
    except Exception as error:  # a hint may be any expression
        message = f"{where}: its type hints cannot be read: {error_text(error)}"
        raise InvalidEnvironment(message) from error


def _parts(hint: Any) -> Any:
    if hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    hint = type(None) if hint is None else hint
    return get_origin(hint) or hint, get_args(hint)


def _is_fixed(kind: Any, inner: tuple[Any, ...]) -> bool:
    return kind is tuple and bool(inner) and Ellipsis not in inner


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")


def _value_of(hint: Any, value: Any) -> Any:
    kind, inner = _parts(hint)
    if kind is Any:
        return value
    if kind in _UNIONS:
        for one in inner:
            with suppress(ValueError):
                return _value_of(one, value)
    elif _is_enum(kind):
        return kind(value)
    elif kind is Literal:
        if value in inner:
            return value
    elif kind in _NUMBERS:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and (kind is float or value == int(value)):  # 3.0 is an integer in JSON
            return kind(value)
    elif kind in _PLAIN:
        if isinstance(value, kind):
            return value
    elif kind in _ARRAYS and isinstance(value, list):
        items = cast("list[Any]", value)
        each = inner if _is_fixed(kind, inner) else (inner or (Any,))[:1] * len(items)
        if len(each) == len(items):
            converted = [_value_of(one, item) for one, item in zip(each, items)]  # noqa: B905
            return cast("Any", kind(converted) if kind in (tuple, set, frozenset) else converted)
    elif isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if not _is_dataclass(kind):
            item_hint = inner[1] if inner else Any
            return {key: _value_of(item_hint, one) for key, one in fields.items()}
        hints = _hints_of(kind, kind.__name__)
        if set(fields) <= set(hints):
            try:
                return kind(**{key: _value_of(hints[key], one) for key, one in fields.items()})
            except TypeError as error:  # a field is missing
                raise ValueError(str(error)) from error
    raise ValueError(f"{value!r:.100} does not have the type {hint}")


_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):")
_FIELD = re.compile(r":(?:param (?:[\w\[\], ]+ )?(\w+)|\w+[^:]*):\s*(.*)")
_ARGUMENT = re.compile(r"\s+(\w+)(?: ?\([^)]*\))?:\s*(.*)")


def _docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    description: list[str] = []
    parameters: dict[str, str] = {}
    section, last, depth = "", "", 0
    for line in inspect.cleandoc(text).splitlines():
        indent = len(line) - len(line.lstrip())
        heading = _SECTION.fullmatch(line.rstrip())
        field = _FIELD.match(line)
        if heading:
            section, last, depth = heading[1], "", 0
        elif field:
            section, last = "Field", field[1] or ""
            if last:
                parameters[last] = field[2]
        elif not section or (line and not indent):
            section, last = "", ""
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and indent <= (depth or indent):
            argument = _ARGUMENT.match(line)
            if argument:
                last, depth = argument[1], indent
                parameters[last] = argument[2]
        elif last and line:
            parameters[last] = f"{parameters[last]} {line.strip()}".strip()
    return "\n".join(description).strip(), parameters


_MAX_CHARACTERS = 2000
_OURS = os.path.dirname(os.path.abspath(__file__))
_STANDARD_LIBRARY = ("<frozen", os.path.dirname(os.__file__))


class InvalidEnvironment(Exception):
    """Raised when the target can't be used as an environment. The message explains how to fix
    it."""


class EnvironmentGone(Exception):
    """Raised when the environment's backend is gone or broken."""


def error_location(error: BaseException) -> str:
    """Find where in the environment's code an error was raised, such as `my_env.py:12 in buy`."""
    ours = (_OURS, "<frozen importlib")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours)
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(_STANDARD_LIBRARY)]
    if not frames:
        return ""
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]
