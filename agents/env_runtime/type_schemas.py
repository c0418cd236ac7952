"""Converts type hints to JSON schemas and JSON values to Python types, and parses docstrings."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
from collections import abc
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from keel.agents.env_runtime.errors import InvalidEnvironment, error_text

_UNIONS = (Union, getattr(types, "UnionType", Union))
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ARRAYS = (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection, abc.Set)


def schema_of(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema for a type hint.

    Raises InvalidEnvironment if the type is not supported.
    """
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    hint = type(None) if hint is None else hint
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if hasattr(hint, "__metadata__"):  # Annotated[int, "a description"]
        texts = [one for one in hint.__metadata__ if isinstance(one, str)]
        return {**schema_of(inner[0], where), **({"description": texts[0]} if texts else {})}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in _UNIONS:
        return {"anyOf": [schema_of(one, where) for one in inner]}
    kind = origin or hint
    if kind in _ARRAYS:
        items = [one for one in inner if one is not Ellipsis]
        if kind is tuple and items and Ellipsis not in inner:
            shapes = [schema_of(one, where) for one in items]
            count = len(shapes)
            return {"type": "array", "prefixItems": shapes, "minItems": count, "maxItems": count}
        return {"type": "array", **({"items": schema_of(items[0], where)} if items else {})}
    if kind in (dict, abc.Mapping):
        values = schema_of(inner[1], where) if inner else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if _is_enum(hint):
        return {"enum": [one.value for one in hint]}
    if _is_dataclass(hint):
        hints = hints_of(hint, where)
        fields = [one for one in dataclasses.fields(hint) if one.init]
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


def value_of(hint: Any, value: Any) -> Any:
    """Convert a JSON value to the type `hint`, whose schema it must satisfy."""
    if hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return value_of(next((one for one in inner if _fits(one, value)), Any), value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float):
        return int(value)  # 3.0 is an integer in JSON
    kind: Any = origin or hint
    if kind in _ARRAYS and isinstance(value, list):
        items = cast("list[Any]", value)
        types_ = [one for one in inner if one is not Ellipsis] or [Any]
        is_fixed = kind is tuple and inner and Ellipsis not in inner
        each = types_ if is_fixed else types_[:1] * len(items)
        converted = [value_of(one, item) for one, item in zip(each, items)]  # noqa: B905
        return cast("Any", kind(converted) if kind in (tuple, set, frozenset) else converted)
    if _is_enum(hint):
        return hint(value)
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if kind in (dict, abc.Mapping) and inner:
        return {key: value_of(inner[1], one) for key, one in fields.items()}
    if _is_dataclass(hint):
        hints = hints_of(hint, hint.__name__)
        return hint(**{key: value_of(hints[key], one) for key, one in fields.items()})
    return fields


def _fits(hint: Any, value: Any) -> bool:
    """Return whether a JSON value has the type `hint`, which decides between the members of a
    union."""
    if hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    if hint is Any:
        return True
    kind: Any = get_origin(hint) or (type(None) if hint is None else hint)
    inner = get_args(hint)
    if kind is Literal:
        return value in inner
    if kind in (int, float):
        numbers = (int, float) if kind is float else (int,)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if kind in _PLAIN:
        return isinstance(value, kind)
    if _is_enum(kind):
        return value in [one.value for one in kind]
    if kind in _UNIONS:
        return any(_fits(one, value) for one in inner)
    if kind in _ARRAYS:
        if not isinstance(value, list):
            return False
        items = cast("list[Any]", value)
        if kind is tuple and inner and Ellipsis not in inner:
            pairs = zip(inner, items)  # noqa: B905  (Python 3.9)
            return len(items) == len(inner) and all(_fits(one, item) for one, item in pairs)
        return not inner or all(_fits(inner[0], item) for item in items)
    if not isinstance(value, dict):
        return False
    fields = cast("dict[str, Any]", value)
    if not _is_dataclass(kind):
        return len(inner) < 2 or all(_fits(inner[1], one) for one in fields.values())
    hints = hints_of(kind, kind.__name__)
    return set(fields) <= set(hints) and all(_fits(hints[key], one) for key, one in fields.items())


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "__dataclass_fields__")


_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):")
_FIELD = re.compile(r":(?:param (?:[\w\[\], ]+ )?(\w+)|\w+[^:]*):\s*(.*)")
_ARGUMENT = re.compile(r"\s+(\w+)(?: ?\([^)]*\))?:\s*(.*)")


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description and the descriptions of the parameters.

    Parameters are described under `Args:` or with `:param x:`.
    """
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
        elif line and not indent:
            section, last = "", ""
            description.append(line)
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and indent <= (depth or indent):
            argument = _ARGUMENT.match(line)
            if argument:
                last, depth = argument[1], indent
                parameters[last] = argument[2]
        elif last and line:
            parameters[last] = f"{parameters[last]} {line.strip()}".strip()
    return "\n".join(description).strip(), parameters
