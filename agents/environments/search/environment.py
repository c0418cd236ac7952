"""The search agent's environment: search, open and find, over a corpus or a search API.

The verdict is about citations alone. Whether the answer is right is for the prompt's own reward to
say: a rule, or a judge with criteria (DeepSeek-V3.2, 2025, section 3.2.3, has both).
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
"""Characters of a query, and of what is looked for in a document."""
FOUND = 8
"""Places that `find` shows."""
AROUND = 160
"""Characters before and after each."""


class Search:
    """Tasks from JSONL: question, and answer or criteria.

    corpus: a folder, or its index in `index` (made where it is missing); library: in their place
    `module:name`, called with `options`, which returns a `Library`. results: of one search;
    page_characters: of one page. cite: tell the policy how to
    cite.
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
        """ready: in place of all of these. Raises ValueError."""
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
        """By name, whatever was opened so far."""
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
        return "\n".join(f"{line}\n   {said}" if said else line for line, said in both)

    def open(self, document: str, page: int = 1) -> str:
        """Open a document, and read a page of it.

        Args:
            document: Its name, or its number in the last search.
            page: From 1.
        """
        found = self._document(document)
        if found is None:
            raise ValueError(f"there is no document {document[:200]!r}; search for it")
        pages = spans(found.text, self._page)
        if not 1 <= page <= len(pages):
            raise ValueError(f"{found.name} has {len(pages)} pages; there is no page {page}")
        self._open = self.opened[found.name] = found
        start, stop = pages[page - 1]
        text = found.text[start:stop].strip()
        return f"{found.title} ({found.name}), page {page} of {len(pages)}\n\n{text}"

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
        wanted = re.compile(r"\s+".join(map(re.escape, text.split())), re.IGNORECASE)
        lines: list[str] = []
        count = 0
        for count, found in enumerate(wanted.finditer(whole), start=1):
            if count <= FOUND:
                page = sum(start <= found.start() for start, _ in pages)
                low, high = max(0, found.start() - AROUND), found.end() + AROUND
                lines.append(f"page {page}: … {' '.join(whole[low:high].split())} …")
        if not lines:
            return f"{self._open.name} does not have {text!r}."
        more = [f"({count - FOUND} more)"] if count > FOUND else []
        return "\n".join([*lines, *more])

    def _document(self, name: str) -> Document | None:
        """By its name, or its number in the last search. Of a library: what it says."""
        if (found := self.opened.get(name.strip())) is not None:
            return found
        found = self._library.document(name.strip())
        if found is None and name.strip().isdecimal() and len(name) < 5:
            number = int(name)
            if 1 <= number <= len(self._names):
                found = self._library.document(self._names[number - 1])
        return made(found.name, found.title, found.text) if found is not None else None

    def verdict(self, messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], Any]:
        """`citations`: the share of the answer's that hold, 0 without any. `evidence`: of the
        documents that the task rests on, the share that was opened; 1 where it names none."""
        said = [message for message in messages if message.get("role") == "assistant"]
        text = str(said[-1].get("content") or "") if said else ""
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
    """Before a run, outside the sandbox: the arguments with an index of the corpus, and what an
    episode reads of this machine. without: files with answers. Raises ValueError, OSError."""
    arguments = dict(arguments)
    if not (corpus := arguments.pop("corpus", "")):
        given = arguments.get("index")
        return arguments, [Path(str(given))] if given else []
    given = str(arguments.get("index") or "")
    path = ensure_index(Path(str(corpus)), Path(given) if given else None, without=without)
    return {**arguments, "index": str(path.absolute())}, [path.absolute()]


def _library(corpus: str, index: str, library: str, options: Mapping[str, Any]) -> Library:
    if library:
        module, _, name = library.partition(":")
        return cast(Library, getattr(import_module(module), name)(**options))
    if corpus:
        return SearchIndex(ensure_index(Path(corpus), Path(index) if index else None))
    return SearchIndex(Path(index))
