"""Reads text, HTML and JSONL files as documents and builds a full-text index of them. The index
uses SQLite FTS5 and ranks passages by BM25. Links are not followed. The text is untrusted, so all
functions run in time linear in its length."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import stat
import tempfile
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

_TEXT, _HTML, _LINES = (".txt", ".md", ".rst"), (".html", ".htm", ".xhtml"), (".jsonl",)
_MAX_CHARACTERS = 4_000_000
_UNNAMED = str.maketrans({"[": "(", "]": ")", '"': "'", "\n": " "})
"""Replacements for characters that would end a citation if they occurred in a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    name: str
    """The document's path in the folder, `path#id` for a line of JSONL, or a web address."""
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    name: str
    title: str = ""
    snippet: str = ""


class Library(Protocol):
    """A source of documents, such as an index or the user's adapter for a search API."""

    def search(self, query: str, most: int) -> Sequence[Hit]:
        """Return up to `most` hits, best first. If this raises an exception, the tool call
        fails."""
        ...

    def document(self, name: str) -> Document | None:
        """Look up a document by its name. Returns None if it does not exist."""
        ...


def make_document(name: str, title: str, text: str) -> Document:
    """Create a document, with invisible characters removed. The title defaults to the name."""
    name = " ".join(_clean_text(name).translate(_UNNAMED).split())
    title = " ".join(_clean_text(title or "").split())
    return Document(name=name, title=title or name, text=_clean_text(text or ""))


def _list_files(folder: Path) -> list[Path]:
    """Return the files in a folder that can be read as documents, sorted."""
    if not folder.is_dir():
        raise ValueError(f"corpus {folder}: there is no such folder")
    paths: list[Path] = []
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for name in names:
            path = Path(above, name)
            known = path.suffix.lower() in (*_TEXT, *_HTML, *_LINES) and name[0] != "."
            if known and stat.S_ISREG(path.lstat().st_mode):
                paths.append(path)
    return sorted(paths)


def _fingerprint(folder: Path, files: Sequence[Path]) -> str:
    """Hash the files' names, sizes and modification times, to detect changes."""
    listed = [
        (os.fsencode(path.relative_to(folder)).hex(), about.st_size, about.st_mtime_ns)
        for path in files
        for about in [path.stat()]
    ]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _read_documents(folder: Path, files: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents of all files, skipping blank ones. Error messages name the file and the
    line."""
    seen: set[str] = set()
    for path in files:
        name = os.fsencode(path.relative_to(folder)).decode(errors="replace")
        for where, document in _documents_in(path, name):
            if not document.text:
                continue
            if len(document.text) > _MAX_CHARACTERS:
                raise ValueError(f"{where}: over {_MAX_CHARACTERS:,} characters; split it")
            if document.name in seen:
                raise ValueError(f"{where}: {document.name!r} exists already; rename one")
            seen.add(document.name)
            yield document


def _documents_in(path: Path, name: str) -> Iterator[tuple[str, Document]]:
    """Yield the documents of a file, each with its place for error messages."""
    kind = path.suffix.lower()
    if kind not in _LINES:
        text = path.read_bytes().decode(errors="replace")
        title = _heading(text)
        if kind in _HTML:
            parser = _VisibleText()
            parser.feed(text)
            parser.close()
            title, text = " ".join("".join(parser.title).split()), "".join(parser.text)
        yield str(path), make_document(name, title, text)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record: dict[str, Any] = json.loads(line)
                text, title = record["text"], record.get("title", "")
                place = f"{name}#{record.get('id', number)}"
                document = make_document(place, title or _heading(text), text)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                form = "an object with `text` and optionally `title` and `id`"
                raise ValueError(f"{path}:{number}: must be {form}: {error!r}") from error
            yield f"{path}:{number}", document


def _heading(text: str) -> str:
    lines = (line.strip() for line in text.split("\n", 8)[:8])
    first = next((line for line in lines if line), "").lstrip("#= ")
    return first if len(first) <= 120 else ""


_NAMES = """
address article aside blockquote br caption dd div dl dt figcaption footer form h1 h2 h3 h4 h5 h6
header hr li main nav ol p pre section table td th title tr ul
"""
_BLOCKS = frozenset(_NAMES.split())
_UNDISPLAYED = ("script", "style", "template", "noscript", "svg", "textarea", "iframe", "object")
_VOID_NAMES = "area base br col embed hr img input link meta source track wbr"
_VOID = frozenset(_VOID_NAMES.split())
_HIDDEN = re.compile(
    r"\shidden(?=[\s=/>]|$)|aria-hidden\s*=\s*[\"']?true|"
    r"(?:display|visibility|font-size|opacity)\s*:\s*(?:none|hidden|0(?![.\d]*[1-9]))",
    re.IGNORECASE,
)


class _VisibleText(HTMLParser):
    """Extracts the text that a browser would display, without hidden instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.title, self.text = list[str](), list[str]()
        self._hidden: list[str] = []  # open elements, starting with the outermost hidden one
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        hides = tag in _UNDISPLAYED or _HIDDEN.search(self.get_starttag_text() or "")
        if self._hidden or hides:
            if tag not in _VOID:
                self._hidden.append(tag)
        elif tag == "title":
            self._in_title = not self.title
        elif tag in _BLOCKS:
            self.text.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            if tag in self._hidden:  # an end tag without a start tag is ignored
                while self._hidden.pop() != tag:
                    pass
        elif tag == "title":
            self._in_title = False
        elif tag in _BLOCKS:
            self.text.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            (self.title if self._in_title else self.text).append(data)


_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan, Burmese, Khmer
    "\u3005\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uac00-\ud7af\U00020000-\U0003ffff"
)
"""Scripts without spaces between words. Hangul is included because its words have endings."""
_MARKS = "\u0483-\u0487\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
_TERMS = re.compile(rf"[{_UNSPACED}]+|(?:(?![{_UNSPACED}])[^\W_]|[{_MARKS}])+")
_RUN = re.compile(rf"[{_UNSPACED}]+")
_ACCENTS = re.compile("[\u0300-\u036f]")
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn"}
_KEPT = {"\n", "\t", "\u200c", "\u200d"}
"""White space and invisible joiners to keep. The joiners matter in Persian and in Indic scripts."""


