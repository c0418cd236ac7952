"""What knobs and metrics of other frameworks are called here: the answer to their word in a recipe
or to `keel knobs`, and docs/coming-from.md."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLES = Path(__file__).with_name("words.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One name of another framework."""

    framework: str
    name: str
    """Dotted, without the dashes of an option."""
    here: tuple[str, ...]
    """Our knobs (or metrics), as `keel knobs` has them; none where there is no counterpart."""
    note: str
    """Markdown."""

    def said(self) -> str:
        """As part of a message about a recipe that has the word."""
        plain = re.sub(r"\[[^]]*\]\(([\w-]+\.md)\)", r"docs/\1", self.note).replace("`", "")
        theirs = f"{self.framework}'s {self.name}"
        if not self.here:
            return f"{theirs} has no counterpart: {plain}"
        more = f"; {plain}" if plain else ""
        return f"did you mean {' and '.join(self.here)}? ({theirs}{more})"


@cache
def frameworks() -> Mapping[str, str]:
    """Name → its config, in Markdown."""
    return {name: table["config"] for name, table in _tables().items()}


@cache
def words() -> tuple[Word, ...]:
    return _of("words")


@cache
def measures() -> tuple[Word, ...]:
    """Metrics, of which `here` has ours."""
    return _of("metrics")


def _of(kind: str) -> tuple[Word, ...]:
    found: list[Word] = []
    for framework, table in _tables().items():
        for name, value in table.get(kind, {}).items():
            entry = {"here": value} if isinstance(value, str) else value
            here = tuple(filter(None, entry.get("here", "").split(", ")))
            note = entry.get("note", "")
            found.append(Word(framework=framework, name=name, here=here, note=note))
    return tuple(found)


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(TABLES.read_text(encoding="utf-8"))


def meant(path: str) -> tuple[Word, ...]:
    """The words that are written like the dotted `path` of a recipe, or, of those with no dot,
    like its end: TRL has no sections."""
    key = path.rpartition(".")[2]
    return tuple(word for word in words() if word.name in (path, key))


def ending(key: str) -> tuple[Word, ...]:
    """The words that end so: the section is one that we have not."""
    return tuple(word for word in words() if word.name.endswith(f".{key}"))


def inside(path: str) -> bool:
    """Whether it is a section of another framework's recipes."""
    return any(word.name.startswith(f"{path}.") for word in words())
