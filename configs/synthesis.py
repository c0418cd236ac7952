"""Every knob of `keel synthesize`: who writes the tasks, what that may cost, and of which family
they are. A recipe of its own, not part of a run's.

Each family's section is in `configs/sections/`; only the one that `family` names is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from keel.configs.sections.base import ConfigError, require, require_endpoint
from keel.configs.sections.tasks.code import CodeTasksConfig
from keel.configs.sections.tasks.general import GeneralConfig
from keel.configs.sections.tasks.search import SearchTasksConfig

Family = Literal["general", "code", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorConfig:
    """A model behind an OpenAI-compatible endpoint that writes, solves or checks tasks."""

    base_url: str
    """`http://localhost:8000/v1`"""
    model: str
    """As the endpoint calls it."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key; empty: the endpoint wants none."""
    temperature: float = 1.0
    """Of sampling; 0: greedy."""
    max_tokens: int = 8192
    """Longest reply."""
    max_concurrent: int = 8
    """Most calls in flight at once."""
    timeout_s: float = 600.0
    """Longest wait for one reply, in seconds."""
    retries: int = 4
    """Further attempts after a timeout, a refusal for load or a server error."""
    usd_per_million_prompt_tokens: float = 0.0
    """Price in US dollars, for `budget.usd`; 0: free."""
    usd_per_million_completion_tokens: float = 0.0
    """Price in US dollars, for `budget.usd`; 0: free."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sent along with each request, for example `chat_template_kwargs`."""

    def __post_init__(self) -> None:
        require_endpoint("author", self.base_url, self.api_key_env)
        require(bool(self.model), "author.model", self.model, "must name the endpoint's model")
        for name in ("max_tokens", "max_concurrent"):
            require(getattr(self, name) >= 1, f"author.{name}", getattr(self, name), "must be >= 1")
        for name in (
            "temperature",
            "retries",
            "usd_per_million_prompt_tokens",
            "usd_per_million_completion_tokens",
        ):
            require(getattr(self, name) >= 0, f"author.{name}", getattr(self, name), "must be >= 0")
        require(self.timeout_s > 0, "author.timeout_s", self.timeout_s, "must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """Ceilings over all calls, of earlier starts in the same folder too. 0: none."""

    tokens: int = 0
    """Of prompts and completions together."""
    usd: float = 0.0
    """By the prices of the authors."""

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "budget.tokens", self.tokens, "must be >= 0 (0: no ceiling)")
        require(self.usd >= 0, "budget.usd", self.usd, "must be >= 0 (0: no ceiling)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisConfig:
    """A whole recipe of `keel synthesize`."""

    family: Family
    """What kind of tasks: general agents', code agents' or search agents'."""
    dir: str
    """What is made goes here, with the record of what was thrown away; called again, it goes on."""
    seed: int = 0
    """Of what is drawn at random on Keel's side."""
    at_once: int = 4
    """Tasks that are being made at the same time."""
    author: AuthorConfig
    reference: AuthorConfig | None = None
    """general: the model that difficulty is measured by; without one, the author."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    code: CodeTasksConfig = field(default_factory=CodeTasksConfig)
    """`family: code`."""
    search: SearchTasksConfig = field(default_factory=SearchTasksConfig)
    """`family: search`."""
    general: GeneralConfig = field(default_factory=GeneralConfig)

    def __post_init__(self) -> None:
        require(bool(self.dir), "dir", self.dir, "must name a folder")
        require(self.at_once >= 1, "at_once", self.at_once, "must be >= 1")
        author = self.author
        priced = author.usd_per_million_prompt_tokens or author.usd_per_million_completion_tokens
        require(
            not self.budget.usd or bool(priced),
            "budget.usd",
            self.budget.usd,
            "needs prices: set author.usd_per_million_prompt_tokens and "
            "author.usd_per_million_completion_tokens",
        )
        if self.family == "search":
            _check_search(self.search, author)


def decides_tasks(knob: str) -> bool:
    """Whether the tasks depend on it, so that a folder of them is not gone on with otherwise. (Who
    writes them and what that may cost may change.)"""
    return knob.partition(".")[0] in {"family", "seed", *get_args(Family)}


def _check_search(search: SearchTasksConfig, author: AuthorConfig) -> None:
    require(bool(search.corpus), "search.corpus", "", "name a folder of text, HTML or JSONL")
    for knob, changes in (
        *((f"search.answerers[{n}].author", one.author) for n, one in enumerate(search.answerers)),
        ("search.verifier", search.verifier),
    ):
        try:
            replace(author, **changes)
        except TypeError as error:
            raise ConfigError(f"{knob} = {dict(changes)}: not what an author has: {error}") from (
                error
            )
