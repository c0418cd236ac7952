"""Commits to tasks in the sandbox, and the gates that execute code."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from keel.rl.turns import ToolCall
from keel.synthesis.author import AuthorReply
from tests.synthesis.authors import ScriptedAuthor
from tests.synthesis.code.projects import (
    AFTER,
    BEFORE,
    BROKEN,
    ISSUE,
    NEW_TEST,
    OLD_TEST,
    SETUP,
    TEST,
    config,
    made,
    repository,
    source,
)

pytestmark = pytest.mark.e2e
PASSES_ALREADY = OLD_TEST + "\n\ndef test_more():\n    assert total([2]) == 2\n"
# Tests that passed before the change fail after it.
BREAKS = "def total(numbers):\n    return sum(numbers) if not numbers else 3.5\n"


def refused(report: dict[str, Any]) -> dict[str, list[str]]:
    return {gate: list(details["reasons"]) for gate, details in report["refused"].items()}


def test_history_becomes_tasks(tmp_path: Path) -> None:
    git = repository(
        tmp_path / "git",
        ("Begin", BEFORE),
        (f"A: {ISSUE}", AFTER),
        (f"B: {ISSUE}", {"adding.py": BROKEN, "tests/test_adding.py": PASSES_ALREADY}),
        (f"C: {ISSUE}", {"adding.py": BREAKS, "tests/test_adding.py": NEW_TEST}),
    )
    out = tmp_path / "out"
    report, lines = made(config(source(git)), out)
    assert report["made"] == 3 and report["kept"] == 1, lines
    reasons = refused(report)
    assert reasons["P2F"] == ["1 tests pass before and not after"]
    assert "no test that fails before passes after" in reasons["F2P"][0]
    (line,) = map(json.loads, (out / "tasks.jsonl").read_text().splitlines())
    assert "Totals of an empty list" in line["prompt"] and line["reward"]["kind"] == "environment"
    instance = json.loads((out / "instances" / f"{line['id']}.json").read_text())
    where = "pytest::tests.test_adding::test_"
    assert instance["f2p"] == [f"{where}the_hidden_one"] and instance["p2p"] == [f"{where}some"]
    assert instance["canary"] and "+    return sum(numbers)" in instance["gold_patch"]
    # No file readable in an episode contains the answer.
    for path in (out / "environment").rglob("*"):
        if path.is_file():
            text = path.read_bytes()
            assert b"hidden_one" not in text and b"sum(numbers)" not in text, path
            assert path.stat().st_mode & stat.S_IROTH or "prefixes" in path.parts
    assert [one.name for one in (out / "environment" / "sealed").iterdir()] == [line["id"]]
    again, lines = made(config(source(git)), out)
    assert again == report and lines == ["3 of 3 tasks already made"]


def test_agent_fixes_a_failing_setup(tmp_path: Path) -> None:
    """The agent inspects the project, submits a broken setup, reads the error and fixes it."""
    git = repository(tmp_path / "git", ("Begin", BEFORE), (ISSUE, AFTER))
    prompts: list[str] = []

    def call(name: str, **arguments: Any) -> AuthorReply:
        one = ToolCall(call_id="c", name=name, arguments=arguments)
        return AuthorReply(content="", calls=(one,))

    def writes(messages: Any, tools: Any, purpose: str) -> AuthorReply:
        prompts.append(messages[-1]["content"])
        assert purpose == "setup" and [tool.name for tool in tools] == ["bash", "submit"]
        return [
            call("bash", command="ls; touch $PREFIX/left"),
            call("submit", setup="true", test="true"),
            call("submit", setup=f"test ! -e $PREFIX/left && {SETUP.strip()}", test=TEST),
        ][len(prompts) - 1]

    settings = source(git, setup="echo it cannot be done; exit 3")
    author = ScriptedAuthor(writes)
    report, lines = made(config(settings, setup_turns=5), tmp_path / "out", author)
    assert report["kept"] == 1, lines
    assert "it cannot be done" in prompts[0] and "adding.py" in prompts[1]
    assert prompts[2].startswith("none of 0 tests passes")
    report, _ = made(config(settings), tmp_path / "alone")
    assert "the set-up failed: it cannot be done" in refused(report)["setup"][0]
