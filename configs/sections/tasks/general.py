"""Synthesis of general agents' tasks: a database, tools over it, and tasks that grow harder."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keel.configs.sections.base import require


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralConfig:
    """`family: general`. DeepSeek-V3.2 (2025), section 3.2.3."""

    categories: tuple[str, ...] = ()
    """What environments are about: `planning a trip`."""
    per_category: int = 1
    """Environments of each."""
    steps: int = 3
    """Tasks of an environment at most: a simple one, then harder ones."""
    least_tasks: int = 1
    """With fewer an environment is thrown away."""
    attempts: int = 4
    """k: answers of the reference policy to each task; fewer of them must pass than at the step
    before. 0: not looked at."""
    revisions: int = 3
    """How often the author may mend what a gate refused, at each step."""
    max_turns: int = 24
    """Of the author while it fills the database, and of an attempt."""
    documents: str = ""
    """A folder of text that the author may search: .txt, .md, .html, .jsonl."""
    search: str = ""
    """Instead of documents: `module:function`, called with a query, which returns text or a list of
    results, for example from a web search API. It runs in Keel's own process."""
    database_kib: int = 256
    """Largest database."""
    bash_s: float = 60.0
    """Longest command of the author's."""
    call_s: float = 20.0
    """Longest call of a tool."""
    solve_s: float = 60.0
    """Longest solution, with its calls."""
    verify_s: float = 10.0
    """Longest verification of one answer."""

    def __post_init__(self) -> None:
        slugs = [slug(each) for each in self.categories]
        for each, name in zip(self.categories, slugs, strict=True):
            require(bool(name), "general.categories", each, "name a subject, in letters")
            require(
                slugs.count(name) == 1, "general.categories", each, f"two have the folder {name}"
            )
        for name in ("per_category", "steps", "least_tasks", "max_turns", "database_kib"):
            require(
                getattr(self, name) >= 1, f"general.{name}", getattr(self, name), "must be >= 1"
            )
        for name in ("attempts", "revisions"):
            require(
                getattr(self, name) >= 0, f"general.{name}", getattr(self, name), "must be >= 0"
            )
        require(
            self.least_tasks <= self.steps,
            "general.least_tasks",
            self.least_tasks,
            f"must be at most general.steps = {self.steps}",
        )
        for name in ("bash_s", "call_s", "solve_s", "verify_s"):
            require(getattr(self, name) > 0, f"general.{name}", getattr(self, name), "must be > 0")
        require(
            not (self.documents and self.search),
            "general.search",
            self.search,
            "name one of documents and search",
        )


def slug(category: str) -> str:
    """The category in the name of a folder."""
    return re.sub(r"\W+", "_", category.lower()).strip("_")[:48]
