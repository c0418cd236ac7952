"""What an author may look up while it fills a database: a folder of documents, or whatever a
function of the user's searches."""

from __future__ import annotations

import asyncio
import html
import importlib
import json
import re
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from keel.configs.schema import ConfigError
from keel.configs.sections.tasks.general import GeneralConfig
from keel.rl.turns import ToolSpec

Search = Callable[[str], Awaitable[str]]
"""From a query to what was found, as text. Raises ValueError for what the author should know."""

SEARCH = ToolSpec(
    name="search",
    description="Search for passages of text.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "A few words"}},
        "required": ["query"],
        "additionalProperties": False,
    },
)
PASSAGE = 1200
"""Characters of a passage."""
PASSAGES = 5
MOST_SAID = 12_000
DEADLINE_S = 60.0
_TAGS = re.compile(r"(?s)<(script|style)\b.*?</\1>|<[^>]*>")


def search_of(config: GeneralConfig) -> Search | None:
    """None where there is none. Raises ConfigError."""
    if config.documents:
        folder = Path(config.documents).expanduser()
        documents = Documents(folder)
        if not documents.count:
            raise ConfigError(
                f"general.documents = {config.documents}: no .txt, .md, .html or .jsonl in there"
            )
        return documents
    if not config.search:
        return None
    module, _, name = config.search.partition(":")
    try:
        sys.path.insert(0, "")
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"general.search = {config.search}: {error}") from error
    finally:
        sys.path.remove("")

    async def search(query: str) -> str:
        try:
            async with asyncio.timeout(DEADLINE_S):
                found: Any = await asyncio.wrap_future(_begun(function, query))
        except TimeoutError as error:
            raise ValueError(f"the search did not end within {DEADLINE_S:g} s") from error
        except Exception as error:  # a service of somebody else's: the author is told
            raise ValueError(f"the search failed: {type(error).__name__}: {error}") from error
        return _text(found)

    return search


def _begun(function: Callable[[str], Any], query: str) -> Future[Any]:
    """On a thread that nobody joins: one that hangs would keep the command from ending."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(query))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="keel-search", daemon=True).start()
    return future


class Documents:
    """A folder of text, by passages, in SQLite's full-text index."""

    def __init__(self, folder: Path) -> None:
        self._index = sqlite3.connect(":memory:")
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text)")
        rows = [
            (title, text[start : start + PASSAGE])
            for title, text in _texts(folder)
            for start in range(0, len(text), PASSAGE)
        ]
        self._index.executemany("INSERT INTO passages VALUES (?, ?)", rows)
        self.count = len(rows)

    async def __call__(self, query: str) -> str:
        words = list(dict.fromkeys(re.findall(r"\w+", query)))[:32]
        if not words:
            raise ValueError("a query has words")
        found = self._index.execute(
            "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), PASSAGES),
        )
        return _text([{"title": title, "text": text} for title, text in found])


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".txt", ".md", ".html", ".jsonl") or not path.is_file():
            continue
        text, name = (
            path.read_text(encoding="utf-8", errors="replace"),
            str(path.relative_to(folder)),
        )
        if path.suffix == ".html":
            text = html.unescape(_TAGS.sub(" ", text))
        yield name, text


def _text(found: Any) -> str:
    return (found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))[:MOST_SAID]
