"""Written safety sets are valid prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.configs.schema import SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.synthesis.redteam import main


@pytest.mark.parametrize(
    ("only", "kind"), [("refuse", "refusal"), ("help", "refusal"), ("inject", "rubric")]
)
def test_every_request_is_a_prompt_with_a_reward(only: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    assert main(["--only", only, str(path)]) == 0
    source = SourceConfig(name="set", source="jsonl", path=str(path))
    items = load_jsonl(source, check_spec).items
    assert len(items) > 150 and {item.prompt.reward["kind"] for item in items} == {kind}
    assert len({str(item.prompt.messages) for item in items}) == len(items)
    if kind == "refusal":
        turns = [[message["role"] for message in item.prompt.messages] for item in items]
        assert ["user", "assistant", "user"] in turns and ["user"] in turns
        assert all(item.prompt.reward["refuse"] is (only == "refuse") for item in items)
    else:
        assert all("<document>" in item.prompt.messages[-1]["content"] for item in items)
