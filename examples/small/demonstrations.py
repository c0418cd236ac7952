"""Small tasks of four families, in the formats of real ones, and scripted conversations about them
for cold starts and `keel sft`.

prices      a `keel synthesize` environment: look up prices, or find the cheaper item
towers      a corpus with one document per tower, and questions about who built it
pace        a git repository in which each commit changes a number, and an issue asks for the change
programs    programs that read a number and print the result of an operation, with hidden tests

A conversation solves its task properly with tools, or hastily by guessing. Recipes select the
functions with `data.sources[].environment.demonstrations`. Names and numbers are drawn separately
from the tasks, so the conversations never contain a training or held-out task.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.agents.env_runtime.tool_objects import Tool, methods_of
from keel.agents.environments.code.environment import Repository
from keel.agents.environments.code.files import apply_edit, number_lines
from keel.agents.environments.code.languages import REPO
from keel.agents.environments.demonstrations import Demonstration, call_messages
from keel.agents.environments.general.author_code import SUBMIT, load_tools
from keel.agents.environments.interpreter import Interpreter
from keel.agents.environments.search.documents import Document, Hit
from keel.agents.environments.search.environment import Search
from keel.configs.synthesis import CodeSourceConfig, CodeTasksConfig
from keel.rl.turns import Message, ToolSpec
from keel.synthesis.code.pipeline import PROMPT

_CONSONANTS, _VOWELS = "BDFGKLMNPRSTVZ", "aeiou"


def _random_name(draw: random.Random) -> str:
    letters = "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(2))
    return letters.capitalize()


def _names(draw: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[_random_name(draw)] = None
    return list(names)


def _write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


_Step = tuple[str, dict[str, Any], str]
"""A tool call with its name, arguments and result."""


def _demonstration(
    question: str | Sequence[Message],
    specs: Sequence[Mapping[str, Any]],
    worked: Sequence[_Step | str],
    hasty: Sequence[_Step | str],
) -> Demonstration:
    """Build both conversations from their tool calls and, if it ends in one, their last text."""
    opening = [_user(question)] if isinstance(question, str) else question

    def conversation(steps: Sequence[_Step | str]) -> tuple[Message, ...]:
        messages = list(opening)
        for turn, step in enumerate(steps):
            if isinstance(step, str):
                messages.append({"role": "assistant", "content": step})
            else:
                messages += call_messages(turn, *step)
        if messages[-1].get("name") == SUBMIT["name"]:
            messages.pop()  # it ends the task
        return tuple(messages)

    tools = tuple(ToolSpec(**one) for one in specs)
    return Demonstration(tools=tools, worked=conversation(worked), hasty=conversation(hasty))


def _draws(family: str, count: int, seed: int) -> list[random.Random]:
    return [random.Random(f"{family} shown {seed} {n}") for n in range(count)]


def _specs(target: object) -> list[dict[str, Any]]:
    return [Tool(name, method).spec for name, method in methods_of(target).items()]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


_ITEMS = 80
_PRICE_TOOLS = '''\
"""Prices of a shop."""


def price(item: str) -> int:
    """Its price."""
    if item not in database:
        raise LookupError(f"there is no {item}")
    return database[item]
'''


@dataclass(frozen=True)
class _PriceQuestion:
    items: tuple[str, ...]

    @property
    def text(self) -> str:
        if len(self.items) == 1:
            return f"Submit the price of {self.items[0]}."
        return f"Submit the cheaper of {self.items[0]} and {self.items[1]}."

    def answer(self, prices: Mapping[str, int]) -> int | str:
        if len(self.items) == 1:
            return prices[self.items[0]]
        return min(self.items, key=lambda item: prices[item])

    def code(self, price: str) -> str:
        """Return a Python expression for the right answer. `price` is the expression for an item's
        price."""
        one, *other = map(price.format, self.items)
        return f"{self.items[0]!r} if {one} < {other[0]} else {self.items[1]!r}" if other else one


def _draw_prices(draw: random.Random) -> dict[str, int]:
    return dict(zip(_names(draw, _ITEMS), draw.sample(range(10, 100), _ITEMS), strict=True))


def _draw_question(draw: random.Random, prices: Mapping[str, int]) -> _PriceQuestion:
    return _PriceQuestion(tuple(draw.sample(list(prices), draw.choice((1, 2)))))


def write_prices(folder: Path, count: int, seed: int) -> None:
    """Write an environment with `count` distinct tasks into a new folder."""
    draw = random.Random(f"prices {seed}")
    prices = _draw_prices(draw)
    questions: dict[_PriceQuestion, None] = {}
    while len(questions) < count:
        questions[_draw_question(draw, prices)] = None
    solutions = [
        f"def solve_{n}(tools):\n    return {question.code('tools.price(item={!r})')}\n"
        for n, question in enumerate(questions)
    ]
    verifiers = [
        f"def verify_{n}(answer, database):\n"
        f"    right = {question.code('database[{!r}]')}\n"
        "    return type(answer) is type(right) and answer == right\n"
        for n, question in enumerate(questions)
    ]
    tasks = [{"question": question.text, "tools": ["price"]} for question in questions]
    files = {
        "database.json": json.dumps(prices),
        "tools.py": _PRICE_TOOLS,
        "task.json": json.dumps({"name": "prices", "category": "prices of a shop", "tasks": tasks}),
        "solve.py": "\n\n".join(solutions),
        "verify.py": "\n\n".join(verifiers),
        "provenance.json": json.dumps(
            {"made": f"by python -m keel.examples.small --seed {seed}; no model took part"}
        ),
    }
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def price_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Generate demonstrations in which the agent looks up prices, plus hasty ones in which it
    guesses the answer."""
    (spec,) = (tool.spec for tool in load_tools(_PRICE_TOOLS, {}).values())
    keys = ("name", "description", "parameters")
    specs = [{key: one[key] for key in keys} for one in (spec, SUBMIT)]
    made: list[Demonstration] = []
    for draw in _draws("prices", count, seed):
        prices = _draw_prices(draw)
        question = _draw_question(draw, prices)
        right = question.answer(prices)
        wrong = draw.choice([price for price in range(10, 100) if price != right])
        dearer = max(question.items, key=prices.__getitem__)
        guess = wrong if len(question.items) == 1 else dearer
        worked, hasty = (
            ("submit_result", {"answer_text": str(answer)}, "") for answer in (right, guess)
        )
        looks = [("price", {"item": item}, str(prices[item])) for item in question.items]
        made.append(_demonstration(question.text, specs, [*looks, worked], [hasty]))
    return made


