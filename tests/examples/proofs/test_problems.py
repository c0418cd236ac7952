"""Proof problems made by a script."""

from __future__ import annotations

import json

from keel.configs.paths import PACKAGE
from keel.examples.proofs.problems import lines
from keel.rewards.judge.specs import judged_spec


def test_shipped_problems_are_those_of_the_script() -> None:
    made = lines()
    path = PACKAGE / "mixed" / "proofs.jsonl"
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == made
    assert len({line["messages"][1]["content"] for line in made}) == len(made)
    for line in made:
        judged_spec(line["reward"])
