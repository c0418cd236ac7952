"""Environments from a scripted author, from the database to the last task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.synthesis.author import AuthorReply, BudgetSpent
from keel.synthesis.general.pipeline import GeneralPipeline
from tests.agents.sandboxes import wrap_of
from tests.synthesis.authors import ScriptedAuthor, run_pipeline
from tests.synthesis.general.kit import (
    FRUIT,
    HARDER_SOLVE,
    HARDER_VERIFY,
    QUESTIONS,
    SOLVE,
    TOOLS,
    VERIFY,
    config,
)

pytestmark = pytest.mark.e2e

STALLS = '''\
def stalls() -> list[str]:
    """All stalls."""
    return sorted({each["stall"] for each in database["fruit"]})
'''
HARDEST = (
    "Which fruit of all stalls is the dearest? A JSON object with name and price.",
    SOLVE.replace("min(", "max(").replace(
        'tools.fruit(stall="east")', "[n for s in tools.stalls() for n in tools.fruit(stall=s)]"
    ),
    HARDER_VERIFY.replace("min(", "max("),
)
SQLITE = f"""\
python3 - <<'END'
import sqlite3
rows = {[(each["name"], each["price"], each["stall"]) for each in FRUIT]}
with sqlite3.connect("market.sqlite") as database:
    database.execute("CREATE TABLE fruit (name TEXT, price INTEGER, stall TEXT)")
    database.executemany("INSERT INTO fruit VALUES (?, ?, ?)", rows)
