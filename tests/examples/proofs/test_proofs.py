"""Proof refinement, and verifier tasks made from proofs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from keel.configs.schema import SourceConfig
from keel.data.eval_store import asked_of
from keel.data.jsonl import load_jsonl
from keel.examples.proofs.__main__ import main
from keel.examples.proofs.refine import Refine
from keel.examples.proofs.search import SearchLimits, search
from keel.rewards.checks import check_spec
from keel.rl.turns import Message, ToolSpec
from keel.rl.types import Prompt
from keel.synthesis.author import AuthorReply
from tests.rl.rollouts import scored, segment, trajectory


def answer(score: str, solution: str = "QED") -> str:
    return f"## Solution\n{solution}\n\n## Self Evaluation\nSo so.\n\\boxed{{{score}}}"


def test_until_the_policy_finds_nothing_to_mend() -> None:
    refine = Refine(most=5)
    assert "has score 0 by your own" in str(refine.reply(answer("0")))
    assert "needs one section `## Solution`" in str(refine.reply("I am done."))
    assert "has score 0.5" in str(refine.reply(answer("0.5")))
    assert refine.reply(answer("1")) is None
    assert refine.verdict((), "stop") == {"claimed": 1.0, "revised": 0.6}


class Prover:
    """Writes better proofs in each round. Its verifications find a flaw until the third."""

    name = "prover"

    def __init__(self) -> None:
        self.requests: dict[str, list[str]] = {"proof": [], "verification": []}

    async def ask(
        self, messages: Sequence[Message], *, purpose: str, tools: Sequence[ToolSpec] = ()
    ) -> AuthorReply:
        text = str(messages[-1]["content"])
        self.requests[purpose].append(text)
        if purpose == "proof":
            version = 1 + max((n for n in range(9) if f"Version {n}." in text), default=0)
            # A claimed score of 1 does not end the search.
            return AuthorReply(content=answer("1", f"Version {version}."))
        seen = sum(other == text for other in self.requests["verification"])
        score = "1" if "Version 3." in text else ("1", "0.5")[seen % 2]
        return AuthorReply(content=f"Review {seen} of it.\n\\boxed{{{score}}}")


def test_search_refines_until_every_verification_accepts() -> None:
    prover = Prover()
    limits = SearchLimits(pool=3, best=2, children=1, verifications=4, reviews=1, rounds=5)
    result = asyncio.run(search(prover, "Show it.", limits))
    assert result == {
        "proof": "Version 3.",
        "score": 1.0,
        "solved": True,
        "rounds": 2,
        "proofs": 3 + 2 + 2,
    }
    assert len(prover.requests["verification"]) == 4 * result["proofs"]
    refinements = prover.requests["proof"][3:]
    assert all("Version" in text and text.count("Review ") == 1 for text in refinements)
    few = asyncio.run(search(Prover(), "Show it.", replace(limits, rounds=1)))
    assert few["rounds"] == 1 and not few["solved"] and 0.5 < few["score"] < 1


def evaluation(folder: Path, *graded: tuple[str, float], error: float = 0.0) -> Path:
    """Write a folder like `keel eval`."""
    prompt = Prompt(
        prompt_id="proofs/1",
        domain="proofs",
        messages=(
            {"role": "system", "content": "Two sections."},
            {"role": "user", "content": "Prove it."},
        ),
        reward={"kind": "proof"},
    )
    proofs = [
        replace(
            trajectory(segment(name="proofs/1"), sibling=n),
            messages=({"role": "assistant", "content": text},),
        )
        for n, (text, _) in enumerate(graded)
    ]
    parts = [{"correct": score, "error": error, "proof": score} for _, score in graded]
    group = scored(proofs, [score for _, score in graded], parts=parts)
    group = replace(group, group=replace(group.group, prompt=prompt))
    evaluated = asked_of("recipe", "proofs", prompt, [group], lambda _: "", lambda _: 0)
    folder.mkdir()
    (folder / "samples.jsonl").write_text(json.dumps(asdict(evaluated)) + "\n")
    return folder


def test_graded_proofs_become_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = answer("1", "By \ud800 induction."), answer("1", "Obvious.")
    several = [(answer("0", f"Try {n}."), 0.0) for n in range(4)]
    first = evaluation(tmp_path / "a", (right, 1.0), (wrong, 0.0), ("no form", 0.0), (right, 1.0))
    second = evaluation(tmp_path / "b", *several, (answer("1", "Half."), 0.5))
    out = tmp_path / "verify.jsonl"
    assert main([str(first), str(second), "--out", str(out), "--each", "2"]) == 0
    assert "4 proofs to verify" in capsys.readouterr().out
    source = SourceConfig(name="v", source="jsonl", path=str(out))
    prompts = [item.prompt for item in load_jsonl(source, check_spec).items]
    pairs = [(prompt.reward["proof"], prompt.reward["score"]) for prompt in prompts]
    assert pairs == [("By ? induction.", 1.0), ("Obvious.", 0.0), ("Try 0.", 0.0), ("Half.", 0.5)]
    shown = prompts[1].messages[-1]["content"]
    assert "Prove it." in shown and "Obvious." in shown
    assert "Self Evaluation" not in shown and "score" not in shown
