"""The source that `keel new` proposes from the first rows of a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError
from keel.data.rows.proposal import Proposal, propose


def lines(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def of(folder: Path, *rows: Mapping[str, Any], **known: str) -> Proposal:
    return propose(lines(folder, rows), **known)


WORKED = "Half of 48 is 24, and 48 + 24 = 72.\n#### "
CASES: dict[str, tuple[dict[str, Any], str, dict[str, str], str]] = {
    "Keel's own": ({"prompt": "2+2?", "answer": "4"}, "maths", {}, ""),
    "gsm8k": ({"question": "?", "answer": f"{WORKED}72"}, "maths", {"prompt": "question"}, "####"),
    "formulas": (
        *({"problem": "?", "final_answer": "\\frac{1}{2}", "solution": "By parts."}, "maths"),
        *({"prompt": "problem", "answer": "final_answer"}, ""),
    ),
    "verl": (
        *({"prompt": "?", "reward_model": {"ground_truth": "-1,5"}}, "maths"),
        *({"answer": "reward_model.ground_truth"}, ""),
    ),
    "programs": ({"prompt": "Sort.", "tests": [{"stdin": "1", "stdout": "1"}]}, "tests", {}, ""),
    "two verdicts": ({"prompt": "?", "answer": "1", "tests": "x"}, "maths", {"tests": ""}, ""),
    "whole solutions": ({"prompt": "?", "solution": "First we note that " * 12}, "nothing", {}, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_and_reward(case: str, tmp_path: Path) -> None:
    row, judged, columns, after = CASES[case]
    found = of(tmp_path, row, row, row)
    assert (found.judged, dict(found.columns), found.answer_after) == (judged, columns, after)
    assert (found.kind, found.rows, found.whole) == ("jsonl", 3, True)


def test_named_columns(tmp_path: Path) -> None:
    row = {"prompt": "?", "answer": "wrong one", "text": "ask this", "gold": "7"}
    found = of(tmp_path, row, prompt="text", answer="gold")
    assert found.columns == {"prompt": "text", "answer": "gold"}
    assert found.judged == "maths"
    with pytest.raises(ConfigError, match="a, b"):
        of(tmp_path, {"a": 1, "b": 2})
