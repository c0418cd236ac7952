"""`keel synthesize` for the family `search`: questions whose answers lie deep in a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.configs.sections.base import require

MOST_ANSWERERS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswererConfig:
    """An agent that tries to answer. A question that one of them gets right is too easy."""

    system: str = ""
    """What it is told besides its task."""
    tools: bool = True
    """false: it answers from memory, so what any model knows is no task."""
    author: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What differs from the recipe's `author`: `{model: …, temperature: 0.3}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTasksConfig:
    """From long-tail entities to questions that every answering agent gets wrong, and that a
    verification agent finds rightly answered. DeepSeek-V3.2 (2025), section 3.2.3."""

    corpus: str = ""
    """A folder of text, HTML and JSONL."""
    index: str = ""
    """Where its index is kept; empty: in the cache folder of the user."""
    count: int = 100
    """Entities to start from: one question each, at most."""
    languages: tuple[str, ...] = ("en",)
    """ISO 639-1 codes of the questions' languages, in turn."""
    entities: Literal["frequency", "author"] = "frequency"
    """Who finds rare named things: a heuristic, for scripts with capital letters, katakana, and
    names in quotes or titles; or the author, document by document."""
    most_documents: int = 3
    """An entity stands in so many documents at most."""
    depth: int = 2
    """Documents that the evidence goes through, at least; each linked with another by a rare
    term."""
    breadth: int = 2
    """Facts that a question joins, at least."""
    helpful: float = 0.0
    """Share of open questions, which a rubric grades and which search helps with."""
    least_gain: float = 0.2
    """helpful: by how much an answer with tools must be better than one without, of 0 … 1."""
    most_turns: int = 30
    """Of each agent."""
    tries: int = 3
    """Questions that the author may hand in for an entity, after a gate has refused the one
    before."""
    answerers: tuple[AnswererConfig, ...] = (
        AnswererConfig(),
        AnswererConfig(system="Be quick: at most three searches."),
        AnswererConfig(tools=False),
    )
    """Who tries to answer."""
    verifier: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What differs from the recipe's `author` for the verification agent."""
    passes: int = 3
    """Verifications, each with the answers in another order, all of which must agree."""
    results: int = 8
    """Of one search."""
    page_characters: int = 3000
    """Of a page of a document."""

    def __post_init__(self) -> None:
        for name in (
            "count",
            "most_documents",
            "depth",
            "breadth",
            "most_turns",
            "tries",
            "passes",
            "results",
            "page_characters",
        ):
            require(getattr(self, name) >= 1, f"search.{name}", getattr(self, name), "must be >= 1")
        require(0 <= self.helpful <= 1, "search.helpful", self.helpful, "must be in [0, 1]")
        require(0 < self.least_gain <= 1, "search.least_gain", self.least_gain, "must be in (0, 1]")
        require(
            1 <= len(self.answerers) <= MOST_ANSWERERS,
            "search.answerers",
            len(self.answerers),
            f"name 1 to {MOST_ANSWERERS}",
        )
        require(bool(self.languages), "search.languages", [], "name at least one, such as en")
        for code in self.languages:
            require(
                len(code) == 2 and code.isascii() and code.islower(),
                "search.languages",
                code,
                "must be ISO 639-1 codes such as en, zh or ja",
            )