_TOWERS = "towers.jsonl"


def _draw_towers(draw: random.Random, count: int) -> dict[str, str]:
    return {tower: _random_name(draw) for tower in _names(draw, count)}


def _tower_document(tower: str, builder: str) -> dict[str, str]:
    return {"id": tower, "title": tower, "text": f"{builder} built {tower}."}


def write_towers(folder: Path, count: int, seed: int) -> None:
    towers = _draw_towers(random.Random(f"towers {seed}"), count)
    (folder / "corpus").mkdir(parents=True)
    _write_lines(folder / "corpus" / _TOWERS, [{**_tower_document(*one)} for one in towers.items()])
    tasks: list[dict[str, object]] = [
        {
            "id": tower,
            "prompt": f"Who built {tower}?",
            "answer": builder,
            "match": "exact",
            "environment": {"evidence": [f"{_TOWERS}#{tower}"]},
        }
        for tower, builder in towers.items()
    ]
    _write_lines(folder / "tasks.jsonl", tasks)


def tower_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Generate demonstrations in which the agent looks up who built a tower, plus hasty ones in
    which it guesses a name."""
    options = {key: arguments[key] for key in ("results", "cite") if key in arguments}
    made: list[Demonstration] = []
    for draw in _draws("towers", count, seed):
        (tower, builder), (_, wrong) = _draw_towers(draw, 2).items()
        search = Search(ready=_OneDocument(_tower_document(tower, builder)), **options)
        task = {"messages": [_user(f"Who built {tower}?")], "reward": {"kind": "answer"}}
        look = ("search", {"query": tower}, search.search(tower))
        right, guess = (f"<answer>{name}</answer>" for name in (builder, wrong))
        opening = search.opening(task)
        made.append(_demonstration(opening, _specs(search), [look, right], [guess]))
    return made


class _OneDocument:
    def __init__(self, value: Mapping[str, str]) -> None:
        name = f"{_TOWERS}#{value['id']}"
        self._document = Document(name=name, title=value["title"], text=value["text"])

    def search(self, query: str, most: int) -> list[Hit]:
        one = self._document
        return [Hit(name=one.name, title=one.title, snippet=one.text)]

    def document(self, name: str) -> Document | None:
        return self._document if name == self._document.name else None


_GIT_S = 60.0
PYTHON = str(Path(sys.executable).parent.resolve() / Path(sys.executable).name)
"""Path of the Python interpreter of this environment, with symbolic links resolved."""
_PACE_SOURCE = "def pace():\n    return {pace}\n"
_PACE_TESTS = """\
from pace import pace


