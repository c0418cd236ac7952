"""Parse JSON and compile JSON schemas from untrusted text. Nesting is limited, and only values that
can be serialised to JSON again are accepted."""

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from math import isfinite
from typing import Any, NoReturn, cast

_MAX_DEPTH = 100
_MAX_DIGITS = 4300  # Maximum number of digits in an integer. This is CPython's default.
_LONG_DIGITS = 50_000
"""Maximum number of digits in an integer from a data set or from the result of a program. Parsing
such an integer takes about 50 ms, and the time grows quadratically."""


def allow_long_integers() -> None:
    """Raise Python's limit on the number of digits in an integer from 4,300 to `_LONG_DIGITS` for
    this process."""
    sys.set_int_max_str_digits(_LONG_DIGITS)


def load(text: str | bytes, *, max_depth: int = _MAX_DEPTH) -> Any:
    """Parse JSON from untrusted text. Raises ValueError for malformed or deeply nested text, NaN,
    numbers that overflow a float, and integers with more than `_MAX_DIGITS` digits."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_short)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [value]
    for _ in range(max_depth):
        level = [item for value in level for item in _children(value)]
        if not level:
            return value
    raise ValueError(f"nested too deeply: more than {max_depth} levels")


def replace_surrogates(value: Any) -> Any:
    """Replace unpaired surrogates, which JSON allows but UTF-8 and tokenizers reject."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def compile_schema(
    schema: Mapping[str, Any], *, keywords: Mapping[str, Any] = {}, formats: bool = False
) -> Any:
    """Compile a JSON schema to a validator of jsonschema. `keywords` replaces the checks of some
    keywords, and `formats` turns on the check of formats. Raises ValueError if the schema is
    invalid or refers to another document, which is never downloaded."""
    # Importing takes a fifth of a second, which most processes save.
    from jsonschema import Draft202012Validator, SchemaError, validators  # noqa: PLC0415
    from referencing import Registry, Resource  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415

    if not isinstance(schema.get("$schema", ""), str):
        raise ValueError(f"has $schema = {schema['$schema']!r}, which must be text")
    kind: Any = validators.validator_for(schema, default=Draft202012Validator)
    checker = kind.FORMAT_CHECKER if formats else None
    try:
        kind.check_schema(schema, format_checker=checker)
    except SchemaError as error:
        raise ValueError(
            f"is not a JSON schema: {error.message[:300]} (at {error.json_path})"
        ) from error
    resource = Resource[Any].from_contents(schema, default_specification=DRAFT202012)
    registry = Registry[Any]().with_resource("", resource).crawl()
    for reference in _references(schema):
        try:
            registry.resolver().lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"refers to {reference!r}, which is not in it") from error
    kind = cast(Any, validators).extend(kind, keywords)
    return kind(schema, registry=registry, format_checker=checker)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        reference = cast(dict[str, Any], value).get("$ref")
        if isinstance(reference, str):
            yield reference
    for item in _children(value):
        yield from _references(item)


def _children(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return cast(dict[str, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _short(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits: the limit is {_MAX_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large for a float")
    return number
