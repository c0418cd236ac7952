"""The author of a question: it explores what the corpus says around an entity, and hands in a
question, its answer and the evidence, which a gate looks at at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from keel.agents.environments.search.environment import Search
from keel.rl.turns import ToolSpec
from keel.synthesis.author import Author
from keel.synthesis.search.desk import Desk, list_of, shape, texts
from keel.synthesis.search.rule import alike

MOST = 12
"""Facts of a question's, and other spellings of an answer."""
_SYSTEM = """\
You write questions for people who are good at research. A question has one short answer, a name \
or a number, that stands in a document word for word. It can only be answered by looking up \
several documents one after the other: it describes things by facts about them instead of naming \
them, and each fact is needed.

How to work: search for the entity you are given and open what is found. Follow rare names from \
document to document. Then choose an answer at the end of the chain, and join at least {breadth} \
facts, from at least {depth} documents that lead to one another, into a single question. Do not \
name the answer in the question, and ask nothing that a search for the question itself, or common \
knowledge, would answer.

Hand in with the tool `submit`: the question; the answer, as it stands in a document; other \
spellings of it that are as right; and as evidence each fact with the document that you opened and \
the words in it that state it. One of the quotes has to contain the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    claim: str
    document: str
    quote: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A question, before anybody has tried it."""

    question: str
    answer: str
    also: tuple[str, ...]
    """Other spellings that are as right."""
    evidence: tuple[Evidence, ...]
    language: str

    @property
    def spellings(self) -> list[str]:
        """All that is right, the answer first; those that the rule does not take for one."""
        found: dict[str, str] = {}
        for one in (self.answer, *self.also):
            found.setdefault(alike(one), one)
        return list(found.values())

    @property
    def documents(self) -> list[str]:
        return list(dict.fromkeys(one.document for one in self.evidence))

    @property
    def listed(self) -> list[dict[str, str]]:
        return [asdict(one) for one in self.evidence]


EVIDENCE = shape(claim=texts(500), document=texts(400), quote=texts(1000))
_SUBMIT = ToolSpec(
    name="submit",
    description="Hand in the question.",
    parameters=shape(
        question=texts(),
        answer=texts(200),
        other_spellings=list_of(texts(200), 0, MOST),
        evidence=list_of(EVIDENCE, 1, MOST),
    ),
)
Gate = Callable[[Draft, Search], None]
"""Raises Refused. The search is the author's: what it has opened."""


async def write_question(
    desk: Desk, author: Author, entity: str, language: str, *, depth: int, breadth: int, gate: Gate
) -> Draft:
    """Raises Refused with the gate's word, AuthorLost, BudgetSpent."""
    drafts: list[Draft] = []

    def hand_in(given: Mapping[str, Any], search: Search) -> None:
        draft = Draft(
            question=" ".join(given["question"].split()),
            answer=" ".join(given["answer"].split()),
            also=tuple(" ".join(one.split()) for one in given["other_spellings"]),
            evidence=evidence_of(given),
            language=language,
        )
        gate(draft, search)
        drafts.append(draft)

    await desk.work(
        author,
        _SYSTEM.format(depth=depth, breadth=breadth),
        f"Write a question in the language with the ISO 639-1 code {language}, beginning from the "
        "entity between the fences. The answer stays as it stands in the document.",
        material={"entity": entity},
        purpose="question",
        hand_in=(_SUBMIT, hand_in),
    )
    return drafts[-1]


def evidence_of(given: Mapping[str, Any]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(claim=one["claim"], document=one["document"].strip(), quote=one["quote"])
        for one in given["evidence"]
    )
