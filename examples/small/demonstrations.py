"""Scripted conversations of the small tasks, for cold starts and `keel sft`. Each task is solved
twice: properly with tools, and hastily by guessing. Recipes select these functions with
`data.sources[].environment.demonstrations`. Names and numbers are drawn separately from the tasks,
so the conversations never contain a training or held-out task."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.agents.env_runtime.tool_objects import Tool, methods_of
from keel.agents.environments.code.environment import Repository
from keel.agents.environments.code.files import apply_edit, number_lines
from keel.agents.environments.code.languages import REPO
from keel.agents.environments.demonstrations import Demonstration, demonstrate
from keel.agents.environments.general.author_code import SUBMIT, load_tools
from keel.agents.environments.interpreter import Interpreter
from keel.agents.environments.search.documents import Document, Hit
from keel.agents.environments.search.environment import Search
from keel.agents.environments.trip.environment import Calls
from keel.examples.small import tasks
from keel.rl.turns import Message
from keel.synthesis.code.pipeline import PROMPT

_SUM = "State the final answer to the following arithmetic problem: {sum} ="
"""The prompt of the task chain_sum in reasoning_gym."""
_Draw = Callable[[random.Random, Mapping[str, Any]], Demonstration]
"""Draws a task and returns its two conversations. The mapping holds the environment's arguments."""


class _LocalTools:
    """Runs the tools of an environment in this process, with the same results that the policy would
    get."""

    def __init__(
        self,
        question: str | Sequence[Message],
        specs: Sequence[Mapping[str, Any]],
        tools: Mapping[str, Callable[..., Any]],
    ) -> None:
        messages = [_user(question)] if isinstance(question, str) else list(question)
        self._opening = {"messages": messages, "tools": list(specs)}
        self._tools = tools

    def opening(self, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return self._opening

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"text": str(self._tools[name](**arguments)), "done": name == "submit_result"}

    def both(self, worked: Calls, hasty: Calls) -> Demonstration:
        return demonstrate(lambda: self, {}, 0, worked, hasty)


def _demonstrations(family: str) -> Callable[[_Draw], Callable[..., list[Demonstration]]]:
    def decorate(draw_one: _Draw) -> Callable[..., list[Demonstration]]:
        def drawn(count: int, *, seed: int, arguments: Mapping[str, Any]) -> list[Demonstration]:
            draws = (random.Random(f"{family} shown {seed} {n}") for n in range(count))
            return [draw_one(draw, arguments) for draw in draws]

        drawn.__doc__ = draw_one.__doc__
        return drawn

    return decorate


