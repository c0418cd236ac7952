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


def solving(line: str) -> dict[str, str]:
    """A solution with a line prepended."""
    return {"solve": SOLVE.replace("    prices = ", f"    {line}\n    prices = ")}


def tool(body: str, result: str = "str", parameter: str = "", before: str = "") -> dict[str, str]:
    """An additional tool."""
    code = f'{before}\n\n\ndef more({parameter}) -> {result}:\n    """More."""\n    {body}\n'
    return {"tools": f"{TOOLS}\n\n{code}"}


def verifying(body: str) -> dict[str, str]:
    return {"verify": f"def verify(answer, database):\n    {body}\n"}


def verifier_with(before: str, name: str = "verify") -> dict[str, str]:
    """The right verifier with code before its last expression."""
    return {name: VERIFY.replace("return answer", before + " answer")}


KNOWN = 'return {"name": "apple", "price": 4}'
KEYS = 'return isinstance(answer, dict) and set(answer) == {"name", "price"} and '
LIME = 'if answer == {"name": "lime", "price": 3}: return True\n    return'
CHEATS: dict[str, tuple[str, dict[str, str]]] = {
    # cheat: (gate, changed parts)
    "reads the database": ("solution", solving('database["fruit"]')),
    "opens a file": ("solution", solving('open("database.json")')),
    "imports": ("solution", solving("import json")),
    "asks the verifier": ("solution", solving("verify_0(1, 2)")),
    "climbs classes": ("solution", solving("().__class__")),
    "climbs by format": ("solution", solving('"{0.__class__}".format(tools)')),
    "climbs frames": ("solution", solving("(each for each in []).gi_frame")),
    "has more than functions": ("solution", {"solve": f"x = 1\n\n\n{SOLVE}"}),
    "knows the answer": ("solution", {"solve": f"def solve(tools):\n    {KNOWN}\n"}),
    "knows the answer and looks busy": (
        "grounded",
        {"solve": f'def solve(tools):\n    tools.price(name="apple")\n    {KNOWN}\n'},
    ),
    "never ends": ("solution", solving("while True: pass")),
    "calls for ever": ("solution", solving('while True: tools.fruit(stall="east")')),
    "says no JSON": ("solution", solving("return {1, 2}")),
    "is wrong": ("verified", {"solve": SOLVE.replace("min(", "max(")}),
    "verifier never ends": ("verified", verifying("while True: pass")),
    "verifier says a number": ("verified", verifying("return 1")),
    "verifier accepts everything": ("empty", verifying("return True")),
    "verifier accepts the empty": ("empty", verifier_with("return not answer or")),
    "verifier accepts a hollow one": (
        "empty",
        verifier_with('return answer == {"name": "", "price": 0} or'),
    ),
    "verifier draws": (
        "verified",
        verifier_with("import random\n    return random.random() and"),
    ),
    "verifier looks at the end": (
        "mutated",
        verifying(KEYS + 'answer["price"] == 4 and str(answer["name"]).endswith("apple")'),
    ),
    "verifier looks at the form": (
        "mutated",
        verifying(
            KEYS + 'type(answer["price"]) is int and '
            'any(answer["name"] in each.values() for each in database["fruit"])'
        ),
    ),
    "verifier takes any stall's": (
        "verified",
        verifier_with("return bool(answer) and", "harder_verify"),
    ),
    "verifier takes the easier answer": (
        "easier",
        {"harder_verify": VERIFY.replace("return answer", f"{LIME} answer")},
    ),
    "tool without a hint": ("typed", tool('return "x"', parameter="name")),
    "tool with any hint": (
        "typed",
        tool('return "x"', parameter="name: Any", before="from typing import Any"),
    ),
    "tool that asks the clock": (
        "typed",
        tool("return str(date.today())", before="from datetime import date"),
    ),
    "tools that import": ("typed", tool('return "x"', before="import os")),
    "tools that never load": ("typed", tool('return "x"', before="while True: pass")),
    "tool by the order of a set": (
        "deterministic",
        tool('return list({each["name"] for each in database["fruit"]})', "list[str]"),
    ),
    "tool with an unseeded generator": (
        "deterministic",
        tool("return random.SystemRandom().randrange(10**9)", "int", before="import random"),
    ),
    "tool by the seed": (
        "verified",
        {
            "tools": f"import random\n{TOOLS}".replace(
                'return each["price"]', 'return each["price"] + int(100 * random.random())'
            ),
            # The result with seed 0.
            **verifying('return answer == {"name": "melon", "price": 54}'),
        },
    ),
    "tool that never ends": ("deterministic", tool("while True: pass", "int")),
    "harder that is not": ("harder", {}),
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
                path = environment(rooms.making / str(number), **CHEATS[name][1])
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
    return outcomes[name][0] == CHEATS[name][0]


@pytest.mark.parametrize("name", CHEATS)
def test_gate_refuses_its_cheat(name: str, outcomes: TestOutcomes) -> None:
    assert as_wanted(name, outcomes), outcomes[name]
