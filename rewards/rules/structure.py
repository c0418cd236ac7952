"""Whether an answer has the structure that was asked for: a JSON schema, a pattern."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

from keel.rewards.code.spec import code_block
from keel.rewards.text import answer_in

MAX_CHARACTERS = 32_768
"""Longer answers are wrong."""


def pattern(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    """A test for whether the whole answer matches the regular expression `answer` (Python's `re`).

    A pattern may take exponential time on some text. The deadline of `keel.rewards.workers.worker`
    ends that. Raises ValueError for a pattern that does not compile.
    """
    try:
        compiled = re.compile(str(spec["answer"]))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"answer {spec['answer']!r} is no regular expression: {error}") from error

    def same(text: str) -> bool:
        return len(text) <= MAX_CHARACTERS and compiled.fullmatch(answer_in(text)) is not None

    return same


def schema(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    """A test for JSON that is valid under the schema `answer`, an object, formats included.

    The JSON is what the answer marks as such, else all of it; of that, the last fenced code block
    where there is one.
    References lead into the schema itself; nothing is ever fetched.

    Raises ValueError for an invalid schema.
    """
    # Takes a fifth of a second, which most runs can do without.
    from jsonschema import Draft202012Validator, FormatChecker, SchemaError  # noqa: PLC0415
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry, Resource  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415

    from keel.rewards.rules.iri import is_iri, is_iri_reference  # noqa: PLC0415

    wanted = spec.get("answer")
    if not isinstance(wanted, dict):
        raise ValueError("answer must be a JSON schema, an object")
    wanted = cast(dict[str, Any], wanted)
    if not isinstance(wanted.get("$schema", ""), str):
        raise ValueError(f"answer: its $schema is {wanted['$schema']!r}, must be text")
    kind: Any = validator_for(wanted, default=Draft202012Validator)
    try:
        kind.check_schema(wanted)
    except SchemaError as error:
        raise ValueError(
            f"answer is no valid JSON schema: {error.message[:200]} (at {error.json_path})"
        ) from error
    resource = Resource[Any].from_contents(wanted, default_specification=DRAFT202012)
    registry = Registry[Any]().with_resource("", resource).crawl()
    for reference in _references(wanted):
        try:
            registry.resolver().lookup(reference)
        except Unresolvable as error:
            raise ValueError(
                f"answer: the schema has no {reference!r} in itself, and nothing is fetched"
            ) from error
    formats = FormatChecker(())
    formats.checkers = dict(kind.FORMAT_CHECKER.checkers)
    if "idn-hostname" in formats.checkers:  # since draft 7, as these
        formats.checks("iri")(is_iri)
        formats.checks("iri-reference")(is_iri_reference)
    validator = kind(wanted, registry=registry, format_checker=formats)

    def same(text: str) -> bool:
        if len(text) > MAX_CHARACTERS:
            return False
        given = answer_in(text)
        given = code_block(given) or given
        try:
            return bool(validator.is_valid(json.loads(given, parse_constant=_refuse)))
        except (ValueError, RecursionError):
            return False

    return same


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        items = cast(dict[str, Any], value)
        if isinstance(items.get("$ref"), str):
            yield items["$ref"]
        value = list(items.values())
    if isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _references(item)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
