"""Validates tool schemas before a run and tool calls against them. Answers are checked by separate
code in `keel.rewards.rules.verifiers`, because there is no package that both modules may import."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import regex

from keel.rl.turns import ToolCall, ToolSpec

_MAX_CHARACTERS = 300
"""Maximum length of an error message, because it may quote the policy's text."""
_MAX_COMPLAINTS = 3
_MATCH_S = 0.1
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ArgumentValidator:
    """Validates tool call arguments. Schemas must not refer to other documents."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._validators: dict[str, Any] = {}
        for tool in tools:
            if not _NAME.fullmatch(tool.name):
                allowed = "1 to 64 letters, digits, '_', '-' and '.'"
                raise ValueError(f"tool {tool.name!r}: a name must be {allowed}")
            if tool.name in self._validators:
                raise ValueError(f"tool {tool.name}: there are two of that name")
            try:
                self._validators[tool.name] = _validator(tool.parameters)
            except ValueError as error:
                raise ValueError(f"tool {tool.name}: its schema {error}") from error

    def explain_error(self, call: ToolCall) -> str:
        """Return an error message for the policy, or "" if the call is valid."""
        validator = self._validators.get(call.name)
        if validator is None:
            near = difflib.get_close_matches(call.name, self._validators, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(self._validators) or "none"
            return f"there is no tool {call.name[:64]!r}{hint} (there are: {known})"
        arguments: Any = call.arguments
        if not isinstance(arguments, Mapping):
            return f"{call.name}: its arguments must be an object, by name"
        try:
            every: Iterator[Any] = validator.iter_errors(dict(cast(Mapping[str, Any], arguments)))
            errors = list(islice(every, _MAX_COMPLAINTS))
        except RecursionError:
            return f"{call.name}: its arguments are nested too deeply"
        except TimeoutError:
            return f"{call.name}: a text in its arguments takes too long to match with its pattern"
        except ArithmeticError:  # `multipleOf` of an integer that no float holds
            return f"{call.name}: a number in its arguments is too large"
        messages = [
            error.message[:_MAX_CHARACTERS] + (f" (at {error.json_path})" if error.path else "")
            for error in errors
        ]
        return f"{call.name}: {'; '.join(messages)}" if messages else ""


def argument_validator(tools: Sequence[ToolSpec]) -> ArgumentValidator:
    """Return the validator for `tools` from a cache shared by all episodes with the same tools."""
    return _arguments_of(json.dumps([[t.name, t.description, dict(t.parameters)] for t in tools]))


@lru_cache(maxsize=64)
def _arguments_of(text: str) -> ArgumentValidator:
    tools = json.loads(text)
    return ArgumentValidator([ToolSpec(name=n, description=d, parameters=p) for n, d, p in tools])


def _validator(parameters: Any) -> Any:
    # Importing takes a fifth of a second, which runs without tools save.
    from jsonschema import (  # noqa: PLC0415
        Draft202012Validator,
        FormatChecker,
        SchemaError,
        validators,
    )
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry, Resource  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415

    if not isinstance(parameters, Mapping) or cast(Any, parameters).get("type") != "object":
        raise ValueError("must have type: object, with the arguments as its properties")
    schema = dict(cast(Mapping[str, Any], parameters))
    if not isinstance(schema.get("$schema", ""), str):
        raise ValueError("has a $schema that is not a string")
    kind: Any = validator_for(schema, default=Draft202012Validator)
    formats = FormatChecker(())
    formats.checkers = dict(kind.FORMAT_CHECKER.checkers)

    def compiles(pattern: Any) -> bool:  # with the engine that will match it
        return not isinstance(pattern, str) or bool(regex.compile(pattern))

    formats.checks("regex", raises=regex.error)(compiles)
    try:
        kind.check_schema(schema, format_checker=formats)
    except SchemaError as error:
        message = error.message[:_MAX_CHARACTERS]
        raise ValueError(f"is not a JSON schema: {message} (at {error.json_path})") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply; flatten it") from error
    resource = Resource[Any].from_contents(schema, default_specification=DRAFT202012)
    registry = Registry[Any]().with_resource("", resource).crawl()
    for reference in _references(schema):
        try:
            registry.resolver().lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"refers to {reference!r}, which is not in it") from error
    return cast(Any, validators).extend(kind, _KEYWORDS)(schema, registry=registry)


def _unique(_: Any, enabled: Any, items: Any, __: Any) -> Iterator[Any]:
    if enabled is True and isinstance(items, list):
        values = cast(list[Any], items)
        if len({_hashable(item) for item in values}) < len(values):
            yield _error(f"has an item that is there twice: {values}"[:_MAX_CHARACTERS])


def _hashable(value: Any) -> Any:
    """Convert a JSON value to a hashable key. Equal values such as 1 and 1.0 map to the same
    key."""
    if isinstance(value, dict):
        pairs = cast(dict[str, Any], value).items()
        return frozenset((key, _hashable(item)) for key, item in pairs)
    if isinstance(value, list):
        return tuple(map(_hashable, cast(list[Any], value)))
    return (bool, value) if isinstance(value, bool) else value


def _pattern(_: Any, pattern: str, text: Any, __: Any) -> Iterator[Any]:
    if isinstance(text, str) and not _matches(pattern, text):
        yield _error(f"{text[:_MAX_CHARACTERS]!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], value: Any, _: Any
) -> Iterator[Any]:
    if isinstance(value, dict):
        for pattern, schema in patterns.items():
            for key, item in cast(dict[str, Any], value).items():
                if _matches(pattern, key):
                    yield from validator.descend(item, schema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, value: Any, schema: Mapping[str, Any]
) -> Iterator[Any]:
    if not isinstance(value, dict):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, item in cast(dict[str, Any], value).items():
        if key in named or any(_matches(pattern, key) for pattern in patterns):
            continue
        if isinstance(allowed, Mapping):
            yield from validator.descend(item, allowed, path=key)
        elif allowed is False:
            yield _error(f"Additional properties are not allowed ({key!r} was unexpected)")


def _matches(pattern: str, text: str) -> bool:
    return regex.search(pattern, text, timeout=_MATCH_S) is not None


def _error(message: str) -> Exception:
    from jsonschema import ValidationError  # noqa: PLC0415

    return ValidationError(message)


_KEYWORDS = {
    "additionalProperties": _additional_properties,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "uniqueItems": _unique,
}
"""Replacements for keyword checks that a policy could make slow enough to delay all other
episodes."""


def _references(value: Any) -> Iterator[str]:
    items: Any = cast(Any, value).values() if isinstance(value, Mapping) else ()
    if isinstance(value, Mapping) and isinstance(reference := cast(Any, value).get("$ref"), str):
        yield reference
    for item in cast(Any, value) if isinstance(value, list) else items:
        yield from _references(item)
