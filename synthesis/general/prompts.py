"""Prompts for the author, after DeepSeek-V3.2 (2025), section 3.2.3."""

from __future__ import annotations

from keel.agents.environments.general.author_code import MODULES
from keel.rl.turns import Message

_AUTHOR = (
    "You make environments in which agents that call tools are trained: a database, tools over it, "
    "and tasks that are hard to solve and easy to verify."
)


def database(category: str, number: int, count: int, most_kib: int, search: bool) -> list[Message]:
    looked_up = "Look facts up with search where real ones help. " if search else ""
    several = f" It is number {number + 1} of {count}: make it unlike others." if count > 1 else ""
    return [
        {"role": "system", "content": _AUTHOR},
        {
            "role": "user",
            "content": f"Category: {category}.{several}\n\nMake a database for it: entities of "
            "several kinds, with numbers, texts and relations that tasks can put constraints on, "
            f"enough of them that nobody sees the answer at a glance. {looked_up}Write it as one "
            "JSON file (an object of lists, or of objects) or one SQLite file, of at most "
            f"{most_kib} KiB, for example by a Python program with a fixed seed, look at it, and "
            "hand it over with submit_database.",
        },
    ]


def tools(category: str, data: str, kind: str) -> list[Message]:
    there = (
        "the value of the JSON file"
        if kind == ".json"
        else "a sqlite3.Connection whose rows are sqlite3.Row"
    )
    return [
        {"role": "system", "content": _AUTHOR},
        {
            "role": "user",
            "content": f"Category: {category}. This is the database, or its beginning:\n\n{data}"
            "\n\nWrite tools.py. Each public function in it is a tool that looks into the "
            "database: small, general ones, not one that solves a task. The global `database` is "
            f"{there}; nobody else opens it, and nothing prints it. Every parameter and the result "
            "has a type hint that says something (str, int, float, bool, list[…], dict[…], "
            "Literal[…]), every tool a docstring that says what it returns. The same call returns "
            "the same in every process: no clock, no chance, no order of a set. An error is raised "
            "as LookupError or ValueError with words that help. Names of helpers begin with an "
            f"underscore. Imports are only from: {', '.join(MODULES[1:])}. Attributes that begin "
            "with an underscore, and str.format, are not to be used.\n\n"
            "Reply with one section:\n\n## tools\n```python\n…\n```",
        },
    ]


_TASK = """\
question: what is asked of the agent, with the exact form of the answer (JSON: which keys, which \
types). It names no tool. The answer follows from the database alone, and is not to be guessed.
solve: one function `def solve(tools):` that returns the answer as a JSON value. It calls tools \
(`tools.name(parameter=…)`, by name) and does logic; nothing else is there: no import, no file, no \
database, no class, no other function. What it needs stands inside it. It finds the answer in what \
the tools return. A tool that fails raises.
verify: one function `def verify(answer, database):` that returns True or False, or a dict of one \
for each thing demanded. It checks the answer against the database and what the question demands, \
without solve, accepts any right answer, and refuses everything else: an empty one, one with any \
value changed, one with a part too few or too many. It must not fail on an answer of another form. \
It may import as tools may, except random.

Reply with these sections:

## question
```text
…
```
## solve
```python
…
```
## verify
```python
…
```"""


def first_task() -> Message:
    return {
        "role": "user",
        "content": f"Now a simple task, one that a few calls solve.\n\n{_TASK}",
    }


def harder_task(passed: int | None, attempts: int) -> Message:
    how = (
        f"Of {attempts} attempts at the last one, {passed} were right; of this one it must be "
        "fewer. "
        if attempts
        else ""
    )
    return {
        "role": "user",
        "content": "Now a harder task over the same database: more constraints that depend on each "
        f"other, more to look up, conditions, an optimum. {how}The last task's answer must not be "
        "right for it. Where the tools do not suffice, put further ones under a heading `## tools` "
        "before the others: new functions only, which come on top of those that there are.\n\n"
        f"{_TASK}",
    }


def refused(gate: str, reason: str) -> Message:
    return {
        "role": "user",
        "content": f"Rejected ({gate}): {reason}\n\nMend it, and write all sections again.",
    }