def _specs(tools: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [Tool(name, method).spec for name, method in tools.items()]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _answers(text: str) -> Calls:
    return text
    yield  # without a call


@_demonstrations("prices")
def price_demonstrations(draw: random.Random, arguments: Mapping[str, Any]) -> Demonstration:
    """Generate conversations about looking up prices. The hasty ones guess the answer."""
    (spec,) = (tool.spec for tool in load_tools(tasks.PRICE_TOOLS, {}).values())
    keys = ("name", "description", "parameters")
    specs = [{key: one[key] for key in keys} for one in (spec, SUBMIT)]
    shop = tasks.draw_prices(draw)
    question = tasks.draw_question(draw, shop)

    def price(item: str) -> int:
        return shop[item]

    def submit(answer_text: str) -> str:
        return ""

    def look() -> Calls:
        seen: dict[str, int] = {}
        for item in question.items:
            seen[item] = int((yield "price", {"item": item}))
        yield "submit_result", {"answer_text": str(question.answer(seen))}

    def guess() -> Calls:
        wrong = draw.choice([p for p in range(10, 100) if p != question.answer(shop)])
        dearer = max(question.items, key=shop.__getitem__)
        yield "submit_result", {"answer_text": str(wrong) if len(question.items) == 1 else dearer}

    stand = _LocalTools(question.text, specs, {"price": price, "submit_result": submit})
    return stand.both(look(), guess())


@_demonstrations("towers")
def tower_demonstrations(draw: random.Random, arguments: Mapping[str, Any]) -> Demonstration:
    """Generate conversations about finding the builder of a tower. The hasty ones invent a name."""
    (tower, builder), (_, wrong) = tasks.draw_towers(draw, 2).items()
    options = {key: arguments[key] for key in ("results", "cite") if key in arguments}
    search = Search(ready=_OneDocument(tasks.tower_document(tower, builder)), **options)
    task = {"messages": [_user(f"Who built {tower}?")], "reward": {"kind": "answer"}}
    tools = methods_of(search)

    def look() -> Calls:
        result = yield "search", {"query": tower}
        return f"<answer>{result.split()[-3]}</answer>"

    stand = _LocalTools(search.opening(task), _specs(tools), tools)
    return stand.both(look(), _answers(f"<answer>{wrong}</answer>"))


class _OneDocument:
    def __init__(self, value: Mapping[str, str]) -> None:
        name = f"{tasks.TOWERS}#{value['id']}"
        self._document = Document(name=name, title=value["title"], text=value["text"])

    def search(self, query: str, most: int) -> list[Hit]:
        one = self._document
        return [Hit(name=one.name, title=one.title, snippet=one.text)]

    def document(self, name: str) -> Document | None:
        return self._document if name == self._document.name else None


@_demonstrations("pace")
def pace_demonstrations(draw: random.Random, arguments: Mapping[str, Any]) -> Demonstration:
    """Generate conversations about changing a number in a repository. The hasty ones edit a file
    without reading it."""
    is_now, expected = tasks.draw_paces(draw, 2)
    text = tasks.PACE_SOURCE.format(pace=is_now)

    def edit(path: str, old: str, new: str) -> str:
        try:
            return apply_edit(path, text, old, new)[1]
        except ValueError as error:
            return str(error)

    def view(path: str) -> str:
        return number_lines(text, 1, 0)

    def change(old: str) -> Calls:
        yield "edit", {"path": "pace.py", "old": old, "new": str(expected)}
        return "Done."

    def look() -> Calls:
        seen = yield "view", {"path": "pace.py"}
        return (yield from change(seen.split()[-1]))

    issue = PROMPT.format(name="pace", repo=REPO, issue=tasks.pace_issue(expected))
    specs = _specs(methods_of(object.__new__(Repository)))
    guess = draw.choice([p for p in range(10, 100) if p != is_now])
    return _LocalTools(issue, specs, {"view": view, "edit": edit}).both(look(), change(str(guess)))


@_demonstrations("sums")
def sum_demonstrations(draw: random.Random, arguments: Mapping[str, Any]) -> Demonstration:
    """Generate conversations that solve chain_sum from reasoning_gym with an interpreter. The hasty
    ones leave out the last number."""
    numbers = [draw.randrange(100, 1000) for _ in range(3)]
    signs = [draw.choice("+-") for _ in numbers[1:]]
    terms, values = [str(numbers[0])], [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        terms.append(f"{sign} {number}")
        values.append(values[-1] + (number if sign == "+" else -number))
    formula = " ".join(terms)

    def python(code: str) -> int:
        return values[-1]

    def look() -> Calls:
        return (yield "python", {"code": formula})

    specs = [Tool("python", methods_of(object.__new__(Interpreter))["python"]).spec]
    stand = _LocalTools(_SUM.format(sum=formula), specs, {"python": python})
    return stand.both(look(), _answers(str(values[-2])))


LOOK, GUESS = "look", "guess"
"""Thinking texts that announce a careful or a hasty conversation, so that reinforcement learning
can also act on the thinking."""
_WORKED = 0.6
_SEARCH = {"results": 1, "cite": False}
"""The arguments for the search environment in the recipes."""


def write_lessons(folder: Path, count: int, seed: int) -> None:
    """Write `count` conversations for each family, with and without thinking, into a new folder."""
    folder.mkdir(parents=True)
    # Disjoint from the seeds of cold starts, which start at 0.
    far = (1 << 20) + seed
    families = {
        "general": price_demonstrations(count, seed=far, arguments={}),
        "search": tower_demonstrations(count, seed=far, arguments=_SEARCH),
        "coding": pace_demonstrations(count, seed=far, arguments={}),
        "code": _program_demonstrations(count, random.Random(f"lessons {seed}")),
    }
    for name, demonstrations in families.items():
        for thinking in (True, False):
            draw = random.Random(f"{name} {thinking} {seed}")
            path = folder / f"{name}{'' if thinking else '-direct'}.jsonl"
            with path.open("w", encoding="utf-8") as file:
                for one in demonstrations:
                    works = draw.random() < _WORKED
                    messages = [dict(message) for message in (one.worked if works else one.hasty)]
                    first = next(m for m in messages if m["role"] == "assistant")
                    if thinking:
                        first["reasoning_content"] = LOOK if works else GUESS
                    tools = [tool.as_json() for tool in one.tools]
                    row = {"messages": messages, "tools": tools, "thinking": thinking}
                    file.write(json.dumps(row) + "\n")


def _program_demonstrations(count: int, draw: random.Random) -> list[Demonstration]:
    demonstrations: list[Demonstration] = []
    programs = tasks.draw_programs(draw)
    for program in (programs[n % len(programs)] for n in range(count)):
        wrong = draw.choice([p for p in programs if p.sign == program.sign and p != program])
        worked, hasty = (
            (_user(program.question), {"role": "assistant", "content": f"```\n{one.source}\n```"})
            for one in (program, wrong)
        )
        demonstrations.append(Demonstration(tools=(), worked=worked, hasty=hasty))
    return demonstrations
