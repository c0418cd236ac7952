"""Gates that check a question before anyone tries to answer it. None of them needs a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from keel.agents.environments.search.documents import Library, squeeze, terms
from keel.agents.environments.search.environment import Search, quote_fault
from keel.agents.environments.search.index import SearchIndex
from keel.rewards.language import detected
from keel.synthesis.ledger import Rejected
from keel.synthesis.search.question import Draft, Evidence

_ALIKE = 0.8
"""Two questions are near-duplicates if they share at least this fraction of their combined
terms."""
_RARE = 0.05
"""A term links two documents only if at most this fraction of all documents contains it. A term
that occurs in only two documents is always allowed."""
_UNLIKELY = 0.02
"""Reject a question if the probability that it is in the requested language is below this."""


def check_evidence(
    evidence: Sequence[Evidence], search: Search, *, depth: int, breadth: int
) -> None:
    """Check that every fact is quoted from a document that the author opened. Raises Rejected if
    one is not."""
    for one in evidence:
        check_quote("evidence", one.document, one.quote, search)
    facts = _separate_quotes(evidence, search)
    if facts < breadth:
        raise Rejected("breadth", f"only {facts} facts are joined, at least {breadth} are required")
    documents = {one.document for one in evidence}
    if len(documents) < depth:
        raise Rejected(
            "depth", f"only {len(documents)} documents are used, at least {depth} are required"
        )


def check_quote(gate: str, name: str, quote: str, search: Search) -> None:
    """Check that a quote occurs in an opened document. Raises Rejected, naming `gate`, if it does
    not."""
    document = search.opened.get(name)
    if document is None:
        raise Rejected(gate, f"{name!r} was not opened; name documents you read")
    if wrong := quote_fault(quote, document):
        raise Rejected(gate, wrong)


def _separate_quotes(evidence: Sequence[Evidence], search: Search) -> int:
    """Return the number of quotes. Overlapping quotes in a document count as one."""
    places: list[tuple[str, int, int]] = []
    for one in evidence:
        start = squeeze(search.opened[one.document].text).find(squeeze(one.quote))
        places.append((one.document, start, start + len(squeeze(one.quote))))
    count, document, last = 0, "", 0
    for name, start, end in sorted(places):
        count += name != document or start >= last
        last = max(end, last) if name == document else end
        document = name
    return count


def check_chain(evidence: Sequence[Evidence], search: Search, index: SearchIndex) -> None:
    """Check that the documents are linked: a rare term quoted from one must appear in another.
    Raises Rejected if they are not."""
    documents = {one.document: search.opened[one.document] for one in evidence}
    most = max(2, int(_RARE * len(index)))
    rare: dict[str, set[str]] = {name: set() for name in documents}
    for one in evidence:
        rare[one.document] |= {
            term for term in set(terms(one.quote)) if index.frequency(term) <= most
        }
    words = {name: set(terms(f"{d.title}\n{d.text}")) for name, d in documents.items()}
    linked, others = [evidence[0].document], set(documents) - {evidence[0].document}
    for name in linked:  # grows while it is read
        new = [o for o in others if rare[name] & words[o] or rare[o] & words[name]]
        linked += new
        others -= set(new)
    if others:
        raise Rejected(
            "chain",
            f"{min(others)!r} is not linked with the others: no rare term of a quote is in the "
            "other document",
        )


def check_answer(draft: Draft, library: Library, *, depth: int) -> None:
    """Check that the answer appears in the evidence but is not given away. It must appear neither
    in the question nor in the first result of a search for the question. Raises Rejected
    otherwise."""
    spellings = [squeeze(one) for one in (draft.answer, *draft.also)]
    if not all(spellings):
        raise Rejected("evidence", "the answer, or another spelling of it, has no letter or digit")
    if not any(spellings[0] in squeeze(one.quote) for one in draft.evidence):
        raise Rejected("evidence", f"no quote contains the answer {draft.answer!r}")
    if any(one in squeeze(draft.question) for one in spellings):
        raise Rejected("own words", "the question contains its answer")
    if depth > 1:
        try:
            hits = library.search(draft.question, 1)
        except Exception as error:  # a search API raises anything
            raise Rejected("own words", f"the search for the question failed: {error}") from error
        for hit in hits:
            if spellings[0] in squeeze(hit.snippet):
                raise Rejected("own words", "a search for the question itself shows the answer")


def check_language(text: str, language: str) -> None:
    """Check that a question is in the requested language. Raises Rejected if it is not."""
    best, likely = detected(text)
    if best != language and likely.get(language, 0.0) < _UNLIKELY:
        raise Rejected("language", f"the question is in {best!r} instead of {language!r}")


@dataclass(slots=True)
class AcceptedQuestions:
    """The questions that have been accepted so far."""

    questions: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """Maps each normalized question to its terms."""
    facts: set[tuple[str, frozenset[str]]] = field(default_factory=set[tuple[str, frozenset[str]]])
    """The answers with the documents they come from."""

    def check(self, question: str, answer: str, documents: Iterable[str]) -> None:
        """Check that a question is new. Raises Rejected if it is a duplicate or near-duplicate."""
        reply, result = squeeze(question), frozenset(terms(question))
        if reply in self.questions:
            raise Rejected("duplicate", "the question exists already")
        if answer and (squeeze(answer), frozenset(documents)) in self.facts:
            raise Rejected("duplicate", "a question with this answer and evidence exists already")
        for other in self.questions.values():
            if len(result & other) >= _ALIKE * len(result | other):
                raise Rejected("duplicate", "a nearly identical question exists already")

    def add(self, question: str, answer: str, documents: Iterable[str]) -> None:
        self.questions[squeeze(question)] = frozenset(terms(question))
        if answer:
            self.facts.add((squeeze(answer), frozenset(documents)))
