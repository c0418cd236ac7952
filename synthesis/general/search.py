"""Search for authors, in a folder of documents or with the user's own function."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from keel.agents.environments.search.documents import excerpt, terms
from keel.agents.environments.search.index import SearchIndex, ensure_index
from keel.configs.schema import ConfigError
from keel.configs.synthesis import GeneralConfig
from keel.rl.turns import ToolSpec

Search = Callable[[str], Awaitable[str]]
"""A function that maps a query to text. Raises ValueError with a message for the author."""

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
"""Number of characters in a passage."""
PASSAGES = 5
MOST_SAID = 12_000
DEADLINE_S = 60.0


def search_of(config: GeneralConfig) -> Search | None:
    """Return the search that is configured, or None. Raises ConfigError if it cannot be used."""
    if config.documents:
        try:
            documents = Documents(Path(config.documents).expanduser())
        except (ValueError, OSError) as error:
            raise ConfigError(f"general.documents = {config.documents}: {error}") from error
        if not len(documents):
            raise ConfigError(f"general.documents = {config.documents}: the folder has no text")
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
                return _text(await asyncio.wrap_future(_start(function, query)))
        except TimeoutError as error:
            raise ValueError(f"the search timed out after {DEADLINE_S:g} s") from error
        except Exception as error:  # an external service: report it to the author
            raise ValueError(f"the search failed: {type(error).__name__}: {error}") from error

    return search


def _start(function: Callable[[str], Any], query: str) -> Future[Any]:
    """Run a function on a daemon thread, so that a search that hangs does not keep the process from
    exiting."""
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
    """Searches the passages in a folder of text, with the same index that policies search."""

    def __init__(self, folder: Path) -> None:
        """Index the folder. Raises ValueError or OSError if it cannot be read."""
        self._index = SearchIndex(ensure_index(folder))

    def __len__(self) -> int:
        return len(self._index)

    async def __call__(self, query: str) -> str:
        expected = terms(query)
        if not expected:
            raise ValueError("the query contains no words")
        result: list[dict[str, str]] = []
        for hit in self._index.search(query, PASSAGES):
            document = self._index.document(hit.name)
            if document is not None:
                text = excerpt(document.text, expected, PASSAGE)
                result.append({"document": hit.name, "title": hit.title, "text": text})
        return _text(result)


def _text(result: Any) -> str:
    return (result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))[
        :MOST_SAID
    ]
