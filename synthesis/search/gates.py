"""What a question has to stand before anybody tries to answer it. No model is asked here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from keel.agents.environments.search.citations import quote_fault
from keel.agents.environments.search.documents import Document
from keel.agents.environments.search.environment import Search
from keel.agents.environments.search.index import SearchIndex
from keel.agents.environments.search.text import squeeze, terms
from keel.rewards.language.share import detected
from keel.synthesis.ledger import Refused
from keel.synthesis.search.question import Draft, Evidence

ALIKE = 0.8
"""Share of two questions' terms that they have in common: from there on they are the same."""
RARE = 0.05
"""Of all documents that a term may stand in to link two; two documents at least."""
UNLIKELY = 0.02
"""A question whose language is less likely than this is in another."""


def check_evidence(
    evidence: Sequence[Evidence], search: Search, *, depth: int, breadth: int
) -> None:
    """Every fact stands in a document that was opened. Raises Refused."""
    for one in evidence:
        document = search.opened.get(one.document)
        if document is None:
            raise Refused("evidence", f"{one.document!r} was not opened; name documents you read")
        if wrong := quote_fault(one.quote, document):
            raise Refused("evidence", wrong)
    facts = sum(len(quotes) for quotes in _apart(evidence, search).values())
    if facts < breadth:
        raise Refused("breadth", f"{facts} facts are joined; at least {breadth} are wanted")
    documents = {one.document for one in evidence}
    if len(documents) < depth:
        raise Refused("depth", f"{len(documents)} documents are used; at least {depth} are wanted")


def _apart(evidence: Sequence[Evidence], search: Search) -> dict[str, list[tuple[int, int]]]:
    """Of each document the places that are quoted, [start, end) of its letters and digits. Quotes
    that overlap are one."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name in {one.document for one in evidence}:
        whole = squeeze(search.opened[name].text)
        places: list[tuple[int, int]] = []
        for one in evidence:
            if one.document == name:
                quote = squeeze(one.quote)
                start = whole.find(quote)
                places.append((start, start + len(quote)))
        joined: list[tuple[int, int]] = []
        for start, end in sorted(places):
            if joined and start < joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        found[name] = joined
    return found


def check_chain(evidence: Sequence[Evidence], search: Search, index: SearchIndex) -> None:
    """Each document is linked with another: a rare term of what is quoted from the one stands in
    the other. Raises Refused."""
    documents = {one.document: search.opened[one.document] for one in evidence}
    most = max(2, int(RARE * len(index)))
    rare: dict[str, set[str]] = {name: set() for name in documents}
    for one in evidence:
        rare[one.document] |= {
            term for term in set(terms(one.quote)) if index.frequency(term) <= most
        }
    words = {name: _words(document) for name, document in documents.items()}
    linked, left = set[str](), list(documents)
    grows = left[:1]
    while grows:
        linked |= set(grows)
        grows = [
            name
            for name in left
            if name not in linked
            and any(rare[other] & words[name] or rare[name] & words[other] for other in linked)
        ]
    if apart := [name for name in left if name not in linked]:
        raise Refused(
            "chain",
            f"{apart[0]!r} is not linked with the others: no rare term of one quote stands in the "
            "other document",
        )


def check_answer(draft: Draft, index: SearchIndex, *, depth: int) -> None:
    """The answer stands in the evidence, and neither in the question nor one search away from it.
    Raises Refused."""
    spellings = [squeeze(one) for one in (draft.answer, *draft.also)]
    if not all(spellings):
        raise Refused("evidence", "the answer, or another spelling of it, has no letter or digit")
    if not any(spellings[0] in squeeze(one.quote) for one in draft.evidence):
        raise Refused("evidence", f"none of the quotes says {draft.answer!r}, the answer")
    if any(one in squeeze(draft.question) for one in spellings):
        raise Refused("own words", "the question names its answer")
    if depth > 1:
        for hit in index.search(draft.question, 1):
            if spellings[0] in squeeze(hit.snippet):
                raise Refused("own words", "a search for the question itself shows the answer")


def check_language(text: str, language: str) -> None:
    """Raises Refused where a question is not in the language it was asked for."""
    best, likely = detected(text)
    if best != language and likely.get(language, 0.0) < UNLIKELY:
        raise Refused("language", f"the question is in {best!r}, and {language!r} was asked for")


@dataclass(slots=True)
class Kept:
    """The questions that were kept so far."""

    questions: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """Squeezed → its terms."""
    facts: set[tuple[str, frozenset[str]]] = field(default_factory=set[tuple[str, frozenset[str]]])
    """Answers, with the documents that they rest on."""

    def check(self, question: str, answer: str, documents: Iterable[str]) -> None:
        """Raises Refused for one that is there already, in these or similar words."""
        said, found = squeeze(question), frozenset(terms(question))
        if said in self.questions:
            raise Refused("duplicate", "this question was kept before")
        if answer and (squeeze(answer), frozenset(documents)) in self.facts:
            raise Refused("duplicate", "a question with this answer and evidence was kept before")
        for other in self.questions.values():
            if len(found & other) >= ALIKE * len(found | other):
                raise Refused("duplicate", "a question in nearly the same words was kept before")

    def add(self, question: str, answer: str, documents: Iterable[str]) -> None:
        self.questions[squeeze(question)] = frozenset(terms(question))
        if answer:
            self.facts.add((squeeze(answer), frozenset(documents)))


def _words(document: Document) -> set[str]:
    return set(terms(f"{document.title}\n{document.text}"))