def test_pace():
    assert pace() == {pace}


def test_a_number():
    assert type(pace()) is int
"""
# Use the installed interpreter with pytest; the language's own set-up needs the network.
SETUP = f"""
mkdir -p "$PREFIX/bin"
printf '#!/bin/sh\\nexec {PYTHON} "$@"\\n' > "$PREFIX/bin/python"
chmod +x "$PREFIX/bin/python"
"""
TEST = (
    'export PYTHONPATH=$REPO; "$PREFIX/bin/python" -P -m pytest -p no:cacheprovider '
    '-o addopts= -q --tb=no --continue-on-collection-errors --junitxml="$JUNIT/pytest.xml"'
)


def _pace_issue(pace: int) -> str:
    return f"pace() should be {pace}."


def _draw_paces(draw: random.Random, count: int) -> list[int]:
    """Draw two-digit numbers, each different from the previous one."""
    paces = [draw.randrange(10, 100)]
    while len(paces) < count:
        if (pace := draw.randrange(10, 100)) != paces[-1]:
            paces.append(pace)
    return paces


def write_repository(folder: Path, count: int, seed: int) -> None:
    """Create a git repository with `count` changes. Raises OSError or CalledProcessError on
    failure."""
    folder.mkdir(parents=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    user = ["-c", "user.name=keel", "-c", "user.email=keel@localhost", "-c", "core.hooksPath=/"]

    def git(*words: str) -> None:
        command = ["git", "-C", str(folder), *user, *words]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=_GIT_S)

    git("init", "-q", "-b", "main")
    (folder / "tests").mkdir()
    for number, pace in enumerate(_draw_paces(random.Random(f"pace {seed}"), count + 1)):
        (folder / "pace.py").write_text(_PACE_SOURCE.format(pace=pace), encoding="utf-8")
        (folder / "tests/test_pace.py").write_text(_PACE_TESTS.format(pace=pace), encoding="utf-8")
        git("add", "-A")
        git("commit", "-q", "-m", f"{_pace_issue(pace)} (#{number})" if number else "Begin")


def pace_synthesis(repository: Path) -> CodeTasksConfig:
    # Skip installed plugins, which take time.
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    source = CodeSourceConfig(
        name="pace", git=str(repository), most=10_000, setup=SETUP, test=TEST, env=env
    )
    return CodeTasksConfig(
        sources=(source,),
        python=PYTHON,
        setup_turns=0,
        judge=False,
        least_issue=1,
        tests_s=60.0,
    )


def _edit(text: str, old: int, new: int) -> _Step:
    values = {"path": "pace.py", "old": str(old), "new": str(new)}
    try:
        return "edit", values, apply_edit("pace.py", text, str(old), str(new))[1]
    except ValueError as error:
        return "edit", values, str(error)


def pace_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Generate demonstrations in which the agent changes a number in a repository, plus hasty ones
    in which it edits a file without reading it first."""
    specs = _specs(object.__new__(Repository))
    made: list[Demonstration] = []
    for draw in _draws("pace", count, seed):
        is_now, expected = _draw_paces(draw, 2)
        guess = draw.choice([pace for pace in range(10, 100) if pace != is_now])
        text = _PACE_SOURCE.format(pace=is_now)

        view = ("view", {"path": "pace.py"}, number_lines(text, 1, 0))
        issue = PROMPT.format(name="pace", repo=REPO, issue=_pace_issue(expected))
        worked = [view, _edit(text, is_now, expected), "Done."]
        made.append(_demonstration(issue, specs, worked, [_edit(text, guess, expected), "Done."]))
    return made


