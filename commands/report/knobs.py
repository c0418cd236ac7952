"""Read the knobs of runs and evaluations as text in one notation, so that they can be compared."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

import yaml

from keel.commands.report.files import UNREADABLE, brief, loads
from keel.configs.dump import dump_config
from keel.configs.load import parse_yaml
from keel.configs.schema import Config, ConversationsConfig, DataConfig, SftConfig, SourceConfig

ENTRY = re.compile(r"\[[^\]]*\]")
"""Matches the name of a list entry within a knob, such as `[spiral]` in
`data.sources[spiral].size`."""
NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
"""Errors that `ast.literal_eval` raises for a text that is not a literal."""


def knobs_of(path: Path, notes: list[str]) -> dict[str, str]:
    """Read a config.yaml from any release and return the JSON value of each knob. If it cannot be
    read, a note says so."""
    try:
        return dict(knobs_in(path.read_text(encoding="utf-8")))
    except (*UNREADABLE, yaml.YAMLError) as error:
        notes.append(f"{path}: no knobs can be read there ({brief(error)})")
    return {}


@lru_cache(maxsize=64)  # a tenth of a second, and the config of a run that is followed stays
def knobs_in(text: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    parse_yaml(text)  # aliases that stand for millions of values would all be written out
    flatten(yaml.safe_load(text), "", flat)
    return flat


def chosen_in(folder: Path) -> Mapping[str, Any]:
    """Return the knobs whose values Keel chose for the hardware, from the run's chosen.json."""
    try:
        return dict(loads((folder / "chosen.json").read_bytes())["values"])
    except UNREADABLE:
        return {}


def changed(knobs: Mapping[str, str], chosen: Collection[str] = ()) -> list[str]:
    """Return the names of the knobs that differ from their defaults, except those in `chosen` and
    the names of sources."""
    return [
        name
        for name, value in knobs.items()
        if name not in chosen
        and not name.endswith("].name")
        and defaults().get(ENTRY.sub("[]", name)) != value
    ]


@cache
def defaults() -> Mapping[str, str]:
    """Return the default of each knob as text. List entries are written `data.sources[]`."""
    source = SourceConfig(name="a", source="jsonl", path="a")
    lesson = ConversationsConfig(name="a", source="jsonl", path="a")
    config = Config(data=DataConfig(sources=(source,)), sft=SftConfig(sources=(lesson,)))
    flat: dict[str, str] = {}
    flatten(yaml.safe_load(dump_config(config)), "", flat)
    required = {"path": '""', "source": ""}  # a source's kind is never a default
    empty = {f"{place}.sources": "[]" for place in ("data", "sft")}
    named = {f"{place}.sources[].{k}": v for place in ("data", "sft") for k, v in required.items()}
    return {**{ENTRY.sub("[]", name): value for name, value in flat.items()}, **empty, **named}


def flatten(value: Any, path: str, flat: dict[str, str]) -> None:
    """Fill `flat` with the value for each dotted path. List entries are named as in
    `keel.configs.diff`."""
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
    """Read the settings.json of an evaluation, which holds the `repr` of each knob."""
    try:
        settings: Mapping[str, Any] = loads(path.read_bytes())
        return {str(name): as_knob(str(value)) for name, value in settings.items()}
    except UNREADABLE as error:
        notes.append(f"{path}: cannot be read ({brief(error)})")
    return {}


def as_knob(text: str) -> str:
    """Convert the `repr` of a value to JSON. Any other text is returned unchanged."""
    try:
        return written(ast.literal_eval(text))
    except NO_LITERAL:
        return text
