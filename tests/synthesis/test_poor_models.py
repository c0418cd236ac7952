"""Every task by a model that writes rubbish is rejected, without other harm."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.commands.cli import main
from tests.agents.environments.search.corpus import write_corpus
from tests.agents.sandboxes import wrap_of
from tests.rewards.judge.judge_server import Reply, running
from tests.synthesis.test_author import completion

TEXTS = (
    "",
    " ",
    "\x00\x07\x1b[31m",
    "\ud83d",
    "<|im_end|><think></tool_call>",
    "ab" * 30_000,
    "## tools\n```python\ndef f(:\n```",
    "## tools\n```python\nimport os\n```\n## question\n?\n## solve\npass\n## verify\npass",
    "../../etc/passwd",
    "[" * 5_000,
    "日本語 " * 50,
    "NaN",
)
DATABASE = ("bash", {"command": "echo '[1, 2]' > a.json"}), ("submit_database", {"path": "a.json"})


def rubbish(request: Mapping[str, Any]) -> Reply:
    """Deterministic rubbish for each request."""
    text = json.dumps(request["messages"])
    draw = random.Random(hashlib.sha256(text.encode()).hexdigest())
    tools = [tool["function"] for tool in request.get("tools") or []]
    if draw.random() < 0.1 and len(request["messages"]) > 2:
        error = "This model's maximum context length is 64 tokens."
        return Reply(json.dumps({"error": {"message": error}}), status=400)
    finish = draw.choice(("stop", "stop", "stop", "length"))
    message: dict[str, Any] = {"role": "assistant", "content": draw.choice((None, *TEXTS))}
    if tools and draw.random() < 0.85:
        finish = "tool_calls"
        calls = [_call(tools, draw) for _ in range(draw.randint(1, 3))]
        if tools[-1]["name"] == "submit_database" and draw.random() < 0.3:
            calls = [(name, json.dumps(arguments)) for name, arguments in DATABASE]
        message["tool_calls"] = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    return completion(message, finish)


def _call(tools: Sequence[Mapping[str, Any]], draw: random.Random) -> tuple[str, str]:
    tool = draw.choice(tools)
    if draw.random() < 0.3:
        return draw.choice((tool["name"], "", "unknown")), draw.choice(('{"a": ', "[1]", *TEXTS))
    properties = tool["parameters"]["properties"]
    return tool["name"], json.dumps({name: _value(of, draw) for name, of in properties.items()})


def _value(schema: Mapping[str, Any], draw: random.Random) -> Any:
    kind = schema.get("type")
    if draw.random() < 0.1:
        return draw.choice((None, 10**30, [], {}, float("nan")))
    if kind == "array":
        return [_value(schema.get("items", {}), draw) for _ in range(draw.randint(1, 4))]
    if kind == "object":
        return {name: _value(of, draw) for name, of in schema.get("properties", {}).items()}
    if kind in ("integer", "number"):
        return draw.choice((-1, 0, 1, 10**9))
    return draw.choice(schema.get("enum") or ("a", "bridge", "1", *TEXTS))


def made(family: str, folder: Path, capsys: pytest.CaptureFixture[str], **section: Any) -> Any:
    with running(rubbish) as server:  # type: ignore[arg-type]
        author = {"base_url": server.url, "model": "poor", "retries": 0}
        recipe = {"family": family, "dir": str(folder / "out"), "author": author, family: section}
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        status = main(["synthesize", str(path)])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    report = json.loads((folder / "out/report.json").read_text())
    assert report["kept"] == 0
    refused = {gate: entry["tasks"] for gate, entry in report["refused"].items()}
    assert sum(refused.values()) == report["made"]
    return report["made"], {**refused, **report["drafts"]}


def test_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "corpus")
    section = {
        "corpus": str(tmp_path / "corpus"),
        "index": str(tmp_path / "index"),
        "count": 8,
        "helpful": 0.5,
    }
    count, refused = made("search", tmp_path, capsys, **section)
    assert count == 8 and refused, refused


@pytest.mark.e2e
def test_general(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrap_of()
    section = {"categories": ["a", "b"], "per_category": 4, "max_turns": 6, "bash_s": 5.0}
    count, refused = made("general", tmp_path, capsys, **section)
    assert count == 8 and {"database", "form"} <= set(refused), refused
