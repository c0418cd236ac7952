"""An environment for a search agent, with tools to search, open and find in a corpus or search API.

Its verdict covers citations only. Whether the answer is right is decided by the prompt's own
reward, which is a rule or a judge with criteria (DeepSeek-V3.2, 2025, section 3.2.3, uses both).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from keel.agents.environments.messages import with_instructions
from keel.agents.environments.search.citations import HOW, citations_in, fault
from keel.agents.environments.search.documents import Document, Library, made
from keel.agents.environments.search.index import SearchIndex, ensure_index
from keel.agents.environments.search.text import excerpt, spans, terms

MARK = (
    "Put the final answer, a name or a number and nothing else, between <answer> and </answer>, "
    "once, in your last message."
)
MOST_QUERY = 400
"""Maximum length in characters of a query, and of a text to find in a document."""
FOUND = 8
"""How many matches `find` shows."""
AROUND = 160
"""How many characters are shown before and after each match."""


class Search:
    """An environment for questions from JSONL that come with an answer or criteria.

    `corpus` is a folder with documents, and `index` the path of its index, which is built if it is
    missing. Instead of a corpus, `library` can name a function (`module:name`) that is called with
    `options` and returns a `Library`, or `ready` can be the library itself.

    A search returns at most `results` hits, and documents are shown in pages of `page_characters`.
    With `cite`, the policy is told how to cite.
    """

    def __init__(
        self,
        corpus: str = "",
        index: str = "",
        library: str = "",
        options: Mapping[str, Any] | None = None,
        results: int = 8,
        page_characters: int = 3000,
        cite: bool = True,
        ready: Library | None = None,
    ) -> None:
        """Open the index or the library.

        Raises ValueError if an argument is invalid.
        """
        for name, value in (("results", results), ("page_characters", page_characters)):
            if value < 1:
                raise ValueError(f"search: {name} = {value} must be at least 1")
        if ready is None and bool(library) == bool(corpus or index):
            raise ValueError("search: name a corpus (a folder), or a library (module:name)")
        self._library = ready or _library(corpus, index, library, options or {})
        self._results, self._page, self._cite = results, page_characters, cite
        self._names: list[str] = []
        self._open: Document | None = None
        self.opened: dict[str, Document] = {}
        """The documents that have been opened so far, by name."""
        self._evidence: list[str] = []

    def opening(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        own: Mapping[str, Any] = task["reward"].get("environment") or {}
        self._evidence = [str(name) for name in own.get("evidence") or ()]
        mark = MARK if task["reward"].get("kind") == "answer" else ""
        return with_instructions(task["messages"], HOW if self._cite else "", mark)

    def search(self, query: str) -> str:
        """Search for documents by their words.

        Args:
            query: A few words, names rather than sentences.
        """
        if len(query) > MOST_QUERY:
            raise ValueError(f"a query has at most {MOST_QUERY} characters")
        hits = self._library.search(query, self._results)[: self._results]
        if not hits:
            return "Nothing was found. Try other words, or fewer."
        cleaned = [made(hit.name, hit.title, hit.snippet) for hit in hits]
        self._names = [hit.name for hit in hits]
        lines = [
            f"{number}. {hit.title}" + (f" ({hit.name})" if hit.name != hit.title else "")
            for number, hit in enumerate(cleaned, start=1)
        ]
        snippets = [excerpt(hit.text, terms(query), 2 * AROUND) for hit in cleaned]
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
        pages = spans(opened.text, self._page)
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
        if not text.strip() or len(text) > MOST_QUERY:
            raise ValueError(f"name 1 to {MOST_QUERY} characters to find")
        whole, pages = self._open.text, spans(self._open.text, self._page)
        pattern = re.compile(r"\s+".join(map(re.escape, text.split())), re.IGNORECASE)
        lines: list[str] = []
        count = 0
        for count, match in enumerate(pattern.finditer(whole), start=1):
            if count <= FOUND:
                page = sum(start <= match.start() for start, _ in pages)
                low, high = max(0, match.start() - AROUND), match.end() + AROUND
                lines.append(f"page {page}: … {' '.join(whole[low:high].split())} …")
        if not lines:
            return f"{self._open.name} does not have {text!r}."
        more = [f"({count - FOUND} more)"] if count > FOUND else []
        return "\n".join([*lines, *more])

    def _document(self, name: str) -> Document | None:
        """Return the document with this name, or with this number in the last search."""
        if (document := self.opened.get(name.strip())) is not None:
            return document
        document = self._library.document(name.strip())
        if document is None and name.strip().isdecimal() and len(name) < 5:
            number = int(name)
            if 1 <= number <= len(self._names):
                document = self._library.document(self._names[number - 1])
        return made(document.name, document.title, document.text) if document is not None else None

    def verdict(self, messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], Any]:
        """Return `citations`, the share of valid citations (0 without any), and `evidence`.

        `evidence` is the share of the task's source documents that were opened, or 1 if the task
        names none.
        """
        turns = [message for message in messages if message.get("role") == "assistant"]
        text = str(turns[-1].get("content") or "") if turns else ""
        cited = citations_in(text.rpartition("</think>")[2])
        faults = [fault(one, self.opened) for one in cited]
        seen = [name in self.opened for name in self._evidence]
        parts = {
            "citations": faults.count("") / len(faults) if faults else 0.0,
            "evidence": sum(seen) / len(seen) if seen else 1.0,
        }
        return parts, {"opened": sorted(self.opened), "faults": [f for f in faults if f]}


def prepare(
    arguments: Mapping[str, Any], without: Sequence[Path]
) -> tuple[dict[str, Any], list[Path]]:
    """Index the corpus before a run, outside the sandbox.

    Returns the arguments and the paths that the sandbox must be able to read. `without` are files
    with answers, which the corpus must not contain. Raises ValueError or OSError as `ensure_index`
    does.
    """
    arguments = dict(arguments)
    if not (corpus := arguments.pop("corpus", "")):
        path_text = arguments.get("index")
        return arguments, [Path(str(path_text))] if path_text else []
    path_text = str(arguments.get("index") or "")
    path = ensure_index(Path(str(corpus)), Path(path_text) if path_text else None, without=without)
    return {**arguments, "index": str(path.absolute())}, [path.absolute()]


def _library(corpus: str, index: str, library: str, options: Mapping[str, Any]) -> Library:
    if library:
        module, _, name = library.partition(":")
        return cast(Library, getattr(import_module(module), name)(**options))
    if corpus:
        return SearchIndex(ensure_index(Path(corpus), Path(index) if index else None))
    return SearchIndex(Path(index))
