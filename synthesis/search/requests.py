"""Creates open requests with a rubric.

A request is kept if answers written with search score higher than answers without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keel.agents.environments.search.environment import Search
from keel.rewards.judge.prompts import BadReply, Question, new_fence
from keel.rewards.judge.specs import Rubric
from keel.rl.turns import ToolSpec
from keel.synthesis.author import Author, gather_or_cancel, object_schema
from keel.synthesis.ledger import Rejected
from keel.synthesis.search.answers import Answerer, answer
from keel.synthesis.search.question import EVIDENCE, MOST, Evidence, evidence_of
from keel.synthesis.search.workspace import Workspace, list_schema, text_schema

_MIN_CRITERIA, _MAX_CRITERIA = 3, 8
_READS = 3
_SYSTEM = """\
You write requests to an assistant that can search: to explain, compare, summarize or advise. A \
good request needs at least {breadth} facts from at least {depth} documents, which people do not \
know by heart.

Search for the given entity, open the documents that you find, and follow it from document to \
document. Then submit with the tool `submit`: the request; the facts of a good answer, each with \
the document that you opened and the words in it that state it; and {least} to {most} criteria of \
different kinds (required facts, errors, completeness, clarity, relevance), each with a short \
name, a text that tells when it is met, clear enough that two people would agree, and a weight \
above 0."""
_SUBMIT = ToolSpec(
    name="submit",
    description="Submit the request.",
    parameters=object_schema(
        request=text_schema(),
        evidence=list_schema(EVIDENCE, 1, MOST),
        criteria=list_schema(
            object_schema(
                name=text_schema(60),
                text=text_schema(500),
                weight={"type": "number", "exclusiveMinimum": 0, "maximum": 100},
            ),
            _MIN_CRITERIA,
            _MAX_CRITERIA,
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """A request without a single correct answer, and the rubric for judging answers to it."""

    text: str
    spec: Mapping[str, Any]
    evidence: tuple[Evidence, ...]


async def write_request(
    desk: Workspace,
    author: Author,
    entity: str,
    language: str,
    gate: Callable[[OpenRequest, Search], None],
) -> OpenRequest:
    """Ask the author for an open request that passes `gate`, and return it. Raises Rejected if a
    gate rejects the request, or AuthorLost or BudgetSpent if a call to the author fails."""
    written: list[OpenRequest] = []

    def hand_in(value: Mapping[str, Any], search: Search) -> None:
        total = sum(one["weight"] for one in value["criteria"])
        criteria = [{**one, "weight": one["weight"] / total} for one in value["criteria"]]
        evidence = evidence_of(value)
        reference = "\n".join(one.claim for one in evidence)
        spec = {"kind": "rubric", "criteria": criteria, "reference": reference}
        try:
            Rubric.parse(spec)
        except ValueError as error:
            raise Rejected("criteria", str(error)) from error
        text = " ".join(value["request"].split())
        request = OpenRequest(text=text, spec=spec, evidence=evidence)
        gate(request, search)
        written.append(request)

    await desk.work(
        author,
        _SYSTEM.format(
            depth=desk.config.depth,
            breadth=desk.config.breadth,
            least=_MIN_CRITERIA,
            most=_MAX_CRITERIA,
        ),
        f"Write a request in the language with the ISO 639-1 code {language}, beginning from the "
        "entity between the fences.",
        material={"entity": entity},
        purpose="question",
        hand_in=(_SUBMIT, hand_in),
    )
    return written[-1]


async def check_gain(
    desk: Workspace, author: Author, judge: Author, text: str, spec: Mapping[str, Any]
) -> dict[str, float]:
    """Return the mean scores of answers to the request `text`, written with and without tools.
    Raises Rejected if the difference is below `search.least_gain`."""
    answerers = [Answerer(author=author, system="", tools=tools) for tools in (True, False)]
    with_tools, without = await gather_or_cancel(
        *(answer(desk, one, text, at_length=True) for one in answerers)
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
    return rubric.judged(material, samples).value
