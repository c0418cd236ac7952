"""Checks an answer's citations against the documents that the policy opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from keel.agents.environments.search.documents import Document
from keel.agents.environments.search.text import signs, squeeze

HOW = (
    "Cite what your answer rests on: the name of a document that you have opened and words that "
    'stand in it, as [[name: "words"]].'
)
MOST = 32
"""Maximum number of citations that are checked."""
MOST_CHARACTERS = 1500
LEAST, LEAST_SIGNS = 12, 6
"""Minimum length of a quote in letters and digits, and in characters of scripts without spaces. A
shorter quote could be found in almost any document."""
_CITED = re.compile(r"(.*?):\s*[\"“”«「『'](.*)[\"“”»」』']\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Citation:
    name: str
    quote: str = ""


def citations_in(text: str) -> list[Citation]:
    """Return the citations in a text in order, without duplicates."""
    citations, at = dict[Citation, None](), 0
    while len(citations) < MOST and (start := text.find("[[", at)) >= 0:
        if (end := text.find("]]", start)) < 0:
            break
        inside, at = text[start + 2 : end], end + 2
        if len(inside) <= MOST_CHARACTERS:
            cited = _CITED.fullmatch(inside)
            name, quote = cited.groups() if cited else (inside, "")
            citations[Citation(" ".join(name.split()), quote)] = None
    return list(citations)


def fault(citation: Citation, opened: Mapping[str, Document]) -> str:
    """Return why a citation is invalid, or "" if it is valid."""
    if citation.name not in opened:
        return f"no document {citation.name[:200]!r} was opened"
    return quote_fault(citation.quote, opened[citation.name])


def quote_fault(quote: str, document: Document) -> str:
    """Return why a quote is not valid for `document`, or "" if it is.

    White space, case and punctuation are ignored.
    """
    words = squeeze(quote)
    if len(words) < (LEAST_SIGNS if len(signs(quote)) > len(words) / 2 else LEAST):
        return f"the quote {quote[:80]!r} is too short to say anything; quote a clause"
    if words not in _squeezed(document.text):
        return f"{document.name} does not say {quote[:200]!r}"
    return ""


@lru_cache(maxsize=32)  # an answer may cite a long document many times
def _squeezed(text: str) -> str:
    return squeeze(text)
