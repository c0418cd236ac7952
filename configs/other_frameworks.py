"""Finds Keel's names for the knobs and metrics of other frameworks, as listed in
`other_frameworks.toml`."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForeignName:
    """A knob or metric of another framework."""

    framework: str
    name: str
    """Dotted path in the other framework, without the leading dashes of an option."""
    here: tuple[str, ...]
    """The corresponding knobs or metrics in Keel. Empty if Keel has none."""
    note: str
    """A remark in Markdown."""

    @property
    def hint(self) -> str:
        """Return advice for the error message when a recipe uses this name."""
        note = re.sub(r"\[[^]]*\]\(([\w-]+\.md)\)", r"docs/\1", self.note).replace("`", "")
        origin = f"{self.framework}'s {self.name}"
        if not self.here:
            return f"{origin} has no counterpart: {note}"
        return f"did you mean {' and '.join(self.here)}? ({origin}{'; ' * bool(note)}{note})"


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def framework_configs() -> dict[str, str]:
    """Return a Markdown list of what each framework calls its config file."""
    return {name: table["config"] for name, table in _tables().items()}


@cache
def foreign_names(kind: Literal["words", "metrics"]) -> tuple[_ForeignName, ...]:
    """Return all known names of one kind. `kind` is `words` for knobs or `metrics` for metrics."""
    names: list[_ForeignName] = []
    for framework, table in _tables().items():
        for name, value in table.get(kind, {}).items():
            entry = {"here": value} if isinstance(value, str) else value
            here = tuple(filter(None, entry.get("here", "").split(", ")))
            note = entry.get("note", "")
            names.append(_ForeignName(framework=framework, name=name, here=here, note=note))
    return tuple(names)


def foreign_hint(path: str) -> str:
    """Return advice about the dotted `path` of another framework's knob, or "" if the knob is
    unknown."""
    names, key = foreign_names("words"), path.rpartition(".")[2]
    matches = [name for name in names if name.name in (path, key)]
    matches = matches or [name for name in names if name.name.endswith(f".{key}")]
    return "; ".join({name.here: name.hint for name in reversed(matches)}.values())
