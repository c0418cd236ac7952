"""Converts type hints to JSON schemas and JSON values to Python types, and parses docstrings."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
from collections import abc
from contextlib import suppress
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from keel.agents.env_runtime.errors import InvalidEnvironment, error_text

_UNIONS: tuple[Any, ...] = (Union, getattr(types, "UnionType", Union))
_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_PLAIN[type(None)] = "null"
_ITERABLES = (abc.Sequence, abc.Iterable, abc.Collection, abc.Set)
_ARRAYS: tuple[Any, ...] = (list, tuple, set, frozenset, *_ITERABLES)
_NUMBERS: tuple[Any, ...] = (int, float)
_OBJECTS: tuple[Any, ...] = (dict, abc.Mapping)


def schema_of(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema for a type hint."""
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    kind, inner = _parts(hint)
    if hasattr(hint, "__metadata__"):  # Annotated[int, "a description"]
        texts = [one for one in hint.__metadata__ if isinstance(one, str)]
        schema = schema_of(hint.__origin__, where)
        return {**schema, "description": texts[0]} if texts else schema
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if kind is Literal:
        return {"enum": list(inner)}
    if kind in _UNIONS:
        return {"anyOf": [schema_of(one, where) for one in inner]}
    if _is_fixed(kind, inner):
        shapes = [schema_of(one, where) for one in inner]
        size = len(shapes)
        return {"type": "array", "prefixItems": shapes, "minItems": size, "maxItems": size}
    if kind in _ARRAYS:
        return {"type": "array", **({"items": schema_of(inner[0], where)} if inner else {})}
    if kind in _OBJECTS:
        values = schema_of(inner[1], where) if inner else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if _is_enum(kind):
        return {"enum": [one.value for one in kind]}
    if _is_dataclass(kind):
        hints = hints_of(kind, where)
        fields = [one for one in dataclasses.fields(kind) if one.init]
        missing = dataclasses.MISSING
        return object_schema(
            {one.name: schema_of(hints[one.name], f"{where}.{one.name}") for one in fields},
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


def hints_of(owner: Any, where: str) -> dict[str, Any]:
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


def value_of(hint: Any, value: Any) -> Any:
    """Convert a JSON value to the type `hint`. Raises ValueError if it has another type."""
    kind, inner = _parts(hint)
    if kind is Any:
        return value
    if kind in _UNIONS:
        for one in inner:
            with suppress(ValueError):
                return value_of(one, value)
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
            converted = [value_of(one, item) for one, item in zip(each, items)]  # noqa: B905
            return cast("Any", kind(converted) if kind in (tuple, set, frozenset) else converted)
    elif isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if not _is_dataclass(kind):
            item_hint = inner[1] if inner else Any
            return {key: value_of(item_hint, one) for key, one in fields.items()}
        hints = hints_of(kind, kind.__name__)
        if set(fields) <= set(hints):
            try:
                return kind(**{key: value_of(hints[key], one) for key, one in fields.items()})
            except TypeError as error:  # a field is missing
                raise ValueError(str(error)) from error
    raise ValueError(f"{value!r:.100} does not have the type {hint}")


_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):")
_FIELD = re.compile(r":(?:param (?:[\w\[\], ]+ )?(\w+)|\w+[^:]*):\s*(.*)")
_ARGUMENT = re.compile(r"\s+(\w+)(?: ?\([^)]*\))?:\s*(.*)")


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description and its parameters' (`Args:` or `:param x:`)."""
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
