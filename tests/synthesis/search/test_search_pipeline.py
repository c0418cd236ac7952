"""The search pipeline end to end, and a cheat for each gate."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.agents.environments.search.environment import Search
from keel.agents.environments.search.index import SearchIndex, ensure_index
from keel.configs.schema import EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.rewards.rules.verifiers import verifier_for
from keel.synthesis.ledger import Rejected
from keel.synthesis.search.question import accepts, normalize_answer, rule_of
from tests.agents.environments.search.corpus import write_corpus
from tests.synthesis.search.agents import (
    EVIDENCE,
    QUESTION,
    Agents,
    World,
    material,
    submitted,
    world_of,
)
from tests.waiting import PATIENCE_S


def made(world: World, *numbers: int) -> World:
    async def make() -> None:
        async with world.pipeline as pipeline:
            for number in numbers or range(len(pipeline.keys)):
                await pipeline.make(pipeline.keys[number])

    asyncio.run(asyncio.wait_for(make(), PATIENCE_S))
    return world


def test_synthesized_task_is_trainable(tmp_path: Path) -> None:
    world = made(world_of(tmp_path))
    (line,) = world.lines
    assert line["prompt"] == QUESTION and line["environment"]["evidence"] == [
        "bridge.md",
        "people.jsonl#dancu",
        "society.html",
    ]
    provenance = line["provenance"]
    assert provenance["wrong_answers"] == ["Mirela Dancu", "Tobias Wrenfeld"]
    assert provenance["evidence"] == list(EVIDENCE) and provenance["passes"] == 3
    recipe = yaml.safe_load((world.folder / "recipe.yaml").read_text())
    (settings,) = recipe["data"]["sources"]
    source = SourceConfig(
        **{**settings, "environment": EnvironmentConfig(**settings["environment"])}
    )
    (item,) = load_jsonl(source, check_spec).items
    verify = verifier_for(item.prompt.reward)
    for said, right in (
        ("I see. <answer>tobias  Wrenfield.</answer>", 1.0),
        ("<answer>T. Wrenfield</answer>", 1.0),
        ("<answer>Tobias Wrenfield or Mirela Dancu</answer>", 0.0),
        ("Tobias Wrenfield is one of many", 0.0),
    ):
        assert verify(said) == right, said


def open_corpus(folder: str) -> SearchIndex:
    """The library that a test names."""
    return SearchIndex(Path(folder))


def test_library_and_entities_replace_the_corpus(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    index = ensure_index(tmp_path / "corpus", tmp_path / "index")
    entities = tmp_path / "entities.txt"
    entities.write_text("Corvane Society\n\nOakford\n")
    world = made(
        world_of(
            tmp_path,
            corpus="",
            library=f"{__name__}:open_corpus",
            options={"folder": str(index)},
            entities=str(entities),
        )
    )
    (line,) = world.lines
    assert line["provenance"]["entity"] == "Corvane Society"
    recipe = yaml.safe_load((world.folder / "recipe.yaml").read_text())
    (settings,) = recipe["data"]["sources"]
    (hit, *_) = Search(**settings["environment"]["arguments"]).search("Corvane").splitlines()
    assert "society.html" in hit


def test_agents_work_blind(tmp_path: Path) -> None:
    world = made(world_of(tmp_path))
    firsts = [(purpose, said) for purpose, said in world.author.asked if len(said) == 2]
    orders = set[tuple[str, ...]]()
    for purpose, (system, user) in firsts:
        shown = json.dumps([system, user])
        if purpose == "verifier":
            assert "evidence" not in shown and "1874" not in shown
            orders.add(tuple(material(user)["answers"].values()))
        if purpose == "answer":
            assert "Wrenfield" not in shown
    assert len([1 for purpose, _ in firsts if purpose == "verifier"]) == 3 and len(orders) > 1


def draft(**changes: Any) -> dict[str, Any]:
    return {"submits": [submitted(**changes)]}


def quotes(*texts: str) -> dict[str, Any]:
    """Evidence from the document of the answer alone."""
    return draft(evidence=[EVIDENCE[2], *({**EVIDENCE[2], "quote": text} for text in texts)])


SHOP = {"claim": "c", "document": "people.jsonl#8", "quote": "opens the shop at seven"}
GERMAN = (
    "Wer gründete die Gesellschaft, in deren Archiv die Hefte liegen, die die Erbauerin der "
    "Brücke von 1911 hinterlassen hat?"
)
OPENED = ("bridge.md", "society.html", "people.jsonl#8", "people.jsonl#dancu")
CHEATS: list[tuple[str, dict[str, Any]]] = [
    ("evidence", draft(answer="Ada Corvane")),
    ("evidence", quotes("founded by Ada Corvane")),
    ("evidence", {"opened": ("bridge.md", "people.jsonl#dancu")}),
    ("evidence", draft(other_spellings=["…"])),
    ("breadth", quotes("1874 by Tobias Wrenfield", "founded in 1874 by")),
    ("depth", quotes("who collected maps", "Its library has 31,000 volumes")),
    ("chain", {"opened": OPENED, **draft(evidence=[*EVIDENCE, SHOP])}),
    ("own words", draft(question=QUESTION + " Was it Tobias Wrenfield?")),
    ("own words", draft(question="Who founded the Corvane Society and collected maps?")),
    ("language", draft(question=GERMAN)),
    ("too easy", {"answers": ["<answer>T. WRENFIELD</answer>", "Mirela Dancu"]}),
    ("candidate", {"answers": ["He"], "verdicts": [{"He": "right"}] * 3}),
    ("no candidate", {"answers": ["<answer>unknown</answer>", ""]}),
    ("truth", {"verdicts": [{"Tobias Wrenfield": "wrong"}] * 3}),
    ("truth", draft(other_spellings=["T. Wrenfield", "Ada Corvane"])),
    ("agreement", {"verdicts": [{}, {}, {"Tobias Wrenfield": "unclear"}]}),
    ("verifier", {"verdicts": [{"quote": "Everybody knows that it was Tobias Wrenfield"}]}),
]


@pytest.mark.parametrize(("gate", "agents"), CHEATS)
def test_each_gate_refuses_its_cheat(tmp_path: Path, gate: str, agents: dict[str, Any]) -> None:
    world = world_of(tmp_path, Agents(**agents))
    with pytest.raises(Rejected) as caught:
        made(world)
    assert caught.value.gate == gate, caught.value
    assert world.lines == []


def test_author_may_fix_a_rejected_draft(tmp_path: Path) -> None:
    agents = Agents(submits=[submitted(answer="Ada Corvane"), submitted()])
    world = made(world_of(tmp_path, agents, tries=2))
    assert len(world.lines) == 1
    results = [said[-1]["content"] for purpose, said in world.author.asked if len(said) > 4]
    assert any(text.startswith("error: ") and "'Ada Corvane'" in text for text in results)


@pytest.mark.parametrize(
    ("right", "taken", "refused"),
    [
        (["192.168.0.1"], [], ["192.168.0.2", "192.168.01"]),
        (["3.10"], [], ["3.1", "3.100"]),
        (["2,5"], [], ["5,2", "2.5", "25"]),
        (["007"], [], ["7"]),
        (["1.5 km", "1500 m"], [], ["15 km", "1.5 m"]),
        (["C++"], ["c++"], ["C", "C#"]),
        (["O’Brien"], ["O'Brien", "o‘brien"], ["OBrien"]),
        (["Dvořák"], ["Dvor\u030ca\u0301k", "DVOŘÁK"], ["Dvorak"]),
        (["Strauß"], ["STRAUß"], ["Strauss"]),
        (["Saint-Denis"], ["Saint‑Denis", "saint–denis"], ["Saint Denis"]),
        (["7", "seven"], ["Seven"], ["8"]),
        (["1874", "in 1874"], ["1,874"], ["1875", "1.874"]),
        (["1,874", "1874"], ["1874.0", "1874"], ["1875"]),
    ],
)
def test_rule_accepts_verified_answers_only(
    right: list[str], taken: list[str], refused: list[str]
) -> None:
    takes = accepts(rule_of(right))
    assert [one for one in (*right, *taken) if not takes(one)] == []
    assert [one for one in refused if takes(one)] == []
    assert [one for one in refused if normalize_answer(one) == normalize_answer(right[0])] == []
