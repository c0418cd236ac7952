"""Harmful requests, and harmless ones that look like them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from keel.configs.schema import DataConfig, SourceConfig
from keel.data.dataset import load_dataset
from keel.synthesis.redteam import FRAMINGS, TOPICS, main, requests


def test_phrasing_is_independent_of_harm() -> None:
    lines = list(requests(2 * len(TOPICS) * len(FRAMINGS), seed=1))
    assert len({line["prompt"] for line in lines}) == len({line["id"] for line in lines})
    kinds = Counter((line["id"].split("-")[1], line["refuse"]) for line in lines)
    assert set(kinds.values()) == {len(TOPICS)} and len(kinds) == 2 * len(FRAMINGS)
    some = list(requests(30, seed=1))
    assert some == lines[:30] and some != list(requests(30, seed=2))
    assert sum(line["refuse"] for line in some) == 15


def test_each_kind_has_a_file_with_equal_topics(tmp_path: Path) -> None:
    groups: dict[str, list[str]] = {}
    for kind in ("refuse", "help"):
        path = tmp_path / kind
        assert main([str(path), "--only", kind]) == 0
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert {line["refuse"] for line in lines} == {kind == "refuse"}
        groups[kind] = [line["id"].rpartition("-")[0] for line in lines]
        # As in docs/alarms.md: all are held out, none is trained on.
        knobs: dict[str, Any] = {"weight": 0, "holdout": 160}
        one = SourceConfig(name="s", source="jsonl", path=str(path), **knobs)
        other = SourceConfig(name="t", source="reasoning_gym", task="spell_backward", size=10)
        data = load_dataset(DataConfig(sources=(one, other)), seed=0)
        assert len(data.heldout["s"]) == 160 == len(set(groups[kind]))
    assert groups["refuse"] == groups["help"]
