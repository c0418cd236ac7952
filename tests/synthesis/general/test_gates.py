"""Each gate against a cheat that only it catches, and malicious code."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from keel.configs.synthesis import GeneralConfig
from keel.synthesis.general.sandboxes import GeneralSandboxes
from keel.synthesis.ledger import Rejected
from tests.agents.sandboxes import wrap_of
from tests.synthesis.general.kit import SOLVE, TOOLS, VERIFY, config, counted, environment, held
from tests.waiting import within_some

pytestmark = pytest.mark.e2e
AT_ONCE = 3

BEFORE = "    prices = "
"""Start of the solution."""


def solving(line: str) -> dict[str, str]:
    """A solution with a line prepended."""
    return {"solve": SOLVE.replace(BEFORE, f"    {line}\n{BEFORE}")}


def tool(text: str) -> dict[str, str]:
    """An additional tool."""
    return {"tools": f"{TOOLS}\n\n{text}"}


def verifying(body: str) -> dict[str, str]:
    return {"verify": f"def verify(answer, database):\n    {body}\n"}


CHEATS: dict[str, tuple[dict[str, str], str]] = {
    "reads the database": (solving('database["fruit"]'), "solution"),
    "opens a file": (solving('open("database.json")'), "solution"),
    "imports": (solving("import json"), "solution"),
    "asks the verifier": (solving("verify_0(1, 2)"), "solution"),
    "climbs classes": (solving("().__class__"), "solution"),
    "climbs by format": (solving('"{0.__class__}".format(tools)'), "solution"),
    "climbs frames": (solving("(each for each in []).gi_frame"), "solution"),
    "has a second function": (
        {"solve": f"def helper():\n    pass\n\n\nx = 1\n\n\n{SOLVE}"},
        "solution",
    ),
    "knows the answer": (
        {"solve": 'def solve(tools):\n    return {"name": "apple", "price": 4}\n'},
        "solution",
    ),
    "knows the answer and looks busy": (
        {
            "solve": 'def solve(tools):\n    tools.price(name="apple")\n'
            '    return {"name": "apple", "price": 4}\n'
        },
        "grounded",
    ),
    "never ends": (solving("while True: pass"), "solution"),
    "calls for ever": (solving('while True: tools.fruit(stall="east")'), "solution"),
    "says no JSON": (solving("return {1, 2}"), "solution"),
    "is wrong": ({"solve": SOLVE.replace("min(", "max(")}, "verified"),
    "verifier never ends": (verifying("while True: pass"), "verified"),
    "verifier says a number": (verifying("return 1"), "verified"),
    "verifier accepts everything": (verifying("return True"), "empty"),
    "verifier accepts the empty": (
        {"verify": VERIFY.replace("return answer", "return not answer or answer")},
        "empty",
    ),
    "verifier accepts a hollow one": (
        {
            "verify": VERIFY.replace(
                "return answer", 'return answer == {"name": "", "price": 0} or answer'
            )
        },
        "empty",
    ),
    "verifier draws": (
        {
            "verify": VERIFY.replace(
                "    return", "    import random\n    return random.random() and"
            )
        },
        "verified",
    ),
    "verifier looks at the end": (
        verifying(
            'return isinstance(answer, dict) and set(answer) == {"name", "price"} and '
            'answer["price"] == 4 and str(answer["name"]).endswith("apple")'
        ),
        "mutated",
    ),
    "verifier looks at the form": (
        verifying(
            'return isinstance(answer, dict) and set(answer) == {"name", "price"} and '
            'type(answer["price"]) is int and '
            'any(answer["name"] in each.values() for each in database["fruit"])'
        ),
        "mutated",
    ),
    "verifier takes any stall's": (
        {"harder_verify": VERIFY.replace("return answer", "return bool(answer) and answer")},
        "verified",
    ),
    "verifier takes the easier answer": (
        {
            "harder_verify": VERIFY.replace(
                "return answer",
                'if answer == {"name": "lime", "price": 3}: return True\n    return answer',
            )
        },
        "easier",
    ),
    "tool without a hint": (
        tool('def more(name) -> str:\n    """More."""\n    return "x"\n'),
        "typed",
    ),
    "tool with any hint": (
        tool(
            "from typing import Any\n\n\n"
            'def more(name: Any) -> str:\n    """More."""\n    return "x"\n'
        ),
        "typed",
    ),
    "tool that asks the clock": (
        tool(
            "from datetime import date\n\n\n"
            'def more() -> str:\n    """More."""\n    return str(date.today())\n'
        ),
        "typed",
    ),
    "tools that import": (tool("import os\n"), "typed"),
    "tools that never load": (tool("while True: pass\n"), "typed"),
    "tool by the order of a set": (
        tool(
            'def more() -> list[str]:\n    """More."""\n'
            '    return list({each["name"] for each in database["fruit"]})\n'
        ),
        "deterministic",
    ),
    "tool with an unseeded generator": (
        tool(
            "import random\n\n\n"
            'def more() -> int:\n    """More."""\n'
            "    return random.SystemRandom().randrange(10**9)\n"
        ),
        "deterministic",
    ),
    "tool by the seed": (
        {
            "tools": f"import random\n{TOOLS}".replace(
                'return each["price"]', 'return each["price"] + int(100 * random.random())'
            ),
            # The result with seed 0.
            **verifying('return answer == {"name": "melon", "price": 54}'),
        },
        "verified",
    ),
    "tool that never ends": (
        tool('def more() -> int:\n    """More."""\n    while True: pass\n'),
        "deterministic",
    ),
    "harder that is not": ({}, "harder"),
}


ENDLESS = {name for name in CHEATS if "never" in name or "for ever" in name}
TestOutcomes = dict[str, tuple[str, str]]
"""Gate and reason of the rejection, by cheat."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> TestOutcomes:
    wrap_of()  # or a skip

    async def of(names: Collection[str], settings: GeneralConfig) -> TestOutcomes:
        results: TestOutcomes = {}
        slots = asyncio.Semaphore(AT_ONCE)
        async with GeneralSandboxes(
            tmp_path_factory.mktemp("general") / "making", settings
        ) as rooms:

            async def one(number: int, name: str) -> None:
                path = environment(rooms.making / str(number), **CHEATS[name][0])
                reference = counted(3, 3 if "that is not" in name else 1)
                async with slots:
                    try:
                        await held(rooms, path, reference)
                        results[name] = ("passes", "")
                    except Rejected as refused:
                        results[name] = (refused.gate, refused.reason)

            await asyncio.gather(*(one(n, name) for n, name in enumerate(names)))
        return results

    def endless(limit_s: float) -> TestOutcomes:
        settings = config(call_s=limit_s, verify_s=limit_s, solve_s=limit_s + 1)
        results = asyncio.run(of(ENDLESS, settings))
        assert all(as_wanted(name, results) for name in ENDLESS), results
        return results

    return within_some(endless, (1.0, 5.0, 20.0, 60.0)) | asyncio.run(
        of({*CHEATS} - ENDLESS, config())
    )


def as_wanted(name: str, outcomes: TestOutcomes) -> bool:
    return outcomes[name][0] == CHEATS[name][1]


@pytest.mark.parametrize("name", CHEATS)
def test_gate_refuses_its_cheat(name: str, outcomes: TestOutcomes) -> None:
    assert as_wanted(name, outcomes), outcomes[name]
