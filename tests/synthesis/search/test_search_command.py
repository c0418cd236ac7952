"""`keel synthesize` for search, through an endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.commands.cli import main
from keel.rl.turns import ToolSpec
from keel.synthesis.author import AuthorReply
from tests.agents.environments.search.corpus import write_corpus
from tests.rewards.judge.judge_server import Reply, running
from tests.synthesis.authors import completion
from tests.synthesis.search.agents import Agents


def reply(answer: AuthorReply | str) -> Reply:
    answer = AuthorReply(content=answer) if isinstance(answer, str) else answer
    return completion(answer.message(), prompt_tokens=9, completion_tokens=1)


def test_recipe_to_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agents = Agents()

    def behave(request: dict[str, Any]) -> Reply:
        names = [tool["function"]["name"] for tool in request.get("tools", [])]
        purpose = {"submit": "question", "decide": "verifier"}.get(names[-1] if names else "")
        tools: list[ToolSpec] = []
        return reply(agents(request["messages"], tools, purpose or "answer"))

    write_corpus(tmp_path / "corpus")
    out = tmp_path / "out"
    with running(behave) as server:
        recipe = {
            "family": "search",
            "dir": str(out),
            "at_once": 1,
            "author": {"base_url": server.url, "model": "m"},
            "search": {
                "corpus": str(tmp_path / "corpus"),
                "index": str(tmp_path / "index"),
                "count": 2,
                "answerers": [{"author": {"temperature": 0.25}}, {"tools": False}],
                "verifier": {"model": "careful"},
                "passes": 2,
            },
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        assert main(["synthesize", str(path)]) == 0
        text = capsys.readouterr().out
        assert "made 2 tasks, kept 1" in text and "rejected by duplicate: 1" in text, text
        requests = [
            (r["model"], r["temperature"], len(r.get("tools", []))) for r in server.requests
        ]
        assert {("m", 0.25, 3), ("m", 1.0, 0), ("m", 1.0, 4), ("careful", 1.0, 4)} == set(requests)
        assert main(["synthesize", str(path)]) == 0
        assert len(server.requests) == len(requests)
        assert main(["synthesize", str(path), "search.passes=3"]) == 2
    report = json.loads((out / "report.json").read_text())
    assert report["cost"].keys() == {"question", "answer", "verifier"}
    assert len((out / "tasks.jsonl").read_text().splitlines()) == 1
