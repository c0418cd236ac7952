"""Proof problems made by a script."""

from __future__ import annotations

import json
from pathlib import Path

from keel.configs.paths import PACKAGE
from keel.examples import judges
from keel.examples.proofs.problems import evaluations, lines, main
from keel.rewards.judge.specs import judged_spec


def test_shipped_problems_are_those_of_the_script() -> None:
    made = lines()
    path = PACKAGE / "mixed" / "proofs.jsonl"
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == made
    assert len({line["messages"][1]["content"] for line in made}) == len(made)
    for line in made:
        judged_spec(line["reward"])


def test_evaluations_are_labelled_by_the_flaws_that_were_planted(tmp_path: Path) -> None:
    rows = evaluations()
    right = {line["messages"][1]["content"]: line["reward"]["reference"] for line in lines()}
    assert len(rows) == 3 * len(right) and len(right) >= 100
    for row in rows:
        assert (row["answer"] == right[row["prompt"]]) == (row["score"] == 0), row
        assert row["evaluation"].count("\n2. ") == (row["score"] == 0.5)
    labelled, tasks = tmp_path / "labelled.jsonl", tmp_path / "tasks.jsonl"
    main([str(labelled), "--evaluations"])
    assert judges.main([str(labelled), "--out", str(tasks)]) == 0
    assert len(tasks.read_text().splitlines()) == len(rows)