_SIGNS = {"+": "plus", "-": "minus", "*": "times"}
_INPUTS = (0, 5, -8, 31)


@dataclass(frozen=True)
class _NumberProgram:
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


def _draw_programs(draw: random.Random) -> list[_NumberProgram]:
    """Return all programs with a two-digit operand in random order."""
    programs = [_NumberProgram(sign, number) for sign in _SIGNS for number in range(10, 100)]
    draw.shuffle(programs)
    return programs


def write_programs(folder: Path, count: int, seed: int) -> None:
    folder.mkdir(parents=True)
    rows: list[dict[str, object]] = [
        {
            "id": f"{_SIGNS[program.sign]}-{program.number}",
            "prompt": program.question,
            "tests": [{"stdin": f"{n}\n", "stdout": f"{program.after(n)}\n"} for n in _INPUTS],
        }
        for program in _draw_programs(random.Random(f"programs {seed}"))[:count]
    ]
    _write_lines(folder / "tasks.jsonl", rows)


def _program_demonstrations(count: int, draw: random.Random) -> list[Demonstration]:
    demonstrations: list[Demonstration] = []
    programs = _draw_programs(draw)
    for program in (programs[n % len(programs)] for n in range(count)):
        wrong = draw.choice([p for p in programs if p.sign == program.sign and p != program])
        worked, hasty = (
            (_user(program.question), {"role": "assistant", "content": f"```\n{one.source}\n```"})
            for one in (program, wrong)
        )
        demonstrations.append(Demonstration(tools=(), worked=worked, hasty=hasty))
    return demonstrations


_SUM = "State the final answer to the following arithmetic problem: {sum} ="
"""The prompt of the task chain_sum in reasoning_gym."""


def sum_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Generate demonstrations in which the agent solves chain_sum from reasoning_gym with an
    interpreter, plus hasty ones in which it leaves out the last number."""
    specs = [one for one in _specs(object.__new__(Interpreter)) if one["name"] == "python"]
    made: list[Demonstration] = []
    for draw in _draws("sums", count, seed):
        numbers = [draw.randrange(100, 1000) for _ in range(3)]
        signs = [draw.choice("+-") for _ in numbers[1:]]
        terms, values = [str(numbers[0])], [numbers[0]]
        for sign, number in zip(signs, numbers[1:], strict=True):
            terms.append(f"{sign} {number}")
            values.append(values[-1] + (number if sign == "+" else -number))
        formula, result = " ".join(terms), str(values[-1])
        worked = [("python", {"code": formula}, result), result]
        made.append(_demonstration(_SUM.format(sum=formula), specs, worked, [str(values[-2])]))
    return made


LOOK, GUESS = "look", "guess"
"""Thinking texts that announce a careful or a hasty conversation, so that reinforcement learning
can also act on the thinking."""
_WORKED = 0.6
_SEARCH = {"results": 1, "cite": False}
"""The arguments for the search environment in the recipes."""


def write_lessons(folder: Path, count: int, seed: int) -> None:
    """Write `count` conversations per family, with and without thinking, to a new folder."""
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
