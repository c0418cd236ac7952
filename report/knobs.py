"""Knobs of runs and evaluations as text, written alike, so that they can be compared."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml

from keel.configs.hostile import tree_of
from keel.report.files import UNREADABLE, brief, loads

NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
"""What Python ends in where a text is no value of its own."""


def knobs_of(path: Path, notes: list[str]) -> dict[str, str]:
    """As written, whatever release wrote it: names and values alone are compared."""
    try:
        return dict(knobs_in(path.read_text(encoding="utf-8")))
    except (*UNREADABLE, yaml.YAMLError) as error:
        notes.append(f"{path}: no knobs can be read there ({brief(error)})")
    return {}


@lru_cache(maxsize=64)  # a tenth of a second, and the config of a run that is followed stays
def knobs_in(text: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    tree_of(text)  # aliases that stand for millions of values would all be written out
    flatten(yaml.safe_load(text), "", flat)
    return flat


def flatten(value: Any, path: str, flat: dict[str, str]) -> None:
    """`a.b` → value; sources by name, as in `keel.configs.diff`."""
    if isinstance(value, dict) and value:
        for key, item in cast(dict[Any, Any], value).items():
            flatten(item, f"{path}.{key}".lstrip("."), flat)
    elif isinstance(value, list) and value and all(map(named, cast(list[Any], value))):
        for one in cast(list[dict[str, Any]], value):
            flatten(one, f"{path}[{one['name']}]", flat)
    else:
        flat[path] = written(value)


def named(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value


def written(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def settings_of(path: Path, notes: list[str]) -> dict[str, str]:
    """Of an evaluation, which writes down its knobs by their `repr`."""
    try:
        settings: Mapping[str, Any] = loads(path.read_bytes())
        return {str(name): as_knob(str(value)) for name, value in settings.items()}
    except UNREADABLE as error:
        notes.append(f"{path}: cannot be read ({brief(error)})")
    return {}


def as_knob(text: str) -> str:
    """A value's `repr` as `config.yaml` has the value; other text as it is."""
    try:
        return written(ast.literal_eval(text))
    except NO_LITERAL:
        return text
