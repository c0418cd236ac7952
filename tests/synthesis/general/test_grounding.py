"""The grounding gate, without a sandbox: solutions must take their answers from tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from keel.rl.turns import ToolCall
from keel.synthesis.general import gates
from keel.synthesis.general.gates import SolutionResult, grounded
from keel.synthesis.ledger import Rejected

Ask = Callable[[], Awaitable[Any]]
RECORDS = [{"name": f"thing {n}", "stock": 5 + n} for n in range(4)]
LIST = ToolCall(call_id="c", name="products", arguments={})


def held(solution: Callable[[Ask], Awaitable[Any]], output: str, monkeypatch: Any) -> None:
    """Run `solution` through the gate with one tool that returns a fixed text. Raises Rejected."""

    async def driven(_: object, __: object, source: Any, ___: object, asked: Any) -> Any:
        async def ask() -> Any:
            text = (await asked(LIST))["text"]
            return json.loads(text) if text[:1] in ("[", "{") else text

        return await source(ask)

    async def known(_: object) -> dict[str, str]:
        return {"text": output}

    async def work() -> None:
        answer = await driven(None, None, solution, None, known)
        result = SolutionResult(answer=answer, results=((LIST, {"text": output}),))
        await grounded(None, {}, solution, 0, result)  # type: ignore[arg-type]

    monkeypatch.setattr(gates, "_run_solution", driven)
    asyncio.run(work())


async def length(ask: Ask) -> int:
    return len(await ask())


async def knows(ask: Ask) -> int:
    await ask()
    return 4


async def looks(ask: Ask) -> str:
    """Fails on tool results with other names and numbers."""
    for each in await ask():
        if each not in RECORDS:
            raise Rejected("solution", "KeyError")
    return "thing 0"


@pytest.mark.parametrize(
    ("solution", "output"),
    [
        (length, json.dumps(RECORDS)),
        (length, json.dumps(RECORDS[:1])),
        (length, json.dumps({each["name"]: each["stock"] for each in RECORDS})),
        (looks, json.dumps(RECORDS)),
    ],
)
def test_grounded_solutions_pass(
    solution: Any, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(solution, output, monkeypatch)


def test_hard_coded_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Rejected):
        held(knows, json.dumps(RECORDS), monkeypatch)
