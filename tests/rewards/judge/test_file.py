"""`keel judge`: files in, a table and a file of results out."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keel.commands.cli import parser
from keel.configs.schema import JudgeConfig
from keel.rewards.judge.file import judge_answers, read_answers, read_rubric
from keel.trainer.run.progress import Wait
from tests.rewards.judge.judge_server import Reply, Server, good, material_of

BLUE = {"name": "blue", "text": "says blue", "weight": 1}
LINE = {"prompt": "Colour?", "answer": "blue", "criteria": [BLUE]}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_table_and_a_file(server: Server, tmp_path: Path) -> None:
    hostile = "[red]red[/red] \x1b]0;title\x07 blue"
    answers = write(
        tmp_path / "a.jsonl", LINE, {**LINE, "answer": hostile, "id": "h"}, {**LINE, "answer": ""}
    )
    out = tmp_path / "out.jsonl"
    console = Console(file=io.StringIO(), width=100)
    config = JudgeConfig(base_url=server.url, model="m")
    waits: list[tuple[str, int, Wait]] = []

    @contextmanager
    def show(what: str, *, total: int = 0) -> Iterator[Wait]:
        waits.append((what, total, Wait(what)))
        yield waits[-1][2]

    assert judge_answers(read_answers(answers), config, out, console, show=show) == 0
    assert [(total, wait.done) for _, total, wait in waits] == [(0, 0), (3, 3)]
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["id"], r["score"]) for r in results] == [("1", 1.0), ("h", 1.0), ("3", 0.0)]
    assert results[0]["verdicts"] == [{"name": "blue", "score": 1.0, "reason": "looked for blue"}]
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "mean score 0.667 · blue 0.667" in shown
    assert "there is no answer" in shown
    assert "judged 3, failed 0; 3 calls, 0 of them again, " in shown
    assert "\x1b" not in shown


def test_failures_are_told_apart_from_bad_answers(server: Server, tmp_path: Path) -> None:
    def behave(request: dict[str, Any]) -> Reply:
        secret = material_of(request["messages"])["answer"] == "two"
        return Reply('{"error": {"message": "no"}}', status=400) if secret else good(request)

    server.behave = behave
    answers = write(tmp_path / "a.jsonl", LINE, {**LINE, "answer": "two"})
    out = tmp_path / "out.jsonl"
    console = Console(file=io.StringIO(), width=100)
    config = JudgeConfig(base_url=server.url, model="m")
    assert judge_answers(read_answers(answers), config, out, console) == 1
    failed = json.loads(out.read_text().splitlines()[1])
    assert (failed["score"], failed["failed"]["kind"]) == (None, "refused")
    assert "failed 1 (1 refused)" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_rubric_for_all_lines(tmp_path: Path) -> None:
    bare = {"messages": [{"role": "user", "content": "Colour?"}], "answer": "blue"}
    answers = write(tmp_path / "a.jsonl", bare, {**LINE, "reference": "r"}, LINE)
    (tmp_path / "r.yaml").write_text(
        "criteria:\n- {name: sky, text: is nice, weight: 1.0}\nreference: it is blue\n"
    )
    first, second, third = read_answers(answers, tmp_path / "r.yaml")
    assert first.prompt.reward["criteria"][0]["name"] == "sky"
    assert first.prompt.reward["reference"] == "it is blue"
    assert second.prompt.reward["criteria"][0]["name"] == "blue"
    assert second.prompt.reward["reference"] == "r"
    assert third.prompt.reward == {"kind": "rubric", "criteria": [BLUE]}
    assert read_rubric(write(tmp_path / "r.json", [BLUE]))["criteria"] == [BLUE]
    (tmp_path / "p.yaml").write_text("kind: proof\nalpha: 0.5\n")
    assert [item.calls for item in read_answers(answers, tmp_path / "p.yaml")] == [3, 1, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2: not JSON"),
        ("[]", "a.jsonl:2: must be an object"),
        ({"prompt": "p"}, "a.jsonl:2: no `criteria`"),
        ({**LINE, "answr": "x"}, "did you mean answer"),
        ({"prompt": "p", "criteria": [BLUE]}, "no `answer`"),
        ({"answer": "p", "criteria": [BLUE]}, "no `prompt`"),
        ({**LINE, "answer": 3}, "`answer` must be text"),
        ({**LINE, "criteria": []}, "a.jsonl:2: rubric: without criteria"),
        ({**LINE, "criteria": [{**BLUE, "weight": 0.4}]}, "sum to 0.4, must sum to 1"),
        ({"answer": "a", "messages": [3], "criteria": [BLUE]}, "each of `messages`"),
        ({**LINE, "reward": "rubric"}, "`reward` must be a reward spec"),
        ({**LINE, "reward": {"kind": "answer"}}, "a judge reads rubric, proof"),
    ],
)
def test_bad_lines_are_named_before_anything_is_asked(
    tmp_path: Path, line: Any, message: str
) -> None:
    path = write(tmp_path / "a.jsonl", LINE)
    path.write_text(path.read_text() + (line if isinstance(line, str) else json.dumps(line)))
    with pytest.raises(ValueError, match=message):
        read_answers(path)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_answers(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="holds no answer"):
        read_answers(tmp_path / "empty")
    (tmp_path / "r").write_text("criteria: [")
    with pytest.raises(ValueError, match="r: not valid YAML"):
        read_rubric(tmp_path / "r")
    (tmp_path / "r").write_text("be nice")
    with pytest.raises(ValueError, match="r: must hold `criteria"):
        read_rubric(tmp_path / "r")
    with pytest.raises(ValueError, match=r"r\.json: rubric: the weights"):
        read_rubric(write(tmp_path / "r.json", [{**BLUE, "weight": 2}]))


def test_the_command_line() -> None:
    arguments = parser().parse_args(
        ["judge", "a.jsonl", "--rubric", "r.yaml", "--base-url", "http://h/v1", "--samples", "3"]
    )
    assert (arguments.command, arguments.file, arguments.rubric) == ("judge", "a.jsonl", "r.yaml")
    assert (arguments.base_url, arguments.samples, arguments.recipe) == ("http://h/v1", 3, None)
