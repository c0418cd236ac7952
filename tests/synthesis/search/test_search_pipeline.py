"""The search pipeline end to end, and a cheat for each gate."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from keel.configs.schema import EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.rewards.rules.verifiers import verifier_for
from keel.synthesis.author import AuthorLost, AuthorReply
from keel.synthesis.ledger import Rejected
from keel.synthesis.search.gates import AcceptedQuestions
from keel.synthesis.search.pipeline import SearchPipeline
from keel.synthesis.search.question import accepts, normalize_answer, rule_of
from tests.synthesis.authors import ScriptedAuthor
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


CHEATS: dict[str, tuple[str, dict[str, Any]]] = {
    "the truth is not in the evidence": (
        "evidence",
        {"submits": [submitted(answer="Ada Corvane")]},
    ),
    "a quote is made up": (
        "evidence",
        {"submits": [submitted(evidence=[{**EVIDENCE[2], "quote": "founded by Ada Corvane"}])]},
    ),
    "an unopened document": ("evidence", {"opened": ("bridge.md", "people.jsonl#dancu")}),
    "one fact, three times": ("breadth", {"submits": [submitted(evidence=[EVIDENCE[2]] * 3)]}),
    "one document for all facts": (
        "depth",
        {
            "submits": [
                submitted(
                    evidence=[
                        EVIDENCE[2],
                        {**EVIDENCE[2], "quote": "who collected maps"},
                        {**EVIDENCE[2], "quote": "Its library has 31,000 volumes"},
                    ]
                )
            ]
        },
    ),
    "unrelated documents": (
        "chain",
        {
            "opened": ("bridge.md", "society.html", "people.jsonl#8", "people.jsonl#dancu"),
            "submits": [
                submitted(
                    evidence=[
                        *EVIDENCE,
                        {
                            "claim": "c",
                            "document": "people.jsonl#8",
                            "quote": "opens the shop at seven",
                        },
                    ]
                )
            ],
        },
    ),
    "a question that names its answer": (
        "own words",
        {"submits": [submitted(question=QUESTION + " Was it Tobias Wrenfield?")]},
    ),
    "one search is enough": (
        "own words",
        {"submits": [submitted(question="Who founded the Corvane Society and collected maps?")]},
    ),
    "a spelling that fits everything": (
        "evidence",
        {"submits": [submitted(other_spellings=["…"])]},
    ),
    "another language": (
        "language",
        {
            "submits": [
                submitted(
                    question="Wer gründete die Gesellschaft, in deren Archiv die Hefte liegen, die "
                    "die Erbauerin der Brücke von 1911 hinterlassen hat?"
                )
            ]
        },
    ),
    "a candidate that is right": (
        "too easy",
        {"answers": ["<answer>T. WRENFIELD</answer>", "Mirela Dancu"]},
    ),
    "a candidate that is right in other words": (
        "candidate",
        {
            "answers": ["Wrenfield, the collector"],
            "verdicts": [{"Wrenfield, the collector": "right"}] * 3,
        },
    ),
    "nobody answers": ("no candidate", {"answers": ["<answer>unknown</answer>", ""]}),
    "a truth that is wrong": ("truth", {"verdicts": [{"Tobias Wrenfield": "wrong"}] * 3}),
    "a different person as another spelling": (
        "truth",
        {"submits": [submitted(other_spellings=["T. Wrenfield", "Ada Corvane"])]},
    ),
    "a verifier that disagrees with itself": (
        "agreement",
        {"verdicts": [{}, {}, {"Tobias Wrenfield": "unclear"}]},
    ),
    "a verifier that makes quotes up": (
        "verifier",
        {"verdicts": [{"quote": "Everybody knows that it was Tobias Wrenfield"}]},
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_each_gate_refuses_its_cheat(tmp_path: Path, cheat: str) -> None:
    gate, agents = CHEATS[cheat]
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


def test_lost_agent_cancels_the_others(tmp_path: Path) -> None:
    ended: list[str] = []

    class Slow(ScriptedAuthor):
        async def ask(self, messages: Any, *, purpose: str, tools: Any = ()) -> AuthorReply:
            if purpose != "answer":
                return await super().ask(messages, purpose=purpose, tools=tools)
            if not ended:
                ended.append("lost")
                raise AuthorLost("no reply")
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append("cancelled")
            raise AssertionError

    async def make() -> None:
        async with world_of(tmp_path, author=Slow(Agents())).pipeline as pipeline:
            with pytest.raises(AuthorLost):
                await pipeline.make(pipeline.keys[0])
            assert ended == ["lost", "cancelled"]

    asyncio.run(asyncio.wait_for(make(), PATIENCE_S))


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (QUESTION.upper(), "this question was kept before"),
        ("Of which society's archive, with an engineer's notebooks, who is the founder?", "answer"),
        (QUESTION.replace("Who", "Which person"), "with this answer"),
    ],
)
def test_later_start_refuses_duplicates(tmp_path: Path, question: str, why: str) -> None:
    made(world_of(tmp_path, count=2), 0)
    with (tmp_path / "out" / "tasks.jsonl").open("a") as file:
        file.write('{"id": "x", "pro')  # as a crash leaves it
    again = world_of(tmp_path, Agents(submits=[submitted(question=question)]), count=2)
    with pytest.raises(Rejected):
        made(again, 1)
    assert len(again.lines) == 1
    made(again, 0)  # kept, though its outcome was lost
    assert len(again.lines) == 1


def test_concurrent_duplicates_are_kept_once(tmp_path: Path) -> None:
    """This holds for any reward pattern."""
    made: Any = object.__new__(SearchPipeline)
    start = SimpleNamespace(entity="a bridge", open=False, language="en")
    made._starts, made._written = {"one": start, "two": start}, set()
    made._kept, made._folder, made._answerers = AcceptedQuestions(), tmp_path, []
    made._author = made._verifier = SimpleNamespace(name="m")

    async def question(start: object, key: str) -> dict[str, Any]:
        return {
            "prompt": {"one": "Who founded it?", "two": "Which person began the society?"}[key],
            "answer": rf"(?i:Tobias\s+Wrenfield|{key})",
            "environment": {"evidence": ["a", "b"]},
            "provenance": {"answer": "Tobias Wrenfield"},
        }

    made._question = question
    asyncio.run(made.make("one"))
    with pytest.raises(Rejected):
        asyncio.run(made.make("two"))


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
