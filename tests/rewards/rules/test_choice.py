"""Multiple choice: an answer must name exactly one choice."""

import json
import string
import time
from pathlib import Path
from typing import Any

import pytest

from keel.rewards.rules.verifiers import verifier_for

CITIES = ["London", "Paris", "York", "New York"]
CORPUS = [
    json.loads(line) for line in Path(__file__).with_name("choices.jsonl").read_text().splitlines()
]
"""Each line has choices, an answer and the letter that it names, or "" if it names none."""


def score(text: str, right: str = "B", choices: Any = CITIES) -> float:
    spec = {"kind": "answer", "match": "choice", "answer": right, "choices": choices}
    return verifier_for(spec)(text)


def test_corpus() -> None:
    for case in CORPUS:
        letters = string.ascii_uppercase[: len(case["choices"] or string.ascii_uppercase)]
        named = [right for right in letters if score(case["text"], right, case["choices"])]
        assert named == list(case["named"]), case


def test_the_right_answer_may_be_a_letter_or_a_text() -> None:
    for right in ("Paris", "(b)", "paris."):
        assert score("The answer is option B, Paris.", right) == 1.0


@pytest.mark.parametrize(
    "spec",
    [
        *({"answer": "E"}, {"answer": "Rome"}, {"answer": "Rome", "choices": None}, {"answer": 2}),
        *({"choices": bad} for bad in ("ABCD", ["x"], {}, ["x", " "], ["x", ["y"]], ["x", "X."])),
        *({"choices": {"AB": "x", "B": "y"}}, {"choices": {"a": "x", "b": "y"}}),
        {"choices": ["x"] * 27},
    ],
)
def test_bad_choices_are_refused(spec: dict[str, Any]) -> None:
    fields = {"kind": "answer", "match": "choice", "answer": "A", "choices": CITIES, **spec}
    with pytest.raises(ValueError):
        verifier_for(fields)


def test_time_is_linear_in_the_answer() -> None:
    began = time.thread_time()  # independent of machine load
    for text in (
        *("answer:" * 1_000, "answer" + " " * 7_500, "answer:" + "\n" * 7_500 + "?"),
        *("Paris " * 1_250 + "London", "\\boxed{" * 1_000, "\\boxed{" * 750 + "}" * 750),
        *("<answer>" * 1_000, "<answer>" + "</answer" * 1_000, "A " * 3_750, "A, " * 1_250),
        *("not " * 2_000, "not A (" * 1_000, "*" * 8_000, "\\text{" * 1_250),
    ):
        assert score(text) == 0.0
    assert time.thread_time() - began < 3
