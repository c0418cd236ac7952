"""Judge training data from labelled verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import SourceConfig
from keel.data.jsonl import load_jsonl
from keel.examples.judges import agreement, main
from keel.rewards.checks import check_spec
from keel.rewards.custom import TextTrajectory
from keel.rewards.judge.prompts import meta_question
from keel.rl.types import Prompt

ROW: dict[str, Any] = {
    "prompt": "Name a river.",
    "answer": "The Rhine, a long river.",
    "criteria": [
        {"name": "river", "text": "Names a river."},
        {"name": "brief", "text": "Has one word."},
    ],
    "verdicts": {"river": "met", "brief": "missed"},
}


def reply(**verdicts: str) -> str:
    return json.dumps({key: {"reason": "r", "verdict": v} for key, v in verdicts.items()})


def said(text: str) -> TextTrajectory:
    message = {"role": "assistant", "content": text, "raw": text}
    return TextTrajectory(messages=(message,), finish_reason="stop", sampled_tokens=1)


def written(folder: Path, *options: str, rows: tuple[dict[str, Any], ...] = (ROW,)) -> Path:
    source, out = folder / "labelled.jsonl", folder / "out.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main([str(source), "--out", str(out), *options]) == 0
    return out


def test_agreement_with_the_labels_is_the_reward(tmp_path: Path) -> None:
    function = "keel.examples.judges.agreement"
    source = SourceConfig(
        name="judge",
        source="jsonl",
        path=str(written(tmp_path)),
        rewards={"correct": 1.0, function: 1.0},
    )
    (item,) = load_jsonl(source, check_spec).items
    assert "Names a river." in item.prompt.messages[0]["content"]
    for text, reward in (
        (reply(c1="met", c2="missed"), 1.0),
        (reply(c1="partly", c2="missed"), 0.75),
        (reply(c1="missed", c2="met"), 0.0),
        (reply(c1="met"), 0.0),
        ("met, missed", 0.0),
    ):
        assert agreement(item.prompt, said(text)) == reward, text


EVALUATED = {"prompt": "Show it.", "answer": "Clear.", "evaluation": "It is not.", "score": 0.5}


def test_a_meta_verifier_learns_the_scores_of_evaluations(tmp_path: Path) -> None:
    """The task is the question that a run's judge gets."""
    (line,) = map(json.loads, written(tmp_path, rows=(EVALUATED,)).read_text().splitlines())
    asked = meta_question([{"role": "user", "content": "Show it."}], "Clear.", "It is not.")
    assert line["messages"] == asked.messages(line["id"])
    prompt = Prompt(
        prompt_id="p", domain="d", messages=tuple(line["messages"]), reward={"columns": line}
    )
    for score, reward in (("0.5", 1.0), ("1", 0.5), ("0", 0.5), ("2", 0.0)):
        text = json.dumps({"analysis": "", "score": score})
        assert agreement(prompt, said(text)) == reward, score
    (tmp_path / "out.jsonl").unlink()
    chat = json.loads(written(tmp_path, "--sft", rows=(EVALUATED,)).read_text())
    assert asked.read(chat["messages"][-1]["content"]).score == 0.5


@pytest.mark.parametrize("score", [1.5, 0.25, "much"])
def test_conversations_need_a_score_that_the_judge_can_give(tmp_path: Path, score: Any) -> None:
    source = tmp_path / "labelled.jsonl"
    source.write_text(json.dumps({**EVALUATED, "score": score}))
    assert main([str(source), "--out", str(tmp_path / "out.jsonl"), "--sft"]) == 2


def test_conversations_end_in_the_labelled_verdicts(tmp_path: Path) -> None:
    out = written(tmp_path, "--sft", rows=({**ROW, "reasons": {"brief": "Five words."}},))
    (line,) = map(json.loads, out.read_text().splitlines())
    assert [message["role"] for message in line["messages"]] == ["system", "user", "assistant"]
    assert json.loads(line["messages"][-1]["content"]) == {
        "c1": {"reason": "", "verdict": "met"},
        "c2": {"reason": "Five words.", "verdict": "missed"},
    }


def test_bad_labels_are_named_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "labelled.jsonl"
    bad = {**ROW, "verdicts": {"river": "yes", "brief": "met"}}
    source.write_text(f"{json.dumps(ROW)}\n{json.dumps(bad)}\n")
    assert main([str(source), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert f"{source}:2" in capsys.readouterr().err
