"""Lets an author write a question with its evidence, and creates the rule that rewards an
answer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.agents.environments.search.environment import Search
from keel.rewards.rules.verifiers import verifier_for
from keel.rl.turns import ToolSpec
from keel.synthesis.author import Author
from keel.synthesis.search.workspace import Workspace, list_schema, object_schema, text_schema

MOST = 12
"""Maximum number of facts in a question, and maximum number of spellings of an answer."""
_SYSTEM = """\
You write questions for skilled researchers. A question has one short answer, a name or a number, \
that a document contains word for word. The question can only be answered by looking up several \
documents one after the other: it describes things by facts about them instead of naming them, and \
each fact is needed.

Search for the given entity and open the documents that you find. Follow rare names from document \
to document. Then choose an answer at the end of the chain, and join at least {breadth} facts, \
from at least {depth} documents that lead to one another, into a single question. Do not name the \
answer in the question, and ask nothing that a search for the question itself, or common \
knowledge, would answer.

Submit with the tool `submit`: the question; the answer as a document spells it; other correct \
spellings of it; and as evidence each fact with the document that you opened and the words in it \
that state it. One of the quotes has to contain the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    claim: str
    document: str
    quote: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A question that has not passed the gates yet."""

    question: str
    answer: str
    also: tuple[str, ...]
    """Other correct spellings of the answer."""
    evidence: tuple[Evidence, ...]

    @property
    def spellings(self) -> list[str]:
        """Return all correct spellings that the rule distinguishes, starting with the answer
        itself."""
        result: dict[str, str] = {}
        for one in (self.answer, *self.also):
            result.setdefault(normalize_answer(one), one)
        return list(result.values())


EVIDENCE = object_schema(claim=text_schema(500), document=text_schema(400), quote=text_schema(1000))
_SUBMIT = ToolSpec(
    name="submit",
    description="Submit the question.",
    parameters=object_schema(
        question=text_schema(),
        answer=text_schema(200),
        other_spellings=list_schema(text_schema(200), 0, MOST),
        evidence=list_schema(EVIDENCE, 1, MOST),
    ),
)


async def write_question(
    desk: Workspace,
    author: Author,
    entity: str,
    language: str,
    gate: Callable[[Draft, Search], None],
) -> Draft:
    """Ask the author for a question that passes `gate`, and return it. `gate` also receives the
    author's `Search`. Raises Rejected if a gate rejects the question, or AuthorLost or BudgetSpent
    if a call to the author fails."""
    drafts: list[Draft] = []

    def hand_in(value: Mapping[str, Any], search: Search) -> None:
        draft = Draft(
            question=" ".join(value["question"].split()),
            answer=" ".join(value["answer"].split()),
            also=tuple(" ".join(one.split()) for one in value["other_spellings"]),
            evidence=evidence_of(value),
        )
        gate(draft, search)
        drafts.append(draft)

    await desk.work(
        author,
        _SYSTEM.format(depth=desk.config.depth, breadth=desk.config.breadth),
        f"Write a question in the language with the ISO 639-1 code {language}, beginning from the "
        "entity between the fences. Keep the spelling of the answer from the document.",
        material={"entity": entity},
        purpose="question",
        hand_in=(_SUBMIT, hand_in),
    )
    return drafts[-1]


def documents_of(evidence: Sequence[Evidence]) -> list[str]:
    return list(dict.fromkeys(one.document for one in evidence))


def evidence_of(value: Mapping[str, Any]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(claim=one["claim"], document=one["document"].strip(), quote=one["quote"])
        for one in value["evidence"]
    )


_NUMBER = re.compile(r"[-+−]?(?:0|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*)(?:\.\d*[1-9])?\s*%?")
"""Matches numbers that are compared by value. `3.10`, `007` and `192.168.0.1` count as names."""
_SIGNS = ("'’‘ʼ`´", "-‐‑‒–—−", '"“”„')
"""Interchangeable punctuation marks."""
_ONE_OF = {sign: f"[{re.escape(signs)}]" for signs in _SIGNS for sign in signs}
_FIRST = {ord(sign): signs[0] for signs in _SIGNS for sign in signs}


def normalize_answer(text: str) -> str:
    """Normalize an answer so that equivalent spellings become equal."""
    reply = unicodedata.normalize("NFC", " ".join(text.split())).translate(_FIRST)
    return "".join(low if len(low := sign.lower()) == 1 else sign for sign in reply)


def rule_of(right: Sequence[str]) -> dict[str, str]:
    """Return the JSONL keys that judge an answer. Numbers are compared by value. Other answers are
    compared with the accepted spellings."""
    by_value = {"answer": right[0], "match": "math"}
    if all(map(_NUMBER.fullmatch, right)) and all(map(accepts(by_value), right)):
        return by_value
    spelled = dict.fromkeys(map(_pattern, right))
    return {"answer": f"(?i:{'|'.join(spelled)})[.。]?", "match": "regex"}


def accepts(rule: dict[str, str]) -> Callable[[str], bool]:
    """Return a function that checks whether an answer scores 1 under `rule`."""
    verify = verifier_for({"kind": "answer", **rule})
    return lambda answer: verify(answer) == 1


def _pattern(text: str) -> str:
    text = unicodedata.normalize("NFC", " ".join(text.split()))
    if _NUMBER.fullmatch(text):  # accept 1874 and 1,874
        whole, dot, rest = text.replace(",", "").partition(".")
        text = re.sub(r"(?<=\d)(?=(?:\d{3})+(?!\d))", ",", whole) + dot + rest
        return "".join(map(_sign, text)).replace(",", ",?")
    return "".join(map(_sign, text))


def _sign(sign: str) -> str:
    if sign == " ":
        return r"\s+"
    taken_apart = unicodedata.normalize("NFD", sign)
    if taken_apart != sign:
        return f"(?:{re.escape(sign)}|{re.escape(taken_apart)})"
    return _ONE_OF.get(sign, re.escape(sign))
