"""Full-text search over the documents in a folder, using SQLite's FTS5. Passages are ranked by
BM25."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from keel.agents.environments.search.documents import (
    Document,
    Hit,
    documents_of,
    excerpt,
    files_of,
    fingerprint,
    signs,
    spans,
    terms,
)

_VERSION = 2
"""Version of the index format. Increase it whenever the contents of an index change."""
_PASSAGE = 900
_SNIPPET = 280
_MAX_TERMS = 48
_SEARCH_S = 10.0
_STEPS = 1000
"""Number of SQLite instructions between two checks of the time limit."""
_TABLES = """
create table about (key text primary key, value text);
create table documents (id integer primary key, name text unique, title text, text text);
create table passages (id integer primary key, document integer, start integer, stop integer);
create virtual table found using fts5 (title, terms, signs, content = '',
    tokenize = "unicode61 remove_diacritics 0 categories 'L* N* M* Co'");
"""
_SEARCH = """
select p.document, p.start, p.stop from found join passages p on p.id = found.rowid
where found match ? order by bm25(found) limit ?
"""


class SearchIndex:
    """An open index, which can be used as a `Library`."""

    def __init__(self, path: Path) -> None:
        try:
            # Immutable, so SQLite creates no files next to it, which a sandbox does not allow.
            name = quote(str(path.absolute()))
            self._base = sqlite3.connect(
                f"file:{name}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
            about = dict(self._base.execute("select key, value from about").fetchall())
        except sqlite3.Error as error:
            raise ValueError(f"{path}: not an index of a corpus: {error}") from error
        if about.get("version") != str(_VERSION):
            raise ValueError(f"{path}: index of another version; remove it")
        self.of = about["of"]
        self._searching = threading.Lock()  # a connection has one progress handler

    def search(self, query: str, most: int) -> list[Hit]:
        if not (expression := _expression(query)):
            return []
        wanted, hits = terms(query), dict[int, Hit]()
        with self._searching:
            until = time.monotonic() + _SEARCH_S
            self._base.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
            try:
                # Several passages may belong to one document, so fetch more than `most`.
                passages = self._base.execute(_SEARCH, (expression, 8 * most)).fetchall()
            except sqlite3.OperationalError as error:
                raise ValueError("the search took too long; use fewer and rarer words") from error
            finally:
                self._base.set_progress_handler(None, 0)
        for number, start, stop in passages:
            if number not in hits and len(hits) < most:
                name, title, text = self._base.execute(
                    "select name, title, text from documents where id = ?", (number,)
                ).fetchone()
                snippet = excerpt(text[start:stop], wanted, _SNIPPET)
                hits[number] = Hit(name=name, title=title, snippet=snippet)
        return list(hits.values())

    def document(self, name: str) -> Document | None:
        row = self._base.execute(
            "select name, title, text from documents where name = ?", (name,)
        ).fetchone()
        return Document(name=row[0], title=row[1], text=row[2]) if row else None

    def documents(self) -> Iterator[Document]:
        """Yield all documents in order."""
        for row in self._base.execute("select name, title, text from documents order by id"):
            yield Document(name=row[0], title=row[1], text=row[2])

    def frequency(self, phrase: str) -> int:
        """Count the documents with a passage that contains `phrase` exactly."""
        if not (words := terms(phrase)):
            return 0
        columns = "signs" if _alone(words[0]) and len(words) == 1 else "{title terms}"
        expression = f'{columns}: "{" ".join(words)}"'
        count = (
            "select count(distinct p.document) from found join passages p on p.id = found.rowid "
            "where found match ?"
        )
        return self._base.execute(count, (expression,)).fetchone()[0]

    def __len__(self) -> int:
        return self._base.execute("select count(*) from documents").fetchone()[0]

    def close(self) -> None:
        self._base.close()


def ensure_index(folder: Path, path: Path | None = None, *, without: Sequence[Path] = ()) -> Path:
    """Build the index for `folder` if it is missing or a file has changed, and return its path.
    Raises ValueError if the corpus is unreadable or contains a file from `without`."""
    folder = folder.expanduser()
    files = files_of(folder)
    if path is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        path = cache / "keel" / "search" / f"{name}.sqlite"
    real = {file.resolve() for file in files}
    if bad := [file for file in without if file.resolve() in real]:
        raise ValueError(
            f"corpus {folder}: holds {bad[0]}, which has the answers; move it out of the corpus"
        )
    files = [file for file in files if file.resolve() != path.resolve()]
    of = fingerprint(folder, files)
    with suppress(ValueError):  # missing or invalid
        index = SearchIndex(path)
        index.close()
        if index.of == of:
            return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        _make(Path(made), folder, files, of)
        if os.geteuid() == 0:
            os.chmod(made, 0o644)  # a sandbox started by root reads it as another user
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise
    return path


def _make(path: Path, folder: Path, files: Sequence[Path], of: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as base:
        base.execute("pragma journal_mode = off")
        base.execute("pragma synchronous = off")
        base.executescript(_TABLES)
        base.execute("begin")
        row = 0
        for number, document in enumerate(documents_of(folder, files), start=1):
            base.execute(
                "insert into documents values (?, ?, ?, ?)",
                (number, document.name, document.title, document.text),
            )
            title = " ".join(terms(document.title)), signs(document.title)
            for start, stop in spans(document.text, _PASSAGE):
                row += 1
                piece = document.text[start:stop]
                base.execute("insert into passages values (?, ?, ?, ?)", (row, number, start, stop))
                base.execute(
                    "insert into found (rowid, title, terms, signs) values (?, ?, ?, ?)",
                    (row, title[0], " ".join(terms(piece)), " ".join([*title[1], *signs(piece)])),
                )
        if not row:
            raise ValueError(
                f"corpus {folder}: has no document: no text in files that end in .txt, .md, .rst, "
                ".html, .htm, .xhtml or .jsonl"
            )
        about = {"version": str(_VERSION), "of": of}
        base.executemany("insert into about values (?, ?)", about.items())
        base.execute("insert into found (found) values ('optimize')")
        base.execute("commit")


def _expression(query: str) -> str:
    """Return an FTS5 expression that matches any term of the query. Terms contain no FTS5
    syntax."""
    words = list(dict.fromkeys(terms(query)))[:_MAX_TERMS]
    return " OR ".join(f'{"signs" if _alone(one) else "{title terms}"}: "{one}"' for one in words)


def _alone(term: str) -> bool:
    """Return whether a term is a single character of a script without spaces."""
    return len(term) == 1 and bool(signs(term))
