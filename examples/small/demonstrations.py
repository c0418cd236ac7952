"""Scripted conversations about the small tasks, for the cold start of the tiny model.

Each task is solved once with tools and guessed once. Recipes select these functions with
`data.sources[].environment.demonstrations`. Names and numbers are drawn separately from those in
the tasks, so no conversation is about a training or held-out task.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keel.agents.env_runtime.tool_objects import Tool, methods_of
from keel.agents.environments.code.environment import Repository
from keel.agents.environments.code.files import apply_edit, number_lines
from keel.agents.environments.code.languages import REPO
from keel.agents.environments.demonstrations import Demonstration, play
from keel.agents.environments.general.author_code import SUBMIT, tools_of
from keel.agents.environments.interpreter import Interpreter
from keel.agents.environments.search.documents import Document, Hit
from keel.agents.environments.search.environment import Search
from keel.agents.environments.trip.plans import Calls
from keel.examples.small import pace, prices, towers
from keel.rl.turns import Message
from keel.synthesis.code.pipeline import PROMPT

SUM = "State the final answer to the following arithmetic problem: {sum} ="
"""Prompt of the reasoning_gym task chain_sum."""


class Stand:
    """An environment's tools as the policy sees them, called in this process."""

    def __init__(
        self,
        messages: Sequence[Message],
        specs: Sequence[Mapping[str, Any]],
        answers: Mapping[str, Callable[..., Any]],
        ends: Collection[str] = (),
    ) -> None:
        self._opening = {"messages": list(messages), "tools": list(specs)}
        self._answers, self._ends = answers, ends

    def opening(self, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return self._opening

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"text": str(self._answers[name](**arguments)), "done": name in self._ends}


def price_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Return conversations for `keel.examples.small.prices`. The hasty ones submit a guess."""
    (spec,) = (tool.spec for tool in tools_of(prices.TOOLS, {}).values())
    specs = [
        *(
            {key: one[key] for key in ("name", "description", "parameters")}
            for one in (spec, SUBMIT)
        )
    ]

    def draw_one(draw: random.Random) -> Demonstration:
        shop = prices.draw_prices(draw)
        question = prices.draw_question(draw, shop)

        def price(item: str) -> int:
            return shop[item]

        def submit(answer_text: str) -> str:
            return ""

        stand = Stand(
            _asks(question.text),
            specs,
            {"price": price, "submit_result": submit},
            ends=("submit_result",),
        )

        def look() -> Calls:
            seen: dict[str, int] = {}
            for item in question.items:
                seen[item] = int((yield "price", {"item": item}))
            yield "submit_result", {"answer_text": str(question.answer(seen))}

        def guess() -> Calls:
            wrong = draw.choice([p for p in range(10, 100) if p != question.answer(shop)])
            dearer = max(question.items, key=shop.__getitem__)
            answer = str(wrong) if len(question.items) == 1 else dearer
            yield "submit_result", {"answer_text": answer}

        return _both(stand, look(), guess())

    return _drawn("prices", count, seed, draw_one)


def tower_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Return conversations for `keel.examples.small.towers`. The hasty ones invent a name.
    `arguments` are those of the environment."""
    about = {key: arguments[key] for key in ("results", "cite") if key in arguments}

    def draw_one(draw: random.Random) -> Demonstration:
        (tower, builder), (_, wrong) = towers.draw_towers(draw, 2).items()
        search = Search(ready=_OneDocument(towers.document(tower, builder)), **about)
        task = {"messages": _asks(f"Who built {tower}?"), "reward": {"kind": "answer"}}
        tools = methods_of(search)
        specs = [Tool(name, method).spec for name, method in tools.items()]
        stand = Stand(search.opening(task), specs, tools)

        def look() -> Calls:
            result = yield "search", {"query": tower}
            return f"<answer>{result.split()[-3]}</answer>"

        return _both(stand, look(), _says(f"<answer>{wrong}</answer>"))

    return _drawn("towers", count, seed, draw_one)


def pace_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Return conversations for `keel.examples.small.pace`. The hasty ones edit a file without
    reading it."""
    tools = methods_of(object.__new__(Repository))
    specs = [Tool(name, method).spec for name, method in tools.items()]

    def draw_one(draw: random.Random) -> Demonstration:
        is_now, expected = pace.draw_paces(draw, 2)
        text = pace.SOURCE.format(pace=is_now)

        def edit(path: str, old: str, new: str) -> str:
            try:
                return apply_edit(path, text, old, new)[1]
            except ValueError as error:
                return str(error)

        issue = PROMPT.format(name="pace", repo=REPO, issue=pace.issue(expected))

        def view(path: str) -> str:
            return number_lines(text, 1, 0)

        stand = Stand(_asks(issue), specs, {"view": view, "edit": edit})

        def change(old: str) -> Calls:
            yield "edit", {"path": "pace.py", "old": old, "new": str(expected)}
            return "Done."

        def look() -> Calls:
            seen = yield "view", {"path": "pace.py"}
            return (yield from change(seen.split()[-1]))

        guess = draw.choice([p for p in range(10, 100) if p != is_now])
        return _both(stand, look(), change(str(guess)))

    return _drawn("pace", count, seed, draw_one)


def sum_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Return conversations in which chain_sum from reasoning_gym is solved with an interpreter. The
    hasty ones drop the last number."""
    spec = Tool("python", methods_of(object.__new__(Interpreter))["python"]).spec

    def draw_one(draw: random.Random) -> Demonstration:
        numbers = [draw.randrange(100, 1000) for _ in range(3)]
        signs = [draw.choice("+-") for _ in numbers[1:]]
        terms = [f"{numbers[0]}", *(f"{s} {n}" for s, n in zip(signs, numbers[1:], strict=True))]
        values = [numbers[0]]
        for sign, number in zip(signs, numbers[1:], strict=True):
            values.append(values[-1] + (number if sign == "+" else -number))
        reply = " ".join(terms)

        def python(code: str) -> int:
            return values[-1]

        stand = Stand(_asks(SUM.format(sum=reply)), [spec], {"python": python})

        def look() -> Calls:
            return (yield "python", {"code": reply})

        return _both(stand, look(), _says(str(values[-2])))

    return _drawn("sums", count, seed, draw_one)


class _OneDocument:
    def __init__(self, value: Mapping[str, str]) -> None:
        name = f"{towers.FILE}#{value['id']}"
        self._document = Document(name=name, title=value["title"], text=value["text"])

    def search(self, query: str, most: int) -> list[Hit]:
        one = self._document
        return [Hit(name=one.name, title=one.title, snippet=one.text)]

    def document(self, name: str) -> Document | None:
        return self._document if name == self._document.name else None


def _asks(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _says(text: str) -> Calls:
    return text
    yield  # without a call


def _both(stand: Stand, look: Calls, haste: Calls) -> Demonstration:
    worked, hasty = (play(stand, {}, 0, calls) for calls in (look, haste))
    return Demonstration(tools=worked.tools, worked=worked.said, hasty=hasty.said)


def _drawn(
    family: str, count: int, seed: int, draw_one: Callable[[random.Random], Demonstration]
) -> list[Demonstration]:
    return [draw_one(random.Random(f"{family} shown {seed} {n}")) for n in range(count)]