def _clean_text(text: str) -> str:
    """Collapse white space and remove invisible characters, which could hide instructions for a
    model."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    unseen = {c for c in set(text) if c not in _KEPT and unicodedata.category(c) in _UNSEEN}
    text = text.translate(dict.fromkeys(map(ord, unseen)))
    lines: list[str] = []
    for line in text.split("\n"):
        line = " ".join(line.split())
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip()


def _split_words(text: str) -> list[str]:
    """Split a text into words, ignoring case and accents. Text in scripts without spaces is not
    split into words."""
    plain = _ACCENTS.sub("", unicodedata.normalize("NFKD", text.casefold()))
    return _TERMS.findall(unicodedata.normalize("NFC", plain))


def search_terms(text: str) -> list[str]:
    """Split a text into search terms. In scripts without spaces, each pair of adjacent characters
    is a term."""
    result: list[str] = []
    for run in _split_words(text):
        if len(run) > 1 and _RUN.fullmatch(run):
            result += [run[i : i + 2] for i in range(len(run) - 1)]
        else:
            result.append(run)
    return result


def _unspaced_characters(text: str) -> list[str]:
    """Keep only the characters of a text that belong to scripts without spaces."""
    return [character for run in _split_words(text) if _RUN.fullmatch(run) for character in run]


def letters_and_digits(text: str) -> str:
    """Keep only the letters and digits of a text, ignoring case and accents. Quotes are compared in
    this form."""
    return "".join(_split_words(text))


def split_ranges(text: str, most: int) -> list[tuple[int, int]]:
    """Split `text` into (start, end) ranges of at most `most` characters. A range ends early if a
    line, a sentence or a word ends in its second half."""
    boundaries: list[tuple[int, int]] = []
    start = 0
    while len(text) - start > most:
        low, high = start + most // 2, start + most
        ends = (text.rfind(sign, low, high) + len(sign) for sign in ("\n", "。", ". ", " "))
        end = next((end for end in ends if end > low), high)
        boundaries.append((start, end))
        start = end
    return [*boundaries, (start, len(text))]


def excerpt(text: str, terms: Iterable[str], most: int) -> str:
    """Return the part of `text` with the most distinct terms in `wanted`, about `most` characters
    long."""
    terms = set(terms)
    starts = range(0, len(text), most // 3) or [0]
    pieces = [(start, min(len(text), start + most)) for start in starts]

    def matches(piece: tuple[int, int]) -> int:
        part = text[slice(*piece)]
        return len(terms & {*search_terms(part), *_unspaced_characters(part)})

    start, end = max(pieces, key=matches)
    before, after = "… " if start else "", " …" if end < len(text) else ""
    return before + " ".join(text[start:end].split()) + after


_VERSION = 4
_PASSAGE = 900
_SNIPPET = 280
_MAX_TERMS = 48
_SEARCH_S = 10.0
_STEPS = 1000
_TABLES = """
create table about (key text primary key, value text);
create table documents (id integer primary key, name text unique, title text, text text);
create table passages (id integer primary key, document integer, start integer, stop integer);
create virtual table found using fts5 (title, terms, characters, content = '',
    tokenize = "unicode61 remove_diacritics 0 categories 'L* N* M* Co'");
