"""Small programming tasks with hidden tests. A program reads a number and prints the result of an
operation."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIGNS = {"+": "plus", "-": "minus", "*": "times"}
_INPUTS = (0, 5, -8, 31)


@dataclass(frozen=True)
class NumberProgram:
    """A program that a task asks for. It applies one operation to a number."""

    sign: str
    number: int

    @property
    def question(self) -> str:
        return f"Program: read n, print n {self.sign} {self.number}."

    @property
    def source(self) -> str:
        return f"print(int(input()){self.sign}{self.number})"

    def after(self, n: int) -> int:
        return {"+": n + self.number, "-": n - self.number, "*": n * self.number}[self.sign]


def every_program(draw: random.Random) -> list[NumberProgram]:
    """Return all programs with a two-digit operand, in random order."""
    made = [NumberProgram(sign, number) for sign in _SIGNS for number in range(10, 100)]
    draw.shuffle(made)
    return made


def answer(source: str) -> str:
    return f"```\n{source}\n```"


def line(program: NumberProgram) -> Mapping[str, Any]:
    """Return the task's fields for its JSONL line."""
    tests = [{"stdin": f"{n}\n", "stdout": f"{program.after(n)}\n"} for n in _INPUTS]
    name = f"{_SIGNS[program.sign]}-{program.number}"
    return {"id": name, "prompt": program.question, "tests": tests}


def write(folder: Path, count: int, seed: int) -> None:
    """Write `tasks.jsonl` into a new folder."""
    folder.mkdir(parents=True)
    made = every_program(random.Random(f"programs {seed}"))[:count]
    lines = [json.dumps(line(program)) for program in made]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
