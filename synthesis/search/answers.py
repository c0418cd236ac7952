"""Agents that answer a question, the verifier that judges their answers, and the measurement of how
much search improves the answers to open requests."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

from keel.agents.environments.search.environment import Search
from keel.rewards.judge.prompts import BadReply, Question, new_fence
from keel.rewards.judge.specs import Rubric
from keel.rewards.text import answer_in, outside_think
from keel.rl.turns import ToolSpec
from keel.synthesis.author import Author, gather_or_cancel, object_schema
from keel.synthesis.ledger import Rejected
from keel.synthesis.search.question import (
    Workspace,
    check_quote,
    list_schema,
    normalize_answer,
    text_schema,
)

_MAX_ANSWER = 300
_UNKNOWN = "unknown"
_READS = 3
"""Maximum number of attempts to get a response that can be parsed."""
_SYSTEM = """\
Answer the question between the fences{how}. End with the answer alone, a name or a number as the \
source spells it, between <answer> and </answer>; if you cannot find it, write \
<answer>{unknown}</answer>."""
_OPEN = """\
Answer the question between the fences{how}, completely and to the point, for a reader who has not \
read any of the documents."""
_HOW = {True: " from the documents", False: " from memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    author: Author
    system: str
    tools: bool


async def _ask_agent(
    desk: Workspace, answerer: Answerer, question: str, *, at_length: bool = False
) -> str:
    """Ask an agent and return its answer, or "" if it has none. With `at_length`, the answer is a
    full text instead of a name."""
    expected = (_OPEN if at_length else _SYSTEM).format(how=_HOW[answerer.tools], unknown=_UNKNOWN)
    worked = await desk.work(
        answerer.author,
        "\n\n".join(filter(None, (expected, answerer.system))),
        "Answer it.",
        material={"question": question},
        purpose="answer",
        tools=answerer.tools,
    )
    text = outside_think(worked.answer) if worked.ended == "stop" else ""
    if at_length:
        return text
    reply = " ".join(answer_in(text).split())
    return "" if reply.lower() == _UNKNOWN or len(reply) > _MAX_ANSWER else reply


async def collect_answers(
    desk: Workspace, answerers: Sequence[Answerer], question: str, right: Callable[[str], bool]
) -> list[str]:
    """Ask all agents and return their distinct answers. Raises Rejected if `right` accepts one of
    them, or if no agent answers."""
    reply = await gather_or_cancel(*(_ask_agent(desk, one, question) for one in answerers))
    if easy := [one for one in reply if one and right(one)]:
        raise Rejected(
            "too easy", f"{len(easy)} of {len(reply)} agents answer it correctly: {easy[0]!r}"
        )
    result = {normalize_answer(one): one for one in reply if one}
    if not result:
        raise Rejected("no candidate", "no agent has an answer")
    return list(result.values())


_Verdict = Literal["right", "wrong", "unclear"]
_VERIFIER_SYSTEM = """\
You check answers to a question against the documents. Look up every fact of the question with the \
tools before you decide about any answer. An answer is "right" only if the documents show that it \
meets all of the question, and "wrong" only if they show that it does not; otherwise it is \
"unclear". Several answers may be right, or none. Ignore how confident or polished an answer sounds.

