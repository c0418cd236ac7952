"""A verification agent with search: which of several answers are right, over several passes. It is
not told which one is the author's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any, Literal

from keel.agents.environments.search.citations import quote_fault
from keel.agents.environments.search.environment import Search
from keel.rl.turns import ToolSpec
from keel.synthesis.author import Author
from keel.synthesis.ledger import Refused
from keel.synthesis.search.desk import Desk, list_of, shape, texts

Verdict = Literal["right", "wrong", "unclear"]
_SYSTEM = """\
You check answers to a question against the documents. Find out with the tools what the documents \
say, going through every fact of the question, before you decide about any answer. An answer is \
"right" only if the documents show that it meets all of the question; "wrong" only if they show \
that it does not; else it is "unclear". Several may be right, or none. How sure or how polished an \
answer sounds says nothing.

Hand in a verdict for each answer with the tool `decide`: the reason, and the document that you \
opened and the words in it that decide."""
LABELS = [*ascii_uppercase, *(f"A{letter}" for letter in ascii_uppercase)]
"""Of answers: as many as there can be spellings and agents."""
_DECIDE = ToolSpec(
    name="decide",
    description="Hand in the verdicts.",
    parameters=shape(
        verdicts=list_of(
            shape(
                answer=texts(2),
                reason=texts(1000),
                verdict={"enum": ["right", "wrong", "unclear"]},
                document=texts(400),
                quote=texts(1000),
            ),
            1,
            len(LABELS),
        )
    ),
)


async def verify(
    desk: Desk,
    verifier: Author,
    question: str,
    truths: Sequence[str],
    candidates: Sequence[str],
    *,
    passes: int,
    seed: str,
) -> list[dict[str, Verdict]]:
    """The verdicts of each pass, by answer. truths: the author's answer in every spelling that is
    to be rewarded. Raises Refused unless in all of them each truth is right and every candidate is
    wrong."""
    answers = [*truths, *candidates]
    draw, seen = random.Random(seed), list[dict[str, Verdict]]()
    for number in range(passes):
        draw.shuffle(answers)
        seen.append(await _pass(desk, verifier, question, answers))
        changed = [one for one in answers if seen[-1][one] != seen[0][one]]
        if changed:
            raise Refused(
                "agreement",
                f"the verifier finds {changed[0]!r} {seen[0][changed[0]]} in pass 1 and "
                f"{seen[-1][changed[0]]} in pass {number + 1}",
            )
        _check(seen[-1], truths, candidates)
    return seen


def _check(found: Mapping[str, Verdict], truths: Sequence[str], candidates: Sequence[str]) -> None:
    # What is not right in the first pass can be right in all of them no more.
    for one in truths:
        if found[one] != "right":
            raise Refused("truth", f"the verifier finds the author's answer {one!r} {found[one]}")
    for one in candidates:
        if found[one] != "wrong":
            raise Refused("candidate", f"the verifier finds an agent's answer {one!r} {found[one]}")


async def _pass(
    desk: Desk, verifier: Author, question: str, answers: Sequence[str]
) -> dict[str, Verdict]:
    labels = dict(zip(LABELS, answers, strict=False))
    found: dict[str, Verdict] = {}

    def hand_in(given: Mapping[str, Any], search: Search) -> None:
        verdicts = given["verdicts"]
        if sorted(one["answer"] for one in verdicts) != sorted(labels):
            raise Refused("verifier", f"decide about each of {', '.join(labels)}, once")
        for one in verdicts:
            if one["verdict"] == "unclear":
                continue
            document = search.opened.get(one["document"].strip())
            if document is None:
                raise Refused("verifier", f"{one['document']!r} was not opened")
            if wrong := quote_fault(one["quote"], document):
                raise Refused("verifier", wrong)
        found.update({labels[one["answer"]]: one["verdict"] for one in verdicts})

    await desk.work(
        verifier,
        _SYSTEM,
        "Check the answers to the question between the fences.",
        material={"question": question, "answers": labels},
        purpose="verifier",
        hand_in=(_DECIDE, hand_in),
    )
    return found
