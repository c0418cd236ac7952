"""Whether a solution has its answer from the tools, without a sandbox around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from keel.configs.synthesis import GeneralConfig
from keel.rl.turns import ToolCall
from keel.synthesis.general import gates
from keel.synthesis.general.gates import SolutionResult, deterministic, grounded
from keel.synthesis.ledger import Rejected

Ask = Callable[[], Awaitable[Any]]
RECORDS = [{"name": f"thing {n}", "stock": 5 + n} for n in range(4)]
LIST = ToolCall(call_id="c", name="products", arguments={})


def held(solution: Callable[[Ask], Awaitable[Any]], said: str, monkeypatch: Any) -> None:
    """`solution` through the gate, whose one tool says so. Raises Rejected."""

    async def driven(_: object, __: object, source: Any, ___: object, asked: Any) -> Any:
        async def ask() -> Any:
            text = (await asked(LIST))["text"]
            return json.loads(text) if text[:1] in ("[", "{") else text

        return await source(ask)

    async def known(_: object) -> dict[str, str]:
        return {"text": said}

    async def work() -> None:
        answer = await driven(None, None, solution, None, known)
        found = SolutionResult(answer=answer, results=((LIST, {"text": said}),))
        await grounded(None, {}, solution, 0, found)  # type: ignore[arg-type]

    monkeypatch.setattr(gates, "_driven", driven)
    asyncio.run(work())


async def length(ask: Ask) -> int:
    return len(await ask())


async def names(ask: Ask) -> int:
    return len({each["name"] for each in await ask()})


async def below(ask: Ask) -> int:
    return len((await ask())["products"])


async def lines(ask: Ask) -> int:
    return len((await ask()).splitlines())


async def knows(ask: Ask) -> int:
    await ask()
    return 4


async def looks(ask: Ask) -> str:
    """It goes through what it gets, and cannot go on with other names and numbers."""
    for each in await ask():
        if each not in RECORDS:
            raise Rejected("solution", "KeyError")
    return "thing 0"


@pytest.mark.parametrize(
    ("solution", "said"),
    [
        (length, json.dumps(RECORDS)),
        (length, json.dumps(RECORDS[:1])),
        (length, json.dumps({each["name"]: each["stock"] for each in RECORDS})),
        (names, json.dumps(RECORDS)),
        (below, json.dumps({"products": RECORDS, "page": 1})),
        (lines, "\n".join(str(each["name"]) for each in RECORDS)),
        (looks, json.dumps(RECORDS)),
    ],
)
def test_a_solution_that_counts_or_fails_over_other_things_is_kept(
    solution: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(solution, said, monkeypatch)


def test_an_answer_that_is_known_is_refused_whatever_the_tools_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Rejected):
        held(knows, json.dumps(RECORDS), monkeypatch)


def test_parameters_that_can_have_no_value_are_probed() -> None:
    """`Literal[()]`, an Enum without members, and what a process that lies says of its tools."""

    class GeneralSandboxes:
        config = GeneralConfig()

        async def workshop(self, _: str, __: object, name: str, **given: Any) -> list[Any]:
            if name == "strings":
                return ["fig"]
            asked.append(given["arguments"]["calls"])
            return asked[-1]

    asked: list[list[dict[str, Any]]] = []
    shape = {"none": {"enum": []}, "any": {"type": "array", "items": True}, "word": {"enum": ["x"]}}
    specs = {"odd": {"parameters": {"type": "object", "properties": shape}}}
    asyncio.run(deterministic(GeneralSandboxes(), Path(), specs, [], seed=0))  # type: ignore[arg-type]
    assert asked[0][0]["arguments"] == {"none": None, "any": [None, None], "word": "x"}
