"""Tools' JSON schemas: sound before anything runs, and what a call's arguments lack.

`keel.rewards.rules.json_schema` checks answers in nearly the same way. The one package that both
may import is `keel.rl`, which is to need torch and numpy alone, so each has its own dozen lines.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import regex

from keel.rl.turns import ToolCall, ToolSpec

MOST_SAID = 300
"""Characters of one complaint: it quotes what the policy wrote."""
MOST_COMPLAINTS = 3
MATCHING_S = 0.1
"""For one pattern and one text."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Arguments:
    """Says what is wrong with calls of a set of tools. Nothing is fetched for a schema."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        """Raises ValueError for tools that could not be called."""
        # Takes a fifth of a second, which runs without tools can do without.
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

        self._validators: dict[str, Any] = {}
        for tool in tools:
            schema: Any = tool.parameters
            if not _NAME.fullmatch(tool.name):
                raise ValueError(
                    f"tool {tool.name!r}: a name is 1 to 64 letters, digits, '_', '-' and '.'"
                )
            if tool.name in self._validators:
                raise ValueError(f"tool {tool.name}: there are two of that name")
            if not isinstance(schema, Mapping) or cast(Any, schema).get("type") != "object":
                raise ValueError(
                    f"tool {tool.name}: its schema must be one of an object (type: object), whose "
                    "properties are the arguments"
                )
            schema = dict(cast(Mapping[str, Any], schema))
            if not isinstance(dialect := schema.get("$schema", ""), str):
                raise ValueError(
                    f"tool {tool.name}: $schema of its schema is {dialect!r:.50}, must be a string"
                )
            kind: Any = validator_for(schema, default=Draft202012Validator)
            formats = FormatChecker(())
            formats.checkers = dict(kind.FORMAT_CHECKER.checkers)
            formats.checks("regex", raises=regex.error)(_compiles)
            try:
                kind.check_schema(schema, format_checker=formats)
            except SchemaError as error:
                raise ValueError(
                    f"tool {tool.name}: its schema is no JSON schema: {error.message[:MOST_SAID]} "
                    f"(at {error.json_path})"
                ) from error
            except RecursionError as error:
                raise ValueError(
                    f"tool {tool.name}: its schema is nested too deeply; flatten it"
                ) from error
            resource = Resource[Any].from_contents(schema, default_specification=DRAFT202012)
            registry = Registry[Any]().with_resource("", resource).crawl()
            for reference in _references(schema):
                try:
                    registry.resolver().lookup(reference)
                except Unresolvable as error:
                    raise ValueError(
                        f"tool {tool.name}: its schema has no {reference!r} in itself, and nothing "
                        "is fetched"
                    ) from error
            self._validators[tool.name] = cast(Any, validators).extend(kind, KEYWORDS)(
                schema, registry=registry
            )

    def complaint(self, call: ToolCall) -> str:
        """What is wrong with `call`, for the policy to mend; "" if nothing is."""
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
            found: Iterator[Any] = validator.iter_errors(dict(cast(Mapping[str, Any], arguments)))
            errors = list(islice(found, MOST_COMPLAINTS))
        except RecursionError:
            return f"{call.name}: its arguments are nested too deeply"
        except TimeoutError:
            return f"{call.name}: a text in its arguments takes too long to match with its pattern"
        except ArithmeticError:  # a whole number that no float holds, of which `multipleOf` asks
            return f"{call.name}: a number in its arguments is too large"
        said = [
            f"{error.message[:MOST_SAID]}" + (f" (at {error.json_path})" if error.path else "")
            for error in errors
        ]
        return f"{call.name}: {'; '.join(said)}" if said else ""


def arguments_of(tools: Sequence[ToolSpec]) -> Arguments:
    """As `Arguments(tools)`; episodes with the same tools share one."""
    return _arguments_of(json.dumps([[t.name, t.description, dict(t.parameters)] for t in tools]))


@lru_cache(maxsize=64)
def _arguments_of(text: str) -> Arguments:
    return Arguments(
        [ToolSpec(name=n, description=d, parameters=p) for n, d, p in json.loads(text)]
    )


def _unique(_: Any, wanted: Any, items: Any, __: Any) -> Iterator[Any]:
    """`uniqueItems`, in a time that grows with what there is and not with its square."""
    if wanted is True and isinstance(items, list):
        known = cast(list[Any], items)
        if len({_hashable(item) for item in known}) < len(known):
            yield _error(f"has an item that is there twice: {known}"[:MOST_SAID])


def _hashable(value: Any) -> Any:
    """Equal where JSON schemas take two values for equal: 1 and 1.0, and not 1 and true."""
    if isinstance(value, dict):
        pairs = cast(dict[str, Any], value).items()
        return frozenset((key, _hashable(item)) for key, item in pairs)
    if isinstance(value, list):
        return tuple(map(_hashable, cast(list[Any], value)))
    return (bool, value) if isinstance(value, bool) else value


def _pattern(_: Any, pattern: str, text: Any, __: Any) -> Iterator[Any]:
    if isinstance(text, str) and not _matches(pattern, text):
        yield _error(f"{text[:MOST_SAID]!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], given: Any, _: Any
) -> Iterator[Any]:
    if isinstance(given, dict):
        for pattern, schema in patterns.items():
            for key, value in cast(dict[str, Any], given).items():
                if _matches(pattern, key):
                    yield from validator.descend(value, schema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, wanted: Any, given: Any, schema: Mapping[str, Any]
) -> Iterator[Any]:
    if not isinstance(given, dict):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, value in cast(dict[str, Any], given).items():
        if key in named or any(_matches(pattern, key) for pattern in patterns):
            continue
        if isinstance(wanted, Mapping):
            yield from validator.descend(value, wanted, path=key)
        elif wanted is False:
            yield _error(f"Additional properties are not allowed ({key!r} was unexpected)")


def _compiles(pattern: Any) -> bool:
    """By the engine that matches it. Raises regex.error."""
    return not isinstance(pattern, str) or bool(regex.compile(pattern))


def _matches(pattern: str, text: str) -> bool:
    """Raises TimeoutError. (`re` would go on, and hold up all episodes.)"""
    return regex.search(pattern, text, timeout=MATCHING_S) is not None


def _error(message: str) -> Exception:
    from jsonschema import ValidationError  # noqa: PLC0415

    return ValidationError(message)


KEYWORDS = {
    "additionalProperties": _additional_properties,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "uniqueItems": _unique,
}
"""What the policy writes is checked between the turns of all episodes: these of jsonschema's own
take a time that it decides. (`unevaluatedProperties` beside `patternProperties` still does.)"""


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value)
        if isinstance(items.get("$ref"), str):
            yield items["$ref"]
        value = list(items.values())
    if isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _references(item)
