"""An environment for search agents, with tools to search, open and find in a corpus or search API.
The verdict covers the citations, and the prompt's own reward covers the answer, as in DeepSeek-V3.2
(2025), section 3.2.3."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from keel.agents.environments import add_instructions
from keel.agents.environments.search.documents import (
    Document,
    Library,
    SearchIndex,
    ensure_index,
    excerpt,
    letters_and_digits,
    make_document,
    search_terms,
    split_ranges,
)

_MARK = (
    "Put the final answer, a name or a number and nothing else, between <answer> and </answer>, "
    "once, in your last message."
)
_MAX_QUERY = 400
_MAX_MATCHES = 8
_CONTEXT = 160


_HOW = (
    "Cite what your answer rests on: the name of a document that you have opened and words that "
    'stand in it, as [[name: "words"]].'
)
_MAX_CITATIONS = 32
_MAX_CHARACTERS = 1500
_MIN_LETTERS, _MIN_SIGNS = 12, 6
"""Minimum length of a quote in letters, or in characters of scripts without spaces."""
_CITED = re.compile(r"(.*?):\s*[\"“”«「『'](.*)[\"“”»」』']\s*", re.DOTALL)


def _citations_in(text: str) -> list[tuple[str, str]]:
    citations, at = dict[tuple[str, str], None](), 0
    while len(citations) < _MAX_CITATIONS and (start := text.find("[[", at)) >= 0:
        if (end := text.find("]]", start)) < 0:
            break
        inside, at = text[start + 2 : end], end + 2
        if len(inside) <= _MAX_CHARACTERS:
            cited = _CITED.fullmatch(inside)
            name, quote = cited.groups() if cited else (inside, "")
            citations[" ".join(name.split()), quote] = None
    return list(citations)


def explain_invalid_quote(quote: str, document: Document) -> str:
    """Return the reason why a quote is invalid, or "" if it is valid. White space, case and
    punctuation are ignored."""
    words = letters_and_digits(quote)
    unspaced = sum(character > "\u0dff" for character in words) > len(words) / 2
    if len(words) < (_MIN_SIGNS if unspaced else _MIN_LETTERS):
        return f"the quote {quote[:80]!r} is too short to say anything; quote a clause"
    if words not in _squeezed(document.text):
        return f"{document.name} does not say {quote[:200]!r}"
    return ""


@lru_cache(maxsize=32)  # an answer may cite a long document many times
def _squeezed(text: str) -> str:
    return letters_and_digits(text)


class Search:
    """A search environment for questions from JSONL. It searches the `index` that `prepare` makes
    of a corpus, or a `Library`. A library is passed as `ready`, or is created by calling the
    function `library` (`module:name`) with `options`. With `cite`, the opening asks the policy to
    cite its sources."""

    def __init__(
        self,
        index: str = "",
        library: str = "",
        options: Mapping[str, Any] | None = None,
        results: int = 8,
        page_characters: int = 3000,
        cite: bool = True,
        ready: Library | None = None,
    ) -> None:
        for name, value in (("results", results), ("page_characters", page_characters)):
            if value < 1:
                raise ValueError(f"search: {name} = {value} must be at least 1")
        if ready is None and bool(library) == bool(index):
            raise ValueError("search: name a corpus (a folder), or a library (module:name)")
        if ready is None:
            ready = load_library(library, options or {}) if library else SearchIndex(Path(index))
        self._library = ready
        self._results, self._page, self._cite = results, page_characters, cite
        self._names: list[str] = []
        self._open: Document | None = None
        self.opened: dict[str, Document] = {}
        self._evidence: list[str] = []

    def opening(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        own: Mapping[str, Any] = task["reward"].get("environment") or {}
        self._evidence = [str(name) for name in own.get("evidence") or ()]
        mark = _MARK if task["reward"].get("kind") == "answer" else ""
        return add_instructions(task["messages"], _HOW if self._cite else "", mark)

    def search(self, query: str) -> str:
        """Search for documents by their words.

        Args:
            query: A few words, names rather than sentences.
        """
        if len(query) > _MAX_QUERY:
            raise ValueError(f"a query has at most {_MAX_QUERY} characters")
        hits = self._library.search(query, self._results)[: self._results]
        if not hits:
            return "Nothing was found. Try other words, or fewer."
        cleaned = [make_document(hit.name, hit.title, hit.snippet) for hit in hits]
        self._names = [hit.name for hit in hits]
        lines = [
            f"{number}. {hit.title}" + (f" ({hit.name})" if hit.name != hit.title else "")
            for number, hit in enumerate(cleaned, start=1)
        ]
        snippets = [excerpt(hit.text, search_terms(query), 2 * _CONTEXT) for hit in cleaned]
        both = zip(lines, snippets, strict=True)
        return "\n".join(f"{line}\n   {text}" if text else line for line, text in both)

    def open(self, document: str, page: int = 1) -> str:
        """Open a document, and read a page of it.

        Args:
            document: Its name, or its number in the last search.
            page: From 1.
        """
        opened = self._document(document)
        if opened is None:
            raise ValueError(f"there is no document {document[:200]!r}; search for it")
        pages = split_ranges(opened.text, self._page)
        if not 1 <= page <= len(pages):
            raise ValueError(f"{opened.name} has {len(pages)} pages; there is no page {page}")
        self._open = self.opened[opened.name] = opened
        start, stop = pages[page - 1]
        text = opened.text[start:stop].strip()
        return f"{opened.title} ({opened.name}), page {page} of {len(pages)}\n\n{text}"

    def find(self, text: str) -> str:
        """Find words in the document that was opened last.

        Args:
            text: Words as they stand there; case does not matter.
        """
        if self._open is None:
            raise ValueError("no document is open; open one first")
        if not text.strip() or len(text) > _MAX_QUERY:
            raise ValueError(f"name 1 to {_MAX_QUERY} characters to find")
        whole, pages = self._open.text, split_ranges(self._open.text, self._page)
        pattern = re.compile(r"\s+".join(map(re.escape, text.split())), re.IGNORECASE)
        lines: list[str] = []
        count = 0
        for count, match in enumerate(pattern.finditer(whole), start=1):
            if count <= _MAX_MATCHES:
                page = sum(start <= match.start() for start, _ in pages)
                low, high = max(0, match.start() - _CONTEXT), match.end() + _CONTEXT
                lines.append(f"page {page}: … {' '.join(whole[low:high].split())} …")
        if not lines:
            return f"{self._open.name} does not have {text!r}."
        more = [f"({count - _MAX_MATCHES} more)"] if count > _MAX_MATCHES else []
        return "\n".join([*lines, *more])

    def _document(self, name: str) -> Document | None:
        if (document := self.opened.get(name.strip())) is not None:
            return document
        document = self._library.document(name.strip())
        if document is None and name.strip().isdecimal() and len(name) < 5:
            number = int(name)
            if 1 <= number <= len(self._names):
                document = self._library.document(self._names[number - 1])
        return (
            make_document(document.name, document.title, document.text)
            if document is not None
            else None
        )

    def verdict(self, messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], Any]:
        """Return two fractions: `citations`, the fraction of citations that are valid (0 without
        citations), and `evidence`, the fraction of the task's source documents that were opened (1
        if the task names none)."""
        turns = [message for message in messages if message.get("role") == "assistant"]
        text = str(turns[-1].get("content") or "") if turns else ""
        faults = [
            explain_invalid_quote(quote, self.opened[name])
            if name in self.opened
            else f"no document {name[:200]!r} was opened"
            for name, quote in _citations_in(text.rpartition("</think>")[2])
        ]
        seen = [name in self.opened for name in self._evidence]
        parts = {
            "citations": faults.count("") / len(faults) if faults else 0.0,
            "evidence": sum(seen) / len(seen) if seen else 1.0,
        }
        return parts, {"opened": sorted(self.opened), "faults": [f for f in faults if f]}


def prepare(
    arguments: Mapping[str, Any], without: Sequence[Path]
) -> tuple[dict[str, Any], list[Path]]:
    """Index the corpus before a run, outside the sandbox. Returns the arguments and the paths that
    the environment has to read. Raises ValueError if the corpus contains a file from `without`."""
    arguments = dict(arguments)
    path = Path(str(arguments["index"])) if arguments.get("index") else None
    if corpus := arguments.pop("corpus", ""):
        path = ensure_index(Path(str(corpus)), path, without=without).absolute()
        arguments["index"] = str(path)
    return arguments, [path] if path else []


def load_library(library: str, options: Mapping[str, Any]) -> Library:
    """Import the function `library` (`module:name`) and call it with `options` to create a library.
    Modules in the working directory can be imported."""
    module, _, name = library.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a local file does not replace a package
    return cast(Library, getattr(import_module(module), name)(**options))
