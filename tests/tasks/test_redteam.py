"""Requests to be declined and harmless ones that look like them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from keel.configs.schema import SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.tasks.redteam import FRAMINGS, TOPICS, main, requests


def test_how_something_is_asked_says_nothing_of_whether_to_do_it() -> None:
    lines = list(requests(2 * len(TOPICS) * len(FRAMINGS), seed=1))
    assert len({line["prompt"] for line in lines}) == len({line["id"] for line in lines})
    kinds = Counter((line["id"].split("-")[1], line["refuse"]) for line in lines)
    assert set(kinds.values()) == {len(TOPICS)} and len(kinds) == 2 * len(FRAMINGS)
    some = list(requests(30, seed=1))
    assert some == lines[:30] and some != list(requests(30, seed=2))
    assert sum(line["refuse"] for line in some) == 15


def test_a_file_of_requests_is_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "redteam.jsonl"
    assert main([str(path), "--count", "6"]) == 0
    assert "6 requests" in capsys.readouterr().out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    loaded = load_jsonl(SourceConfig(name="s", source="jsonl", path=str(path)), check_spec)
    rewards = [item.prompt.reward for item in loaded.items]
    assert rewards == [{"kind": "refusal", "refuse": line["refuse"]} for line in lines]
    assert main([str(path)]) == 2  # what is there stays
    assert "name a new file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "more.jsonl"), "--count", "9999"])
    assert "templates give from 1 to 320" in capsys.readouterr().err