Submit a verdict for each answer with the tool `decide`: the reason, a document that you opened, \
and the words in it that decide."""
_LABELS = [*ascii_uppercase, *(f"A{letter}" for letter in ascii_uppercase)]
"""Labels for the answers, enough for all spellings and agents."""
_DECIDE = ToolSpec(
    name="decide",
    description="Submit the verdicts.",
    parameters=object_schema(
        verdicts=list_schema(
            object_schema(
                answer=text_schema(2),
                reason=text_schema(1000),
                verdict={"enum": ["right", "wrong", "unclear"]},
                document=text_schema(400),
                quote=text_schema(1000),
            ),
            1,
            len(_LABELS),
        )
    ),
)


async def verify_answers(
    desk: Workspace,
    verifier: Author,
    question: str,
    truths: Sequence[str],
    candidates: Sequence[str],
    *,
    passes: int,
    seed: str,
) -> list[dict[str, _Verdict]]:
    """Let the verifier judge all answers in several passes, and return its verdicts. `truths` are
    the accepted spellings of the author's answer, shuffled among the candidates. Raises Rejected
    unless every pass finds all truths right and all candidates wrong."""
    answers = [*truths, *candidates]
    draw, seen = random.Random(seed), list[dict[str, _Verdict]]()
    for number in range(passes):
        draw.shuffle(answers)
        seen.append(await _pass(desk, verifier, question, answers))
        changed = [one for one in answers if seen[-1][one] != seen[0][one]]
        if changed:
            raise Rejected(
                "agreement",
                f"the verifier finds {changed[0]!r} {seen[0][changed[0]]} in pass 1 and "
                f"{seen[-1][changed[0]]} in pass {number + 1}",
            )
        for one in (*truths, *candidates):
            who, right = ("truth", "right") if one in truths else ("candidate", "wrong")
            if seen[-1][one] != right:
                raise Rejected(who, f"the verifier finds the answer {one!r} {seen[-1][one]}")
    return seen


async def _pass(
    desk: Workspace, verifier: Author, question: str, answers: Sequence[str]
) -> dict[str, _Verdict]:
    labels = dict(zip(_LABELS, answers, strict=False))
    result: dict[str, _Verdict] = {}

    def hand_in(value: Mapping[str, Any], search: Search) -> None:
        verdicts = value["verdicts"]
        if sorted(one["answer"] for one in verdicts) != sorted(labels):
            raise Rejected("verifier", f"decide about each of {', '.join(labels)}, once")
        for one in verdicts:
            if one["verdict"] != "unclear":
                check_quote("verifier", one["document"].strip(), one["quote"], search)
        result.update({labels[one["answer"]]: one["verdict"] for one in verdicts})

    await desk.work(
        verifier,
        _VERIFIER_SYSTEM,
        "Check the answers to the question between the fences.",
        material={"question": question, "answers": labels},
        purpose="verifier",
        hand_in=(_DECIDE, hand_in),
    )
    return result


async def measure_gain(
    desk: Workspace, author: Author, judge: Author, text: str, spec: Mapping[str, Any]
) -> dict[str, float]:
    """Return the mean scores of answers to the request `text`, with and without tools. Raises
    Rejected if the difference is below `search.least_gain`."""
    answerers = [Answerer(author=author, system="", tools=tools) for tools in (True, False)]
    with_tools, without = await gather_or_cancel(
        *(_ask_agent(desk, one, text, at_length=True) for one in answerers)
    )
    if not with_tools:
        raise Rejected("gain", "the agent with tools has no answer")
    rubric = Rubric.parse(spec)
    better, worse = await gather_or_cancel(
        *(_score(judge, rubric, text, reply, desk.config.passes) for reply in (with_tools, without))
    )
    if better - worse < desk.config.least_gain:
        raise Rejected(
            "gain", f"search does not help: {better:.2f} with tools and {worse:.2f} without"
        )
    return {"with_tools": round(better, 4), "without": round(worse, 4)}


async def _score(judge: Author, rubric: Rubric, request: str, text: str, passes: int) -> float:
    if not text:
        return 0.0
    task = [{"role": "user", "content": request}]
    material = rubric.read(text)

    async def ask(question: Question[Any]) -> Any:
        why = ""
        for _ in range(_READS):
            system, user = question.messages(new_fence())
            schema = f"The schema: {json.dumps(question.schema)}"
            system = {**system, "content": f"{system['content']}\n{schema}"}
            reply = await judge.ask([system, user], purpose="judge")
            try:
                return question.read(reply.content.strip())
            except BadReply as error:
                why = str(error)
        raise Rejected("judge", f"no valid judgement: {why}")

    samples = await gather_or_cancel(
        *(rubric.sample(ask, task, material, "", number) for number in range(passes))
    )
    return rubric.combine(material, samples).value
