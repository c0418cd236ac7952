"""Generates four families of small tasks from a seed, in the formats of real ones.

prices      a `keel synthesize` environment: look up prices, or find the cheaper item
towers      a corpus about buildings and their builders, with a question per document
pace        a git repository in which each commit changes a number, and an issue asks for the change
programs    programs that read a number and print the result of an operation, with hidden tests
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keel.configs.synthesis import CodeSourceConfig, CodeTasksConfig

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


_ITEMS = 80
PRICE_TOOLS = '''\
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
        """Return a Python expression for the right answer. `price` is the expression for the price
        of an item."""
        one, *other = map(price.format, self.items)
        return f"{self.items[0]!r} if {one} < {other[0]} else {self.items[1]!r}" if other else one


def draw_prices(draw: random.Random) -> dict[str, int]:
    return dict(zip(_names(draw, _ITEMS), draw.sample(range(10, 100), _ITEMS), strict=True))


def draw_question(draw: random.Random, prices: Mapping[str, int]) -> _PriceQuestion:
    return _PriceQuestion(tuple(draw.sample(list(prices), draw.choice((1, 2)))))


def write_prices(folder: Path, count: int, seed: int) -> None:
    """Write an environment with `count` distinct tasks into a new folder."""
    draw = random.Random(f"prices {seed}")
    prices = draw_prices(draw)
    questions: dict[_PriceQuestion, None] = {}
    while len(questions) < count:
        questions[draw_question(draw, prices)] = None
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
        "tools.py": PRICE_TOOLS,
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


TOWERS = "towers.jsonl"


def draw_towers(draw: random.Random, count: int) -> dict[str, str]:
    return {tower: _random_name(draw) for tower in _names(draw, count)}


def tower_document(tower: str, builder: str) -> dict[str, str]:
    return {"id": tower, "title": tower, "text": f"{builder} built {tower}."}


def write_towers(folder: Path, count: int, seed: int) -> None:
    towers = draw_towers(random.Random(f"towers {seed}"), count)
    (folder / "corpus").mkdir(parents=True)
    _write_lines(folder / "corpus" / TOWERS, [{**tower_document(*one)} for one in towers.items()])
    tasks: list[dict[str, object]] = [
        {
            "id": tower,
            "prompt": f"Who built {tower}?",
            "answer": builder,
            "match": "exact",
            "environment": {"evidence": [f"{TOWERS}#{tower}"]},
        }
        for tower, builder in towers.items()
    ]
    _write_lines(folder / "tasks.jsonl", tasks)


_GIT_S = 60.0
PYTHON = str(Path(sys.executable).parent.resolve() / Path(sys.executable).name)
"""Path of the Python interpreter of this environment, with symbolic links resolved."""
PACE_SOURCE = "def pace():\n    return {pace}\n"
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


def pace_issue(pace: int) -> str:
    return f"pace() should be {pace}."


def draw_paces(draw: random.Random, count: int) -> list[int]:
    """Draw two-digit numbers, each different from the previous one."""
    paces = [draw.randrange(10, 100)]
    while len(paces) < count:
        if (pace := draw.randrange(10, 100)) != paces[-1]:
            paces.append(pace)
    return paces


def write_repository(folder: Path, count: int, seed: int) -> None:
    """Create a git repository with `count` changes. Raises OSError or CalledProcessError."""
    folder.mkdir(parents=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    user = ["-c", "user.name=keel", "-c", "user.email=keel@localhost", "-c", "core.hooksPath=/"]

    def git(*words: str) -> None:
        command = ["git", "-C", str(folder), *user, *words]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=_GIT_S)

    git("init", "-q", "-b", "main")
    (folder / "tests").mkdir()
    for number, pace in enumerate(draw_paces(random.Random(f"pace {seed}"), count + 1)):
        (folder / "pace.py").write_text(PACE_SOURCE.format(pace=pace), encoding="utf-8")
        (folder / "tests/test_pace.py").write_text(_PACE_TESTS.format(pace=pace), encoding="utf-8")
        git("add", "-A")
        git("commit", "-q", "-m", f"{pace_issue(pace)} (#{number})" if number else "Begin")


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


def draw_programs(draw: random.Random) -> list[_NumberProgram]:
    """Return all programs with a two-digit operand, shuffled."""
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
        for program in draw_programs(random.Random(f"programs {seed}"))[:count]
    ]
    _write_lines(folder / "tasks.jsonl", rows)
