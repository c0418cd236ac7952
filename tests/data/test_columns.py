"""Columns as keys, in templates and for functions, and the source that keel new proposes."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from keel.commands.new import _data_source
from keel.configs.schema import ConfigError, SourceConfig
from keel.configs.sections.evaluation import BOXED
from keel.data.items import Loaded
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.rewards.rules.verifiers import verifier_for

OWN = {"rewards": {"correct": 1.0, "mine.brief": 0.1}}


def source(folder: Path, *rows: dict[str, Any], **knobs: Any) -> SourceConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(**{"name": "s", "source": "jsonl", "path": str(path), **knobs})


def load(folder: Path, *rows: dict[str, Any], **knobs: Any) -> Loaded:
    return load_jsonl(source(folder, *rows, **knobs), check_spec)


def error_of(folder: Path, *rows: dict[str, Any], **knobs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *rows, **knobs)
    return str(caught.value)


def asked(folder: Path, *rows: dict[str, Any], **knobs: Any) -> list[str]:
    return [item.prompt.messages[-1]["content"] for item in load(folder, *rows, **knobs).items]


def test_answer_after_a_mark(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 1,200"}
    knobs: dict[str, Any] = {"columns": {"prompt": "question"}, "answer_after": "####"}
    (item,) = load(tmp_path, row, **knobs).items
    assert item.prompt.reward == {"kind": "answer", "answer": "1,200", "match": "math"}
    assert verifier_for(item.prompt.reward)("It is 1200.") == 1.0
    for answer in ("24", "2 #### "):
        assert "answer_after" in error_of(tmp_path, row, {**row, "answer": answer}, **knobs)


def test_functions_receive_columns(tmp_path: Path) -> None:
    row = {"problem": "a", "solution": 0.10, "answer": "all", "level": 3, "reward_model": {"x": 1}}
    columns = {"prompt": "problem", "answer": "solution"}
    (item,) = load(tmp_path, row, columns=columns, **OWN).items
    further = {"answer": "all", "level": 3, "reward_model": {"x": 1}}
    assert item.prompt.reward["columns"] == further and item.prompt.reward["answer"] == "0.1"
    nested = {"prompt": "problem", "answer": "reward_model.x"}
    (item,) = load(tmp_path, row, columns=nested, **OWN).items
    assert item.prompt.reward["answer"] == "1"


def test_a_weight_of_correct_needs_answers(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b"}]
    assert "rows.jsonl:2: has no `answer`" in error_of(tmp_path, *rows, **OWN)
    assert len(load(tmp_path, *rows, rewards={"mine.brief": 0.1}).items) == 2


def test_null_is_absent(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "refuse": True}]
    keys = ("prompt", "messages", "answer", "match", "refuse", "tests", "tolerance", "id")
    filled = [{key: row.get(key) for key in keys} for row in rows]
    plain = [item.prompt for item in load(tmp_path, *rows).items]
    assert [item.prompt for item in load(tmp_path, *filled).items] == plain


def test_templates(tmp_path: Path) -> None:
    row = {"question": "1+1?", "hint": 0.50, "answer": "2", "more": {"x": ["é"]}}
    columns = {"prompt": "question"}
    for template, words in (
        ("Question: {question}\nHint: {hint}", "Question: 1+1?\nHint: 0.5"),
        ("{prompt} {more.x} {{prompt}} \\boxed{}", '1+1? ["é"] {prompt} \\boxed{}'),
        ("boxed", f"1+1?\n{BOXED}"),
    ):
        assert asked(tmp_path, row, columns=columns, template=template) == [words]
    assert asked(tmp_path, row, template="{question}") == ["1+1?"]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert asked(tmp_path, {"prompt": chat, "answer": "2"}, template="boxed") == [f"u\n{BOXED}"]


def test_templates_keep_the_question(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "answer": "2", "hint": hint} for hint in "abc"]
    assert len({item.question for item in load(tmp_path, *rows, template="boxed").items}) == 1
    own = load(tmp_path, *rows, template="{prompt} {hint}").items
    assert len({item.question for item in own}) == 3
    plain = load(tmp_path, rows[0]).items[0]
    assert load(tmp_path, rows[0], template="boxed").items[0].question == plain.question


MATHS = "boxed"
WORKED = "Half of 48 is 24, and 48 + 24 = 72.\n#### "
CASES: dict[str, tuple[dict[str, Any], str | None, dict[str, str], str]] = {
    "Keel's own": ({"prompt": "2+2?", "answer": "4"}, MATHS, {}, ""),
    "gsm8k": ({"question": "?", "answer": f"{WORKED}72"}, MATHS, {"prompt": "question"}, "####"),
    "formulas": (
        *({"problem": "?", "final_answer": "\\frac{1}{2}", "solution": "By parts."}, MATHS),
        *({"prompt": "problem", "answer": "final_answer"}, ""),
    ),
    "verl": (
        *({"prompt": "?", "reward_model": {"ground_truth": "-1,5"}}, MATHS),
        *({"answer": "reward_model.ground_truth"}, ""),
    ),
    "two verdicts": ({"prompt": "?", "answer": "1", "tests": "x"}, MATHS, {"tests": ""}, ""),
    "whole solutions": ({"prompt": "?", "solution": "First we note that " * 12}, None, {}, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_and_reward(case: str, tmp_path: Path) -> None:
    row, template, columns, after = CASES[case]
    flags = Namespace(subset="", prompt="", answer="", reward="mine.brief", environment="")
    flags.data = source(tmp_path, row, row, row).path
    found = _data_source(flags)
    assert (found["template"], found["columns"], found["mark"]) == (template, columns, after)
    assert (found["source"], found["holdout"]) == ("jsonl", 1)
    assert ("correct" in found["rewards"]) == bool(template)
