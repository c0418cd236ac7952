"""Agents that try to answer, each with other settings: what most of them find is no task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keel.rewards.text import answer_in, outside_think
from keel.synthesis.author import Author
from keel.synthesis.ledger import Refused
from keel.synthesis.search.desk import Desk
from keel.synthesis.search.rule import alike
from keel.synthesis.work import together

LONGEST = 300
"""Characters of an answer."""
UNKNOWN = "unknown"
_SYSTEM = """\
Answer the question between the fences{how}. End with the answer alone, a name or a number as it \
stands there, between <answer> and </answer>; if you cannot find it, write \
<answer>{unknown}</answer>."""
_OPEN = """\
Answer the question between the fences{how}, completely and to the point, for a reader who has not \
read any of it."""
_HOW = {True: " by what the documents say", False: " by what you know"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    author: Author
    system: str
    tools: bool


async def answer(desk: Desk, answerer: Answerer, question: str, *, at_length: bool = False) -> str:
    """What it says; "" where it says nothing. at_length: a text, not a name."""
    wanted = (_OPEN if at_length else _SYSTEM).format(how=_HOW[answerer.tools], unknown=UNKNOWN)
    worked = await desk.work(
        answerer.author,
        "\n\n".join(filter(None, (wanted, answerer.system))),
        "Answer it.",
        material={"question": question},
        purpose="answer",
        tools=answerer.tools,
    )
    text = outside_think(worked.answer) if worked.ended == "stop" else ""
    if at_length:
        return text
    said = " ".join(answer_in(text).split())
    return "" if said.lower() == UNKNOWN or len(said) > LONGEST else said


async def candidates(
    desk: Desk, answerers: Sequence[Answerer], question: str, right: Callable[[str], bool]
) -> list[str]:
    """The different answers of all agents. Raises Refused where one of them would be rewarded
    (`right`), or nobody has an answer."""
    said = await together(*(answer(desk, one, question) for one in answerers))
    if easy := [one for one in said if one and right(one)]:
        raise Refused(
            "too easy", f"{len(easy)} of {len(said)} agents answer it rightly: {easy[0]!r}"
        )
    found = {alike(one): one for one in said if one}
    if not found:
        raise Refused("no candidate", "no agent has an answer, so nothing says how hard it is")
    return list(found.values())
