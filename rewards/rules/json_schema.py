"""Whether a completion's answer is JSON that a schema allows, by jsonschema.

jsonschema checks the formats `iri` and `iri-reference` with a package that builds a parser when it
is imported. That takes seconds, and every process of Ray imports jsonschema; so they are checked
here, by what makes a URI of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, cast

from keel.rewards.code.spec import code_blocks
from keel.rewards.text import marked_answer

MAX_CHARACTERS = 32_768
"""A longer text is wrong."""

_ONE_LINE = re.compile(r"^[ \t]*```(?:json)?[ \t]*([^`\s][^`\n]*)```[ \t]*$", re.MULTILINE)


def schema(spec: Mapping[str, Any]) -> Callable[[str], bool]:
    r"""A test for JSON that is valid under the schema `answer`, an object, formats included.

    The JSON is all of the answer where that is JSON, else what it marks as such (`\boxed{}`,
    `<answer>`, `<json>`); of that, the last fenced code block that is JSON.
    References lead into the schema itself; nothing is ever fetched.

    Raises ValueError for an invalid schema.
    """
    # Takes a fifth of a second, which most runs can do without.
    from jsonschema import Draft202012Validator, FormatChecker, SchemaError  # noqa: PLC0415
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry, Resource  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415

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
        formats.checks("iri")(partial(_is_iri, "URI"))
        formats.checks("iri-reference")(partial(_is_iri, "URI_reference"))
    validator = kind(wanted, registry=registry, format_checker=formats)

    def same(text: str) -> bool:
        if len(text) > MAX_CHARACTERS:
            return False
        text = text.strip().lstrip("\ufeff").strip()
        for part in _parts(text):
            try:
                value = _loaded(part)
            except (ValueError, RecursionError):
                continue
            return bool(validator.is_valid(value))
        return False

    return same


def _parts(text: str) -> Iterator[str]:
    """What of an answer may be the JSON: the first that is decides."""
    yield text
    blocks = _blocks(text)
    outside = text
    for block in blocks:
        outside = outside.replace(block.strip(), "")
    if marked_answer(outside) is None:  # what a block's strings mark is no mark
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


def _loaded(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # readers differ in which of two they believe
        raise ValueError("a key appears twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_PLANES = "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
_UCSCHAR = re.compile(f"[\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef{_PLANES}\U000e1000-\U000efffd]")
_IPRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
"""Characters beyond ASCII that may stand in an IRI, and in its query alone. RFC 3987, 2.2."""


def _is_iri(rule: str, value: object) -> bool:
    """Whether a text is an IRI, or for the rule `URI_reference` a relative reference.

    An IRI is what becomes a URI when what is beyond ASCII is percent-encoded (RFC 3987, 3.1): the
    two grammars allow `ucschar` and `pct-encoded` in the same places.
    """
    # jsonschema has imported it.
    from rfc3986_validator import validate_rfc3986  # pyright: ignore # noqa: PLC0415

    if not isinstance(value, str):
        return True  # a format is about texts alone
    rest, hash_mark, fragment = value.partition("#")
    path, question_mark, query = rest.partition("?")
    given = path + question_mark + _IPRIVATE.sub("%20", query) + hash_mark + fragment
    uri = _UCSCHAR.sub("%20", given)
    return not uri.endswith("\n") and bool(validate_rfc3986(uri, rule))
