"""Prompts for the author, based on DeepSeek-V3.2 (2025), section 3.2.3."""

from __future__ import annotations

from keel.agents.environments.general.author_code import MODULES
from keel.rl.turns import Message

_SYSTEM: Message = {
    "role": "system",
    "content": "You build environments for training agents that call tools: a database, tools that "
    "read it, and tasks that are hard to solve and easy to verify.",
}
_TASK = """\
question: the question for the agent, with the exact form of the answer (JSON: which keys, which \
types). It names no tool. The answer follows from the database alone and cannot be guessed.
solve: one function `def solve(tools):` that returns the answer as a JSON value. It may only call \
tools (`tools.name(parameter=…)`, with keyword arguments) and compute: no imports, files, \
database, classes or other functions. It must derive the answer from the results of the tools. A \
tool that fails raises an exception.
verify: one function `def verify(answer, database):` that returns True or False, or a dict with \
one of these for each requirement. It checks the answer against the database and the question, \
without calling solve. It accepts every right answer and rejects everything else: an empty answer, \
one with a changed value, one with a missing or an additional part. It must not raise on answers \
of another form. It may import the same modules as the tools, except random.

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


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def database(
    category: str, number: int, count: int, most_kib: int, *, search: bool, network: bool
) -> list[Message]:
    several = f" It is number {number + 1} of {count}; make it different." if count > 1 else ""
    look_up = "Use search to look up facts where real ones help. " if search else ""
    look_up += (
        "Commands can reach the internet, so fetch real data where it helps. "
        if network
        else "Commands have no network. "
    )
    return [
        _SYSTEM,
        _user(
            f"Category: {category}.{several}\n\nBuild a database for this category: several kinds "
            "of entities with numbers, texts and relations that tasks can put constraints on. "
            "There must be enough entities that the answer to a task is not obvious at a glance. "
            f"{look_up}Write the database as one JSON file (an object of lists or objects) or one "
            f"SQLite file of at most {most_kib} KiB, for example by a Python program with a fixed "
            "seed. Inspect it, then submit it with submit_database."
        ),
    ]


def tools(category: str, data: str, kind: str) -> list[Message]:
    value = "a sqlite3.Connection whose rows are sqlite3.Row"
    if kind == ".json":
        value = "the value of the JSON file"
    return [
        _SYSTEM,
        _user(
            f"Category: {category}. This is the database, or its beginning:\n\n{data}\n\n"
            "Write tools.py. Each public function is a tool that reads the database: small and "
            "general, not one that solves a task. The global variable `database` is "
            f"{value}; do not open it yourself, and print nothing. Every parameter and result "
            "needs a specific type hint (str, int, float, bool, list[…], dict[…], Literal[…]), "
            "and every tool a docstring that describes its result. The same call must return the "
            "same result in every process, so do not use the clock, random numbers or the order "
            "of a set. Report errors as LookupError or ValueError with a helpful message. The "
            "names of helper functions begin with an underscore. You may import only from: "
            f"{', '.join(MODULES[1:])}. Do not use attributes that begin with an underscore, or "
            "str.format.\n\nReply with one section:\n\n## tools\n```python\n…\n```"
        ),
    ]


def first_task() -> Message:
    return _user(f"Now write a simple task that needs a few calls.\n\n{_TASK}")


def harder_task(passed: int | None, attempts: int) -> Message:
    measured = (
        f"{passed} of {attempts} attempts at the last task passed; fewer must pass at this one. "
        if attempts
        else ""
    )
    return _user(
        "Now write a harder task over the same database: more constraints that depend on each "
        f"other, more look-ups, conditions, an optimum. {measured}The last task's answer must be "
        "wrong for it. If the tools do not suffice, add new functions under a heading `## tools` "
        f"before the other sections; the existing tools stay.\n\n{_TASK}"
    )


def refused(gate: str, reason: str) -> Message:
    return _user(f"Rejected ({gate}): {reason}\n\nFix it, and write all sections again.")
