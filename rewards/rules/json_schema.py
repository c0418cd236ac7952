"""Checks that the answer of a completion is JSON that is valid under a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from keel.rewards.code.spec import code_blocks
from keel.rewards.text import marked_answer

_MAX_CHARACTERS = 32_768
"""The maximum length of a text in characters. Longer texts count as wrong."""
_ONE_LINE = re.compile(r"^[ \t]*```(?:json)?[ \t]*([^`\s][^`\n]*)```[ \t]*$", re.MULTILINE)


def schema(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    r"""Build a verifier that checks whether an answer is valid under the JSON schema in
    `spec["answer"]`.

    The whole answer is checked if it is JSON, else the marked text (`\boxed{}`, `<answer>`,
    `<json>`) or the last fenced code block that is. Formats are checked too, except for IRIs.
    Nothing is downloaded. Raises ValueError if the schema is invalid.
    """
    # Imported late: this takes a fifth of a second.
    from jsonschema import Draft202012Validator, SchemaError  # noqa: PLC0415
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry, Resource  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415

    expected = spec.get("answer")
    if not isinstance(expected, dict):
        raise ValueError("answer must be a JSON schema, an object")
    expected = cast(dict[str, Any], expected)
    if not isinstance(expected.get("$schema", ""), str):
        raise ValueError(f"answer: $schema = {expected['$schema']!r} must be text")
    kind: Any = validator_for(expected, default=Draft202012Validator)
    try:
        kind.check_schema(expected)
    except SchemaError as error:
        raise ValueError(
            f"answer is not a valid JSON schema: {error.message[:200]} (at {error.json_path})"
        ) from error
    resource = Resource[Any].from_contents(expected, default_specification=DRAFT202012)
    registry = Registry[Any]().with_resource("", resource).crawl()
    for reference in _references(expected):
        try:
            registry.resolver().lookup(reference)
        except Unresolvable as error:
            raise ValueError(
                f"answer: the schema does not contain {reference!r}, and nothing is fetched"
            ) from error
    validator = kind(expected, registry=registry, format_checker=kind.FORMAT_CHECKER)

    def same(text: str) -> bool:
        if len(text) > _MAX_CHARACTERS:
            return False
        for part in _parts(text.strip().lstrip("\ufeff").strip()):
            try:
                value = json.loads(part, parse_constant=_once, object_pairs_hook=_once)
            except (ValueError, RecursionError):
                continue
            return bool(validator.is_valid(value))
        return False

    return same


def _parts(text: str) -> Iterator[str]:
    yield text
    blocks = _blocks(text)
    outside = text
    for block in blocks:
        outside = outside.replace(block.strip(), "")
    if marked_answer(outside) is None:  # a mark inside a block's strings does not count
        _, opening, inside = text.rpartition("</json>")[0].rpartition("<json>")
        yield from [inside] if opening else reversed(blocks)
        return
    if text.startswith("<answer>") and text.endswith("</answer>"):
        yield text.removeprefix("<answer>").removesuffix("</answer>")
    marked = marked_answer(text) or ""
    yield marked
    yield from reversed(_blocks(marked))


def _blocks(text: str) -> list[str]:
    return code_blocks(text) or [match[1] for match in _ONE_LINE.finditer(text)]


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        items = cast(dict[str, Any], value)
        if isinstance(items.get("$ref"), str):
            yield items["$ref"]
        value = list(items.values())
    if isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _references(item)


def _once(pairs: list[tuple[str, Any]] | str) -> dict[str, Any]:
    if isinstance(pairs, str) or len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears twice or there is a NaN, which parsers read differently")
    return dict(pairs)