"""
"""The column `characters` finds words of a single character in scripts without spaces, where terms
are pairs of characters."""
_SEARCH = """
select p.document, p.start, p.stop from found join passages p on p.id = found.rowid
where found match ? order by bm25(found) limit ?
"""


class SearchIndex:
    """An open full-text index, usable as a `Library`."""

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
        self.fingerprint = about["of"]
        self._searching = threading.Lock()  # a connection has one progress handler

    def search(self, query: str, most: int) -> list[Hit]:
        terms, hits = search_terms(query), dict[int, Hit]()
        # Matches any term of the query. Terms contain no FTS5 syntax.
        expression = " OR ".join(f'"{one}"' for one in list(dict.fromkeys(terms))[:_MAX_TERMS])
        if not expression:
            return []
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
                snippet = excerpt(text[start:stop], terms, _SNIPPET)
                hits[number] = Hit(name=name, title=title, snippet=snippet)
        return list(hits.values())

    def document(self, name: str) -> Document | None:
        row = self._base.execute(
            "select name, title, text from documents where name = ?", (name,)
        ).fetchone()
        return Document(name=row[0], title=row[1], text=row[2]) if row else None

    def documents(self) -> Iterator[Document]:
        for row in self._base.execute("select name, title, text from documents order by id"):
            yield Document(name=row[0], title=row[1], text=row[2])

    def document_count(self, phrase: str) -> int:
        """Count the documents that contain the exact phrase within one passage."""
        if not (words := search_terms(phrase)):
            return 0
        expression = f'"{" ".join(words)}"'
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
    """Build the index of `folder` if it is missing or outdated, and return its path. Raises
    ValueError if the corpus is unreadable or contains a file from `without`."""
    folder = folder.expanduser()
    files = _list_files(folder)
    if path is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        path = cache / "keel" / "search" / f"{name}.sqlite"
    real = {file.resolve() for file in files}
    if bad := [file for file in without if file.resolve() in real]:
        raise ValueError(f"corpus {folder}: {bad[0]} has the answers; move it out of the corpus")
    files = [file for file in files if file.resolve() != path.resolve()]
    fingerprint = _fingerprint(folder, files)
    with suppress(ValueError):  # missing or invalid
        index = SearchIndex(path)
        index.close()
        if index.fingerprint == fingerprint:
            return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, new = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        _make(Path(new), folder, files, fingerprint)
        if os.geteuid() == 0:
            os.chmod(new, 0o644)  # a sandbox started by root reads it as another user
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
    return path


def _make(path: Path, folder: Path, files: Sequence[Path], fingerprint: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as base:
        base.execute("pragma journal_mode = off")
        base.execute("pragma synchronous = off")
        base.executescript(_TABLES)
        base.execute("begin")
        row = 0
        for number, document in enumerate(_read_documents(folder, files), start=1):
            base.execute(
                "insert into documents values (?, ?, ?, ?)",
                (number, document.name, document.title, document.text),
            )
            title = " ".join(search_terms(document.title))
            for start, stop in split_ranges(document.text, _PASSAGE):
                row += 1
                piece = document.text[start:stop]
                characters = _unspaced_characters(f"{document.title}\n{piece}")
                base.execute("insert into passages values (?, ?, ?, ?)", (row, number, start, stop))
                base.execute(
                    "insert into found (rowid, title, terms, characters) values (?, ?, ?, ?)",
                    (row, title, " ".join(search_terms(piece)), " ".join(characters)),
                )
        if not row:
            suffixes = ", ".join((*_TEXT, *_HTML, *_LINES))
            raise ValueError(f"corpus {folder}: no text in files that end in {suffixes}")
        about = {"version": str(_VERSION), "of": fingerprint}
        base.executemany("insert into about values (?, ?)", about.items())
        base.execute("insert into found (found) values ('optimize')")
        base.execute("commit")
