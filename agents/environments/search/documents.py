"""Reads text, HTML and JSONL files in a folder as documents. Links are not followed."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from keel.agents.environments.search.markup import text_of_html
from keel.agents.environments.search.text import cleaned

TEXT, HTML, LINES = (".txt", ".md", ".rst"), (".html", ".htm", ".xhtml"), (".jsonl",)
MOST_BYTES = 32 << 20
"""Size limit for a file that is a single document, and for a line of JSONL."""
MOST_CHARACTERS = 4_000_000
"""Maximum length of a document."""
_UNNAMED = str.maketrans({"[": "(", "]": ")", '"': "'", "\n": " "})
"""Replacements for characters that would end a citation if they were in a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document from a corpus or a search API."""

    name: str
    """The document's path in the folder, `path#id` for a line of JSONL, or a web address."""
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A search result."""

    name: str
    title: str = ""
    snippet: str = ""


class Library(Protocol):
    """A source of documents, which is an index of a corpus or your adapter to a search API."""

    def search(self, query: str, most: int) -> Sequence[Hit]:
        """Return up to `most` hits, best first. If an error is raised, the policy sees a failed
        call."""
        ...

    def document(self, name: str) -> Document | None:
        """Return the document with that name, or None if there is none."""
        ...


def made(name: str, title: str, text: str) -> Document:
    """Create a document without invisible characters.

    If the title is empty, it is replaced with the name. A search API may return an empty or None
    title and text.
    """
    name = " ".join(cleaned(name).translate(_UNNAMED).split())
    title = " ".join(cleaned(title or "").split())
    return Document(name=name, title=title or name, text=cleaned(text or ""))


def files_of(folder: Path) -> list[Path]:
    """Return the files in a folder that can be read as documents, in order.

    Raises ValueError if the folder is missing.
    """
    if not folder.is_dir():
        raise ValueError(f"corpus {folder}: there is no such folder")
    paths: list[Path] = []
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for name in names:
            path = Path(above, name)
            known = path.suffix.lower() in (*TEXT, *HTML, *LINES) and name[0] != "."
            if known and stat.S_ISREG(path.lstat().st_mode):
                paths.append(path)
    return sorted(paths)


def fingerprint(folder: Path, files: Sequence[Path]) -> str:
    """Return a hash that changes whenever a file changes."""
    listed = [
        (os.fsencode(path.relative_to(folder)).hex(), about.st_size, about.st_mtime_ns)
        for path in files
        for about in [path.stat()]
    ]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def documents_of(folder: Path, files: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents in all files, except blank ones.

    Raises ValueError with the file and line if a document is unreadable or its name occurs twice.
    """
    seen: set[str] = set()
    for path in files:
        name = os.fsencode(path.relative_to(folder)).decode(errors="replace")
        for where, document in _of_file(path, name):
            if not document.text:
                continue
            if len(document.text) > MOST_CHARACTERS:
                raise ValueError(
                    f"{where}: a document has at most {MOST_CHARACTERS:,} characters; split it"
                )
            if document.name in seen:
                raise ValueError(
                    f"{where}: there is a document {document.name!r} already; rename one, or give "
                    "the lines of a file ids that differ"
                )
            seen.add(document.name)
            yield document


def _of_file(path: Path, name: str) -> Iterator[tuple[str, Document]]:
    kind = path.suffix.lower()
    if kind in LINES:
        yield from _of_lines(path, name)
        return
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: a file has at most {MOST_BYTES >> 20} MiB; split it")
    text = path.read_bytes().decode(errors="replace")
    title, text = text_of_html(text) if kind in HTML else (_heading(text), text)
    yield str(path), made(name, title, text)


def _of_lines(path: Path, name: str) -> Iterator[tuple[str, Document]]:
    """Read lines like `{"text": "…", "title": "…", "id": "…"}`. Title and id are optional."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MOST_BYTES:
                raise ValueError(f"{where}: a line has at most {MOST_BYTES >> 20} MiB")
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON: {error}") from error
            record = cast("dict[str, Any]", value if isinstance(value, dict) else {})
            text, title = record.get("text"), record.get("title", "")
            if not isinstance(text, str) or not isinstance(title, str):
                raise ValueError(
                    f'{where}: must be an object with a text: {{"text": "…", "title": "…", '
                    '"id": "…"}; title and id may be missing. Keep other JSONL out of the corpus'
                )
            yield where, made(f"{name}#{record.get('id', number)}", title or _heading(text), text)


def _heading(text: str) -> str:
    """Return the first line if it is short enough to be a heading, else ""."""
    lines = (line.strip() for line in text.split("\n", 8)[:8])
    first = next((line for line in lines if line), "").lstrip("#= ")
    return first if len(first) <= 120 else ""
