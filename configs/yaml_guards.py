"""What a recipe's YAML would do to its reader: aliases that stand for millions of values, numbers
and marks that are not what they look like, and texts that call functions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any, cast

import yaml

_RESOLVER = re.compile(r"(?<!\\)\$\{\s*[\w.]+\s*:")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
MOST_VALUES = 100_000
"""In a recipe; aliases count as what they stand for."""
MOST_DIGITS = 100
OPENING, CLOSING = "\u201c\u201e\u2018\u00ab", "\u201d\u201c\u2019\u00bb"
"""Typographic quotes."""


def tree_of(text: str) -> yaml.Node | None:
    """Raises yaml.YAMLError, and for too many values."""
    root = cast(yaml.Node | None, yaml.compose(text, Loader=yaml.SafeLoader))  # pyright: ignore
    if _size(root, {}) >= MOST_VALUES:
        raise yaml.YAMLError(f"its aliases stand for {MOST_VALUES} values or more")
    return root


def lookalike(error: yaml.YAMLError, text: str) -> str:
    """A character at the place of the error that is not the one it looks like, and what YAML wants
    instead; "" where there is none."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return ""
    lines = text.splitlines()
    for number in (mark.line, mark.line - 1):  # a key without a colon is noticed a line later
        for character in lines[number] if 0 <= number < len(lines) else "":
            plain = unicodedata.normalize("NFKC", character)
            if character == "\t":
                said, plain = "a tab", "spaces"
            elif plain == character or not (plain == " " or plain in ":,-#[]{}'\"|>&*!%@"):
                continue
            else:
                name = unicodedata.name(character, "a character").lower().replace("-", " ")
                said, plain = f"{character!r} ({name})", "a space" if plain == " " else plain
            return f"; line {number + 1} has {said}, write {plain}"
    return ""


def misread(node: yaml.Node) -> str:
    """What is wrong with a number as YAML reads it, or with a text that only looks quoted; "" for
    anything else."""
    kind, text = str(node.tag).rpartition(":")[2], node.value
    bare = kind == "str" and isinstance(node, yaml.ScalarNode) and not node.style
    if bare and len(text) > 1 and text[0] in OPENING and text[-1] in CLOSING:
        return "YAML takes typographic quotes for part of the text; write plain ones"
    if kind not in ("int", "float") or not isinstance(text, str):
        return ""
    if ":" in text:
        return "YAML reads it as a number to base 60; write the number, or put it in quotes"
    if kind == "int" and _OCTAL.fullmatch(text):
        return "YAML reads it as a number to base 8; leave out the zeros, or put it in quotes"
    return "has too many digits" if len(text) > MOST_DIGITS else ""


def cut_off(node: yaml.Node, text: str) -> str:
    """What is wrong with an override whose value ends before its text does: YAML takes the rest for
    a comment."""
    rest = text[node.end_mark.index :].strip()
    return f"YAML takes {rest!r} for a comment; put the value in quotes" if rest[:1] == "#" else ""


def _size(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Values below `node` where every alias is written out."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = 1  # of itself: whoever walks it will find no end
    below: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        below = [value for _, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        below = list(node.value)
    known[id(node)] = min(MOST_VALUES, 1 + sum(_size(one, known) for one in below))
    return known[id(node)]


def calls(value: Any, key: str = "") -> str | None:
    """The key of a text in it with one of OmegaConf's resolvers, such as `${oc.env:HOME}`."""
    below: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        below = cast(dict[Any, Any], value).items()
    elif isinstance(value, list):
        below = enumerate(cast(list[Any], value))
    elif isinstance(value, str):
        return key if _RESOLVER.search(value) else None
    found = (calls(inner, f"{key}.{name}".lstrip(".")) for name, inner in below)
    return next((one for one in found if one is not None), None)
