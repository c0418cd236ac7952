"""Prompts with a number as answer for `benchmarks.real_model`, and a calculator for its agent."""

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

ROWS = 4000
MAX_CHARACTERS = 240
"""Maximum length of a question. Longer ones are skipped."""
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gcd": {"max_value": 100},
    "lcm": {"max_value": 20},
    "products": {"min_digits": 1, "max_digits": 1},
    "letter_counting": {"min_words": 3, "max_words": 6},
    "number_sequence": {},
}
"""Tasks of reasoning_gym in `hard`, with their parameters."""


def arithmetic(count: int) -> Iterator[tuple[str, str]]:
    """Yield distinct questions about two numbers, and their answers."""
    draw, seen = random.Random(7), set[tuple[int, str, int]]()
    words = {"+": "plus", "-": "minus", "*": "times"}
    while len(seen) < count:
        sign = draw.choice("+-*")
        most = (9, 40) if sign == "*" else (99, 99)
        a, b = draw.randint(3 if sign == "*" else 11, most[0]), draw.randint(11, most[1])
        a, b = (b, a) if sign == "-" and b > a else (a, b)
        if (a, sign, b) in seen:
            continue
        seen.add((a, sign, b))
        template = draw.choice(
            ("What is {0} {3} {2}?", "Compute {0} {1} {2}.", "Calculate {0} {3} {2}, please.")
        )
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        yield template.format(a, sign, b, words[sign]), str(answer)


def hard(count: int) -> Iterator[tuple[str, str]]:
    """Yield distinct questions and their answers of all tasks in `FAMILIES`, in turn. Keel would
    leave out repeated questions, and TRL would not."""
    from keel.data.procedural import build_task  # noqa: PLC0415

    each = [build_task(name, knobs, count, 7, name) for name, knobs in FAMILIES.items()]
    entries = (dataset[index] for index in range(count) for dataset in each)
    answers = {str(entry["question"]): str(entry["answer"]) for entry in entries}
    short = (pair for pair in answers.items() if len(pair[0]) <= MAX_CHARACTERS)
    yield from islice(short, count)


TASKS: Mapping[str, Callable[[int], Iterator[tuple[str, str]]]] = {
    "arithmetic": arithmetic,
    "hard": hard,
}


def write_prompts(path: Path, tasks: str, *, small: bool = False) -> None:
    """Write chat prompts with their answers, one JSON line each, in a random order."""
    rows = list(TASKS[tasks](64 if small else ROWS))
    random.Random(0).shuffle(rows)
    with path.open("w") as file:
        for index, (question, answer) in enumerate(rows):
            messages = [{"role": "user", "content": question}]
            file.write(
                json.dumps({"id": str(index), "messages": messages, "answer": answer}) + "\n"
            )


EXAMPLE = (
    ("user", "What is 45 plus 18?"),
    ("assistant", "calc(45 + 18)"),
    ("user", "45 + 18 = 63"),
    ("assistant", "The answer is 63."),
)
"""Conversation at the start of each episode that demonstrates a calculator call."""
_CALL = re.compile(r"calc\(([^()]*)\)")
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def calculate(expression: str) -> str:
    """Calculate sums, differences, products and quotients of whole numbers."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    text = expression.strip()[:60]
    try:
        return f"{text} = {value(ast.parse(text, mode='eval').body)}"
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return "The calculator does not understand that."


class Calculator:
    """Environment whose policy may call a calculator in its text, so any chat template will do."""

    def opening(self, task: Mapping[str, Any], seed: int) -> list[Mapping[str, Any]]:
        shown = [{"role": role, "content": text} for role, text in EXAMPLE]
        return [*shown, *task["messages"]]

    def reply(self, text: str) -> str | None:
        """Answer a turn that calls the calculator; others end the episode."""
        calls = _CALL.findall(text)
        return calculate(calls[-1]) if calls else None


def calculator_knobs(source: str) -> dict[str, Any]:
    """Keel's knobs that let a source use the calculator once or twice."""
    prefix = f"data.sources[{source}].environment"
    return {
        f"{prefix}.target": f"{Path(__file__)}:Calculator",
        f"{prefix}.isolation": "none-i-trust-the-environments",
        "agents.max_turns": 3,
        "agents.window": 448,
    }
