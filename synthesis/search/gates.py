"""Gates for a question before anyone tries to answer it. None of them needs a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from keel.agents.environments.search.documents import Document, squeeze, terms
from keel.agents.environments.search.environment import Search, quote_fault
from keel.agents.environments.search.index import SearchIndex
from keel.rewards.language.share import detected
from keel.synthesis.ledger import Rejected
from keel.synthesis.search.question import Draft, Evidence

ALIKE = 0.8
"""Fraction of common terms from which two questions count as the same."""
RARE = 0.05
"""A term links two documents only if at most this fraction of all documents contains it. Two
documents are always allowed."""
UNLIKELY = 0.02
"""A question is in another language if the probability of the requested language is below this."""


def check_evidence(
    evidence: Sequence[Evidence], search: Search, *, depth: int, breadth: int
) -> None:
    """Check that every fact is quoted from a document that the author opened. Raises Rejected if
    one is not."""
    for one in evidence:
        document = search.opened.get(one.document)
        if document is None:
            raise Rejected("evidence", f"{one.document!r} was not opened; name documents you read")
        if wrong := quote_fault(one.quote, document):
            raise Rejected("evidence", wrong)
    facts = sum(len(quotes) for quotes in _apart(evidence, search).values())
    if facts < breadth:
        raise Rejected("breadth", f"only {facts} facts are joined, at least {breadth} are required")
    documents = {one.document for one in evidence}
    if len(documents) < depth:
        raise Rejected(
            "depth", f"only {len(documents)} documents are used, at least {depth} are required"
        )


def _apart(evidence: Sequence[Evidence], search: Search) -> dict[str, list[tuple[int, int]]]:
    """Return the merged [start, end) ranges of the quotes from each document, counted in letters
    and digits."""
    result: dict[str, list[tuple[int, int]]] = {}
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
        result[name] = joined
    return result


def check_chain(evidence: Sequence[Evidence], search: Search, index: SearchIndex) -> None:
    """Check that the documents are linked: a rare term quoted from one of them appears in another.
    Raises Rejected if they are not."""
    documents = {one.document: search.opened[one.document] for one in evidence}
    most = max(2, int(RARE * len(index)))
    rare: dict[str, set[str]] = {name: set() for name in documents}
    for one in evidence:
        rare[one.document] |= {
            term for term in set(terms(one.quote)) if index.frequency(term) <= most
        }
    words = {name: _words(document) for name, document in documents.items()}
    linked, remaining = set[str](), list(documents)
    grows = remaining[:1]
    while grows:
        linked |= set(grows)
        grows = [
            name
            for name in remaining
            if name not in linked
            and any(rare[other] & words[name] or rare[name] & words[other] for other in linked)
        ]
    if apart := [name for name in remaining if name not in linked]:
        raise Rejected(
            "chain",
            f"{apart[0]!r} is not linked with the others: no rare term of a quote is in the other "
            "document",
        )


def check_answer(draft: Draft, index: SearchIndex, *, depth: int) -> None:
    """Check that the answer is in the evidence, but neither in the question nor in the first result
    of a search for the question. Raises Rejected if it is not."""
    spellings = [squeeze(one) for one in (draft.answer, *draft.also)]
    if not all(spellings):
        raise Rejected("evidence", "the answer, or another spelling of it, has no letter or digit")
    if not any(spellings[0] in squeeze(one.quote) for one in draft.evidence):
        raise Rejected("evidence", f"no quote contains the answer {draft.answer!r}")
    if any(one in squeeze(draft.question) for one in spellings):
        raise Rejected("own words", "the question contains its answer")
    if depth > 1:
        for hit in index.search(draft.question, 1):
            if spellings[0] in squeeze(hit.snippet):
                raise Rejected("own words", "a search for the question itself shows the answer")


def check_language(text: str, language: str) -> None:
    """Check that a question is in the requested language. Raises Rejected if it is not."""
    best, likely = detected(text)
    if best != language and likely.get(language, 0.0) < UNLIKELY:
        raise Rejected("language", f"the question is in {best!r} instead of {language!r}")


@dataclass(slots=True)
class AcceptedQuestions:
    """The questions accepted so far."""

    questions: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """The terms of each normalized question."""
    facts: set[tuple[str, frozenset[str]]] = field(default_factory=set[tuple[str, frozenset[str]]])
    """The answers with their documents."""

    def check(self, question: str, answer: str, documents: Iterable[str]) -> None:
        """Check that a question is new. Raises Rejected for a duplicate or near-duplicate."""
        reply, result = squeeze(question), frozenset(terms(question))
        if reply in self.questions:
            raise Rejected("duplicate", "the question exists already")
        if answer and (squeeze(answer), frozenset(documents)) in self.facts:
            raise Rejected("duplicate", "a question with this answer and evidence exists already")
        for other in self.questions.values():
            if len(result & other) >= ALIKE * len(result | other):
                raise Rejected("duplicate", "a nearly identical question exists already")

    def add(self, question: str, answer: str, documents: Iterable[str]) -> None:
        self.questions[squeeze(question)] = frozenset(terms(question))
        if answer:
            self.facts.add((squeeze(answer), frozenset(documents)))


def _words(document: Document) -> set[str]:
    return set(terms(f"{document.title}\n{document.text}"))
