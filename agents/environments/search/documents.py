"""A folder of text, HTML and JSONL as documents. Links are not followed: what is not in the folder
is none of the corpus."""

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
"""Of a file that is one document, and of a line of JSONL."""
MOST_CHARACTERS = 4_000_000
"""Of a document."""
_UNNAMED = str.maketrans({"[": "(", "]": ")", '"': "'", "\n": " "})
"""Signs that would end a citation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What `open` opens."""

    name: str
    """Its path in the folder, and of a line in a JSONL file `path#id`; of the web, its address."""
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a search found."""

    name: str
    title: str = ""
    snippet: str = ""


class Library(Protocol):
    """What can be searched: the index of a corpus, or an adapter of yours to a search API."""

    def search(self, query: str, most: int) -> Sequence[Hit]:
        """The best first, at most `most`. Raises what the policy is told of as a failed call."""
        ...

    def document(self, name: str) -> Document | None:
        """The one of that name; None: there is none."""
        ...


def made(name: str, title: str, text: str) -> Document:
    """Cleaned; without a title, by its name. Search APIs leave title and text empty, or None."""
    name = " ".join(cleaned(name).translate(_UNNAMED).split())
    title = " ".join(cleaned(title or "").split())
    return Document(name=name, title=title or name, text=cleaned(text or ""))


def files_of(folder: Path) -> list[Path]:
    """What can be read of a folder, in order. Raises ValueError where it is none."""
    if not folder.is_dir():
        raise ValueError(f"corpus {folder}: there is no such folder")
    found: list[Path] = []
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for name in names:
            path = Path(above, name)
            known = path.suffix.lower() in (*TEXT, *HTML, *LINES) and name[0] != "."
            if known and stat.S_ISREG(path.lstat().st_mode):
                found.append(path)
    return sorted(found)


def fingerprint(folder: Path, files: Sequence[Path]) -> str:
    """Changes with every file."""
    listed = [
        (os.fsencode(path.relative_to(folder)).hex(), about.st_size, about.st_mtime_ns)
        for path in files
        for about in [path.stat()]
    ]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def documents_of(folder: Path, files: Sequence[Path]) -> Iterator[Document]:
    """Of all files; blank ones are left out. Raises ValueError with file and line for what cannot
    be read, and for a name that is there twice."""
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
    """`{"text": "…", "title": "…", "id": "…"}`: title and id may be missing."""
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
                read = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON: {error}") from error
            record = cast("dict[str, Any]", read if isinstance(read, dict) else {})
            text, title = record.get("text"), record.get("title", "")
            if not isinstance(text, str) or not isinstance(title, str):
                raise ValueError(
                    f'{where}: must be an object with a text: {{"text": "…", "title": "…", '
                    '"id": "…"}; title and id may be missing. Keep other JSONL out of the corpus'
                )
            yield where, made(f"{name}#{record.get('id', number)}", title or _heading(text), text)


def _heading(text: str) -> str:
    """The first line, where it is short enough to be one."""
    lines = (line.strip() for line in text.split("\n", 8)[:8])
    first = next((line for line in lines if line), "").lstrip("#= ")
    return first if len(first) <= 120 else ""
