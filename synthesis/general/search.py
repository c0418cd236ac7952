"""Search for authors in a folder of documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from keel.agents.environments.search.documents import excerpt, terms
from keel.agents.environments.search.index import SearchIndex, ensure_index
from keel.configs.schema import ConfigError
from keel.rl.turns import ToolSpec

Search = Callable[[str], str]
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
_PASSAGE = 1200
"""Number of characters in a passage."""
_PASSAGES = 5
_MAX_RESULT = 12_000


def search_of(folder: str) -> Search | None:
    """Return a search over the passages in a folder, with the index that policies search too.
    Returns None if `folder` is empty, and raises ConfigError if it cannot be used."""
    if not folder:
        return None
    try:
        index = SearchIndex(ensure_index(Path(folder).expanduser()))
    except (ValueError, OSError) as error:
        raise ConfigError(f"general.documents = {folder}: {error}") from error
    if not len(index):
        raise ConfigError(f"general.documents = {folder}: the folder has no text")

    def search(query: str) -> str:
        words = terms(query)
        if not words:
            raise ValueError("the query contains no words")
        results: list[dict[str, str]] = []
        for hit in index.search(query, _PASSAGES):
            if document := index.document(hit.name):
                text = excerpt(document.text, words, _PASSAGE)
                results.append({"document": hit.name, "title": hit.title, "text": text})
        return json.dumps(results, ensure_ascii=False)[:_MAX_RESULT]

    return search
