"""`keel judge`: a file of answers in, a table and a file of results out."""

import json
from pathlib import Path
from typing import Any

import pytest

from keel.commands.judge import _judge_answers, _read_answers
from keel.configs.schema import JudgeConfig
from tests.rewards.judge.judge_server import Reply, Server, good, material_of

BLUE = {"name": "blue", "text": "says blue", "weight": 1}
LINE = {"prompt": "Colour?", "answer": "blue", "criteria": [BLUE]}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_table_and_a_file(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def behave(request: dict[str, Any]) -> Reply:
        refused = material_of(request["messages"])["answer"] == "two"
        return Reply('{"error": {"message": "no"}}', status=400) if refused else good(request)

    server.behave = behave
    hostile = "[red]red[/red] \x1b]0;title\x07 blue"
    more = ({"answer": hostile, "id": "h"}, {"answer": ""}, {"answer": "two"})
    answers = write(tmp_path / "a.jsonl", LINE, *({**LINE, **one} for one in more))
    out = tmp_path / "out.jsonl"
    config = JudgeConfig(base_url=server.url, model="m")
    assert _judge_answers(_read_answers(answers), config, out) == 1
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["id"], r["score"]) for r in results] == [("1", 1), ("h", 1), ("3", 0), ("4", None)]
    assert results[0]["verdicts"] == [{"name": "blue", "score": 1.0, "reason": "looked for blue"}]
    assert results[3]["failed"]["kind"] == "refused"
    shown = capsys.readouterr().out
    assert "mean score 0.667 · blue 0.667" in shown and "\x1b" not in shown


def test_a_rubric_for_all_lines(tmp_path: Path) -> None:
    bare = {"messages": [{"role": "user", "content": "Colour?"}], "answer": "blue"}
    answers = write(tmp_path / "a.jsonl", bare, {**LINE, "reference": "r"}, LINE)
    (tmp_path / "r.yaml").write_text(
        "criteria:\n- {name: sky, text: is nice, weight: 1.0}\nreference: it is blue\n"
    )
    first, second, third = _read_answers(answers, tmp_path / "r.yaml")
    assert first.prompt.reward["criteria"][0]["name"] == "sky"
    assert first.prompt.reward["reference"] == "it is blue"
    assert second.prompt.reward["criteria"][0]["name"] == "blue"
    assert second.prompt.reward["reference"] == "r"
    assert third.prompt.reward == {"kind": "rubric", "criteria": [BLUE]}
    sampled = _read_answers(write(tmp_path / "s.jsonl", {**LINE, "answer": "blue\ud800"}))
    assert sampled[0].answer == "blue\ufffd"
    with pytest.raises(ValueError, match=r"^/.*none\.jsonl: no such file"):
        _read_answers(tmp_path / "none.jsonl")
    bare_list = _read_answers(answers, write(tmp_path / "r.json", [BLUE]))
    assert bare_list[0].prompt.reward["criteria"] == [BLUE]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        *(("{", ""), ("[]", "object"), ({"prompt": "p"}, "`criteria`")),
        *(({**LINE, "answr": "x"}, "answer"), ({"prompt": "p", "criteria": [BLUE]}, "`answer`")),
        ({"answer": "a", "messages": [3], "criteria": [BLUE]}, "`messages"),
        ({**LINE, "prompt": 3}, "needs `prompt`, a text"),
        ("[]", "must be an object, is a list$"),
    ],
)
def test_bad_lines_are_named_before_any_call(tmp_path: Path, line: Any, match: str) -> None:
    path = write(tmp_path / "a.jsonl", LINE)
    path.write_text(path.read_text() + (line if isinstance(line, str) else json.dumps(line)))
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{match}"):
        _read_answers(path)
