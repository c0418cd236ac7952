"""Open questions: kept where search measurably helps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.synthesis.ledger import Rejected
from tests.synthesis.search.agents import EVIDENCE, Agents, World, world_of
from tests.waiting import PATIENCE_S

REQUEST = "Explain to a visitor how the bridge, its designer and the society are connected."
CRITERIA = [
    {"name": "chain", "text": "Says that the designer's notebooks are there.", "weight": 3},
    {"name": "founder", "text": "Names the founder.", "weight": 2},
    {"name": "brief", "text": "Has at most two paragraphs.", "weight": 1},
]
SUBMITTED = {"request": REQUEST, "evidence": list(EVIDENCE), "criteria": CRITERIA}


def made(folder: Path, *, by_memory: str = "missed", **changes: Any) -> World:
    agents = Agents(
        submits=[{**SUBMITTED, **changes}],
        answers=["With tools.", "From memory."],
        judged={"With tools.": "met", "From memory.": by_memory},
    )
    world = world_of(folder, agents, helpful=1.0)

    async def make() -> None:
        async with world.pipeline as pipeline:
            await pipeline.make(pipeline.keys[0])

    asyncio.run(asyncio.wait_for(make(), PATIENCE_S))
    return world


def test_request_with_rubric(tmp_path: Path) -> None:
    (line,) = made(tmp_path).lines
    assert line["provenance"]["scores"] == {"with_tools": 1.0, "without": 0.0}
    path = tmp_path / "out" / "tasks.jsonl"
    source = SourceConfig(name="s", source="jsonl", path=str(path))
    environment = EnvironmentConfig(target="keel.agents.environments.search.environment:Search")
    (item,) = load_jsonl(replace(source, environment=environment), check_spec).items
    assert item.prompt.reward["kind"] == "rubric"
    assert "Tobias Wrenfield founded it." in item.prompt.reward["reference"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"by_memory": "met"}, "gain: search does not help: 1.00 with tools and 1.00 without"),
        ({"evidence": [EVIDENCE[0]]}, "breadth: 1 facts are joined"),
        ({"criteria": [CRITERIA[0]] * 3}, "criteria: .*several criteria have the name"),
    ],
)
def test_gates_refuse_requests(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(Rejected, match=why.partition(":")[0]):
        made(tmp_path, **changes)


def test_prompts_that_search_helps_to_answer_are_selected(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    criteria = [{"name": "good", "text": "It is right.", "weight": 1.0}]
    texts = ("Needs search.", "Needs none.")
    lines = [json.dumps({"prompt": text, "criteria": criteria}) for text in texts]
    prompts.write_text("\n".join(lines))
    agents = Agents(
        answers=["With tools.", "From memory.", "Also good.", "Also good."],
        judged={"With tools.": "met", "From memory.": "missed", "Also good.": "met"},
    )
    world = world_of(tmp_path, agents, count=0, prompts=str(prompts))

    async def make() -> None:
        async with world.pipeline as pipeline:
            helped, other = pipeline.keys
            await pipeline.make(helped)
            with pytest.raises(Rejected, match="gain"):
                await pipeline.make(other)

    asyncio.run(asyncio.wait_for(make(), PATIENCE_S))
    (line,) = world.lines
    assert (line["prompt"], line["criteria"]) == (texts[0], criteria)
    assert line["provenance"]["scores"] == {"with_tools": 1.0, "without": 0.0}
