"""The model-based filter: whether somebody who has the issue and the repository could know what the
hidden tests want."""

from __future__ import annotations

import json
import re

from keel.synthesis.author import Author
from keel.synthesis.code.candidate import Candidate
from keel.synthesis.ledger import Refused

TRIES = 2
MOST_CHARACTERS = 20_000
"""Of each patch."""
QUESTION = """\
A programmer gets a repository and the issue below, and changes the code. Hidden tests then \
decide. Judge whether that is a fair task, from 1 (not at all) to 5 (entirely):

- clear: does the issue say what is wrong or wanted, so that one knows what to do?
- solvable: does the issue, with the repository as it is, fix what the tests check (names, \
messages, formats), so that a right solution passes them?

Say in a few words why, then end with a line of JSON: {{"clear": 3, "solvable": 3}}

# Issue

{issue}

# The change that was made (the programmer does not see it)

{gold}

# The tests that decide (the programmer does not see them)

{tests}
"""


async def judge(candidate: Candidate, author: Author, least: int) -> dict[str, int]:
    """Its marks. Raises Refused for one below `least`, or for no marks."""
    text = QUESTION.format(
        issue=candidate.issue,
        gold=candidate.patch(list(candidate.gold))[:MOST_CHARACTERS],
        tests=candidate.patch(list(candidate.harness))[:MOST_CHARACTERS],
    )
    for _ in range(TRIES):
        said = await author.ask([{"role": "user", "content": text}], purpose="judge")
        marks = marks_of(said.content)
        if marks is None:
            continue
        for name, mark in marks.items():
            if mark < least:
                raise Refused("judge", f"{name}: {mark} of 5")
        return marks
    raise Refused("judge", "it gives no marks")


def marks_of(text: str) -> dict[str, int] | None:
    """From the last object of a reply; None where it has none, or others."""
    for found in reversed(re.findall(r"\{[^{}]*\}", text)):
        try:
            given = json.loads(found)
            marks = {name: given[name] for name in ("clear", "solvable")}
        except (ValueError, KeyError, TypeError):
            continue
        if all(type(mark) is int and 1 <= mark <= 5 for mark in marks.values()):
            return marks
    return None
