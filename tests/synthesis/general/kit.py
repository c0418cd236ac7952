"""A small environment that passes every gate, in replaceable parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keel.configs.synthesis import GeneralConfig
from keel.synthesis.general import gates
from keel.synthesis.general.sandboxes import GeneralSandboxes
from tests.waiting import PATIENCE_S

FRUIT = [
    {"name": name, "price": price, "stall": stall}
    for name, price, stall in [
        ("apple", 4, "east"),
        ("fig", 9, "west"),
        ("grape", 7, "east"),
        ("lime", 3, "west"),
        ("melon", 12, "east"),
        ("plum", 6, "west"),
    ]
]
TOOLS = '''\
"""Fruit on a market."""


def fruit(stall: str) -> list[str]:
    """What a stall sells: east or west."""
    return [each["name"] for each in database["fruit"] if each["stall"] == stall]


def price(name: str) -> int:
    """The price of a fruit."""
    for each in database["fruit"]:
        if each["name"] == name:
            return each["price"]
    raise LookupError(f"there is no {name!r}")
'''
SOLVE = """\
def solve(tools):
    prices = {name: tools.price(name=name) for name in tools.fruit(stall="east")}
    best = min(prices, key=prices.get)
    return {"name": best, "price": prices[best]}
"""
VERIFY = """\
def verify(answer, database):
    east = [each for each in database["fruit"] if each["stall"] == "east"]
    best = min(east, key=lambda each: each["price"])
    return answer == {"name": best["name"], "price": best["price"]}
"""
HARDER_SOLVE = SOLVE.replace(
    'tools.fruit(stall="east")', '(*tools.fruit(stall="east"), *tools.fruit(stall="west"))'
)
HARDER_VERIFY = VERIFY.replace(' if each["stall"] == "east"', "")
QUESTIONS = (
    "Which fruit of stall east is the cheapest? A JSON object with name and price.",
    "Which fruit of stalls east and west is the cheapest? A JSON object with name and price.",
)
CONFIG: dict[str, Any] = dict.fromkeys(("call_s", "solve_s", "verify_s", "bash_s"), PATIENCE_S)


def config(**changes: Any) -> GeneralConfig:
    return GeneralConfig(**{**CONFIG, **changes})


def counted(*passed: int) -> gates.Reference:
    """A reference policy with a fixed number of passed attempts per task."""

    async def attempts(rooms: GeneralSandboxes, environment: Path, number: int) -> int:
        return passed[number]

    return attempts


def environment(folder: Path, **parts: str) -> Path:
    """Write a folder with two tasks, replacing some of `tools`, `solve`, `verify` (of the first),
    `harder_solve`, `harder_verify`."""
    pieces = {
        "tools": TOOLS,
        "solve": SOLVE,
        "verify": VERIFY,
        "harder_solve": HARDER_SOLVE,
        "harder_verify": HARDER_VERIFY,
        **parts,
    }
    folder.mkdir(parents=True)
    (folder / "database.json").write_text(json.dumps({"fruit": FRUIT}))
    (folder / "tools.py").write_text(pieces["tools"])
    for name in ("solve", "verify"):
        both = (pieces[name], pieces[f"harder_{name}"])
        numbered = [text.replace(f"def {name}(", f"def {name}_{n}(") for n, text in enumerate(both)]
        (folder / f"{name}.py").write_text("\n\n".join(numbered))
    tasks = [{"question": question, "tools": ["fruit", "price"]} for question in QUESTIONS]
    about = {"name": folder.name, "category": "fruit", "tasks": tasks}
    (folder / "task.json").write_text(json.dumps(about))
    return folder


async def held(
    rooms: GeneralSandboxes, path: Path, reference: gates.Reference, seed: int = 3
) -> list[int]:
    """Run all tasks of a folder through every gate. Returns the calls of each solution; raises
    Rejected."""
    specs = await gates.typed(rooms, path)
    tasks = json.loads((path / "task.json").read_text())["tasks"]
    solution = (path / "solve.py").read_text()
    answers, before, calls = list[Any](), None, list[int]()
    for number in range(len(tasks)):
        task = gates.TaskDraft(
            rooms=rooms, path=path, number=number, specs=specs, solution=solution, seed=seed
        )
        answer, count, before = await task.check(answers, before, reference)
        answers.append(answer)
        calls.append(count)
    return calls