END"""


def called(name: str, **arguments: Any) -> AuthorReply:
    return AuthorReply(content="", calls=(ToolCall(call_id="c", name=name, arguments=arguments),))


def reply(**parts: str) -> str:
    return "Here it is.\n\n" + "\n".join(
        f"## {name}\n```python\n{text}```" for name, text in parts.items()
    )


def task(question: str, solve: str, verify: str, **more: str) -> str:
    return reply(**more, question=f"{question}\n", solve=solve, verify=verify)


EASY = task(QUESTIONS[0], SOLVE, VERIFY)
HARDER = task(QUESTIONS[1], HARDER_SOLVE, HARDER_VERIFY)


def market(*tasks: str, tools: Sequence[str] = (reply(tools=TOOLS),), right: int = 1) -> Any:
    """Scripted author: searches, fills a database and writes tasks. As a policy it solves the first
    task, and each later one `right` times less often."""
    written = {"tools": list(tools), "task": list(tasks)}
    tried: dict[str, int] = {}

    def says(
        messages: Sequence[Message], offered: Sequence[ToolSpec], purpose: str
    ) -> AuthorReply | str:
        turn = sum(message["role"] == "assistant" for message in messages)
        if purpose == "database":
            data = json.dumps({"fruit": FRUIT})
            return [
                called("search", query="fruit on markets"),
                called("bash", command=f"echo '{data}' > market.json"),
                called("submit_database", path="market.json"),
            ][turn]
        if purpose != "attempt":
            return written[purpose].pop(0)
        if turn:
            return "I have it."
        question = str(messages[0]["content"])
        tried[question] = tried.get(question, 0) + 1
        answers = {QUESTIONS[0]: ("apple", 4), QUESTIONS[1]: ("lime", 3), HARDEST[0]: ("melon", 12)}
        name, price = answers[question]
        price += tried[question] <= right * list(answers).index(question)
        return called("submit_result", answer_text=json.dumps({"name": name, "price": price}))

    return says


def made(
    folder: Path, author: ScriptedAuthor, **changes: Any
) -> tuple[str, dict[str, Any], GeneralPipeline]:
    wrap_of()
    notes = folder / "notes"
    notes.mkdir(exist_ok=True, parents=True)
    (notes / "fruit.md").write_text("Of fruit, markets sell apples, figs and limes.")
    options = {"categories": ("Fruit markets",), "attempts": 2, "documents": str(notes), **changes}
    settings = config(**options)
    out = folder / "out"
    pipeline = GeneralPipeline(settings, out, author=author, reference=author, seed=1)
    return *run_pipeline(pipeline, out), pipeline


def test_from_a_category_to_three_tasks(tmp_path: Path) -> None:
    """The author fixes rejected drafts, and adds a tool when needed."""
    author = ScriptedAuthor(
        market(
            "No sections at all.",
            task(QUESTIONS[0], SOLVE, VERIFY.replace("return answer", "return bool(answer) or")),
            EASY,
            HARDER,
            task(*HARDEST),
            task(*HARDEST, tools=f'{STALLS}\n\ndatabase["fruit"][0]["price"] = 5\n'),
            task(*HARDEST, tools=STALLS),
            tools=[reply(tools="def f(x):\n    return x\n"), reply(tools=TOOLS)],
        )
    )
    why, report, _ = made(tmp_path, author)
    assert (why, report["made"], report["kept"], report["refused"]) == ("", 1, 1, {})
    assert report["drafts"] == {"typed": 1, "form": 1, "verified": 1, "solution": 1, "earlier": 1}
    folder = tmp_path / "out/tasks/fruit_markets-0"
    assert {path.name for path in folder.iterdir()} == {
        *("database.json", "tools.py", "task.json", "solve.py", "verify.py", "provenance.json")
    }
    about = json.loads((folder / "task.json").read_text())
    assert [len(each["tools"]) for each in about["tasks"]] == [2, 2, 3]
    assert about["category"] == "Fruit markets" and not list((tmp_path / "out/making").iterdir())
    history = json.loads((folder / "provenance.json").read_text())
    assert history["passed"] == [2, 1, 0] and history["calls_of_the_solution"] == [4, 8, 9]
    assert history["author"] == history["reference"] == "scripted"
    lookup = next(
        messages
        for purpose, messages in author.asked
        if purpose == "database" and messages[-1]["role"] == "tool"
    )
    assert "apples, figs and limes" in lookup[-1]["content"]
    attempt = next(messages for purpose, messages in author.asked if purpose == "attempt")
    assert attempt == [{"role": "user", "content": QUESTIONS[0]}]


def test_sqlite_and_resume(tmp_path: Path) -> None:
    """Finished work is kept; unfinished work starts over."""
    tools = TOOLS.replace('database["fruit"]', 'database.execute("SELECT * FROM fruit")')
    verify = VERIFY.replace('database["fruit"]', 'database.execute("SELECT * FROM fruit")')
    first = market(task(QUESTIONS[0], SOLVE, verify), tools=[reply(tools=tools)])

    def says(
        messages: Sequence[Message], offered: Sequence[ToolSpec], purpose: str
    ) -> AuthorReply | str:
        if purpose != "database":
            return first(messages, offered, purpose)
        if "number 2 of 2" in str(messages[1]["content"]):
            raise BudgetSpent("budget.tokens = 9")
        if messages[-1]["role"] == "tool":
            return called("submit_database", path="market.sqlite")
        return called("bash", command=SQLITE)

    settings = {"per_category": 2, "steps": 1, "attempts": 0}
    author = ScriptedAuthor(says)
    why, report, pipeline = made(tmp_path, author, **settings)
    assert list(pipeline.keys) == ["fruit_markets-0", "fruit_markets-1"]
    assert why == "budget.tokens = 9" and report["made"] <= 1
    folder = tmp_path / "out/tasks/fruit_markets-0"
    if not folder.exists():  # the spent budget ended both
        pytest.fail("the first was not finished")
    before = (folder / "provenance.json").stat().st_mtime_ns
    (tmp_path / "out/making/fruit_markets-1").mkdir()
    (tmp_path / "out/making/fruit_markets-1/tools.py").write_text("half")
    again = ScriptedAuthor(market(EASY))
    why, report, _ = made(tmp_path, again, **settings)
    assert (why, report["kept"]) == ("", 2)
    assert (folder / "provenance.json").stat().st_mtime_ns == before
    assert sum(purpose == "tools" for purpose, _ in again.asked) == 1
    assert (folder / "database.sqlite").exists()
