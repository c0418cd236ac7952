"""The recipe for `keel synthesize`: the author, its costs, and one family of tasks. Only the
section of the selected `family` is used."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from keel.configs.sections.base import ConfigError, Section, knob, require_endpoints, require_unique

_Family = Literal["general", "code", "search"]
CodeLanguage = Literal["python", "javascript", "typescript", "php", "cpp", "go", "java"]
_MOST_ANSWERERS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSourceConfig(Section, path="code.sources[]"):
    """Settings for a git repository from which to make tasks."""

    name: str
    """Name of the project's package, which is used to find installed copies of it."""
    language: CodeLanguage = "python"
    """Language of the project, which selects how it is set up and tested."""
    git: str
    """Folder of a repository or mirror. Its first-parent commits are the candidates."""
    issues: str = ""
    """JSONL file of {"number", "title", "body"}. Empty: use commit messages as issues."""
    pairs: str = ""
    """JSONL file of pairs of an issue and a pull request, with the keys of SWE-bench (`repo`,
    `base_commit`, `problem_statement`, `patch`, `test_patch`). They replace the commits as
    candidates."""
    ref: str = "HEAD"
    """Last commit to consider."""
    most: int = knob(200, ge=1)
    """Maximum number of candidates. The newest are taken first."""
    refers: bool = True
    """Use only commits whose message names an issue (`#12`)."""
    setup: str = ""
    """Bash script that replaces the language's set-up (docs/synthesis.md)."""
    test: str = ""
    """Bash command that replaces the language's test command."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables for the tests."""

    def check(self) -> None:
        ok = bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name))
        self.require(ok, "name", "must be letters, digits, dots and dashes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTasksConfig(Section, path="code"):
    """Settings for tasks made from code changes with tests. Candidates that exceed a limit are
    rejected."""

    sources: tuple[CodeSourceConfig, ...] = ()
    python: str = ""
    """Python interpreter for the sandbox and the tests. The recipe that trains on the tasks needs
    the same one in environment.python. Empty: the base interpreter of Keel's virtual environment.
    """
    setup_turns: int = knob(30, ge=0)
    """Maximum number of turns for the set-up agent, which runs if the language's own set-up fails.
    0: no agent."""
    setup_s: float = knob(900.0, gt=0)
    """Timeout in seconds for a set-up."""
    setup_env: tuple[str, ...] = ()
    """Names of environment variables that a set-up may see, such as proxies and package indexes.
    The set-up runs code from the projects, so never name a secret."""
    setup_readable: tuple[str, ...] = ()
    """Files and folders that a set-up may read, such as certificates and packages."""
    tests_s: float = knob(300.0, gt=0)
    """Timeout in seconds for all tests of a project."""
    memory_mib: int = knob(4096, ge=64)
    """Address space limit in MiB per process of a set-up or test."""
    runs: int = knob(2, ge=2)
    """Number of test runs before and after the change. Tests whose result differs between runs are
    excluded."""
    judge: bool = True
    """Ask the author whether the issue is clear and specifies what the tests check."""
    least_judged: int = knob(3, ge=1)
    """Minimum score out of 5 that both judgements must reach."""
    least_issue: int = knob(60, ge=1)
    """Minimum length of the issue in characters."""
    most_issue: int = knob(20_000, ge=1)
    """Maximum length of the issue in characters."""
    most_lines: int = knob(400, ge=1)
    """Maximum number of source lines that the gold patch changes."""
    most_files: int = knob(10, ge=1)
    """Maximum number of source files that the gold patch changes."""
    most_revealed: float = knob(0.5, ge=0, le=1)
    """Maximum fraction of the gold patch's distinctive lines that appear in the issue."""
    most_tree_mib: int = knob(32, ge=1)
    """Maximum size of the repository in MiB."""

    def check(self) -> None:
        require_unique("code.sources[].name", [source.name for source in self.sources])


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralConfig(Section, path="general"):
    """Settings for synthesizing general agent tasks: a database, tools for it, and tasks of
    increasing difficulty (DeepSeek-V3.2 (2025), section 3.2.3)."""

    categories: tuple[str, ...] = ()
    """Subjects of the environments, such as `planning a trip`."""
    per_category: int = knob(1, ge=1)
    """Number of environments per category."""
    steps: int = knob(3, ge=1)
    """Maximum number of tasks per environment: a simple one, then harder ones."""
    least_tasks: int = knob(1, ge=1)
    """Minimum number of tasks; an environment with fewer is discarded."""
    attempts: int = knob(4, ge=0)
    """Number of answers (k) that the reference policy gives per task. Fewer of them must pass than
    for the previous task. 0: do not measure difficulty."""
    revisions: int = knob(3, ge=0)
    """Maximum number of times per task that the author revises a rejected draft."""
    max_turns: int = knob(24, ge=1)
    """Maximum number of turns for the author while it fills the database, and for an attempt."""
    documents: str = ""
    """Folder with facts that the author's commands may read, as an absolute path."""
    network: bool = False
    """Let the author's commands use this machine's whole network while it fills the database
    (docs/synthesis.md)."""
    database_kib: int = knob(256, ge=1)
    """Maximum size of the database in KiB."""
    bash_s: float = knob(60.0, gt=0)
    """Timeout in seconds for each command of the author."""
    call_s: float = knob(20.0, gt=0)
    """Timeout in seconds per tool call."""
    solve_s: float = knob(60.0, gt=0)
    """Timeout in seconds for a solution, including its tool calls."""
    verify_s: float = knob(10.0, gt=0)
    """Timeout in seconds for verifying one answer."""

    def check(self) -> None:
        ok = not self.documents or Path(self.documents).is_absolute()
        self.require(ok, "documents", "must be an absolute path")
        slugs = [slug(category) for category in self.categories]
        self.require(all(slugs), "categories", "each must contain letters")
        require_unique("general.categories", slugs)
        rule = f"must be at most general.steps = {self.steps}"
        self.require(self.least_tasks <= self.steps, "least_tasks", rule)


def slug(category: str) -> str:
    return re.sub(r"\W+", "_", category.lower()).strip("_")[:48]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswererConfig:
    """Settings for an agent that attempts each question. A question that any of these agents
    answers correctly is rejected as too easy."""

    system: str = ""
    """Additional system prompt."""
    tools: bool = True
    """Offer the search tools. false: answer from memory, so that questions whose answers models
    know are rejected."""
    author: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Changes to the recipe's `author`, such as `{model: …, temperature: 0.3}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTasksConfig(Section, path="search"):
    """Settings for questions about rare entities. A question is kept if every answering agent gets
    it wrong and a verification agent confirms the reference answer. See DeepSeek-V3.2 (2025),
    section 3.2.3."""

    corpus: str = ""
    """Folder with text, HTML and JSONL files."""
    index: str = ""
    """Folder for the search index. Empty: in the user's cache folder."""
    library: str = ""
    """Function (`module:name`) that returns a library, such as an adapter to a search API. It
    replaces `corpus`."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the `library` function."""
    entities: str = ""
    """Text file with one entity per line to start from. Empty: rare names in the corpus."""
    prompts: str = ""
    """JSONL file of prompts with a rubric (`prompt`, `criteria`). Those that search helps to answer
    become tasks."""
    count: int = knob(100, ge=0)
    """Number of entities to start from, with at most one question each."""
    languages: tuple[str, ...] = ("en",)
    """ISO 639-1 codes of the languages for questions, which are used in turn."""
    most_documents: int = knob(3, ge=1)
    """Maximum number of documents that mention an entity."""
    depth: int = knob(2, ge=1)
    """Minimum number of documents in the chain of evidence. Each is linked to another one by a rare
    term."""
    breadth: int = knob(2, ge=1)
    """Minimum number of facts that a question combines."""
    least_gain: float = knob(0.2, gt=0, le=1)
    """prompts: minimum difference between the scores of an answer with tools and one without."""
    most_turns: int = knob(30, ge=1)
    """Maximum number of turns per agent."""
    tries: int = knob(3, ge=1)
    """Maximum number of questions that the author may submit per entity."""
    answerers: tuple[AnswererConfig, ...] = (
        AnswererConfig(),
        AnswererConfig(system="Be quick: at most three searches."),
        AnswererConfig(tools=False),
    )
    """Agents that attempt each question."""
    verifier: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Changes to the recipe's `author` for the verification agent."""
    passes: int = knob(3, ge=1)
    """Number of verifications, each with the answers in a different order. All must agree."""
    results: int = knob(8, ge=1)
    """Number of results per search."""
    page_characters: int = knob(3000, ge=1)
    """Number of characters on a page of a document."""

    def check(self) -> None:
        ok = 1 <= len(self.answerers) <= _MOST_ANSWERERS
        self.require(ok, "answerers", f"must have 1 to {_MOST_ANSWERERS} entries")
        self.require(bool(self.languages), "languages", "must name at least one")
        ok = all(re.fullmatch("[a-z]{2}", code) for code in self.languages)
        self.require(ok, "languages", "must be ISO 639-1 codes such as en, zh or ja")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorConfig(Section, path="author"):
    """Settings for a model that writes, solves or checks tasks, served by an OpenAI-compatible
    endpoint."""

    base_url: str
    """URL of the endpoint, such as `http://localhost:8000/v1`, or several URLs of the same model,
    separated by spaces."""
    model: str
    """Model name at the endpoint."""
    api_key_env: str = ""
    """Name of the environment variable with the API key. Empty: no key."""
    temperature: float = knob(1.0, ge=0)
    """Sampling temperature. 0: greedy."""
    max_tokens: int = knob(8192, ge=1)
    """Maximum number of tokens per response."""
    max_concurrent: int = knob(8, ge=1)
    """Maximum number of concurrent requests to each server."""
    timeout_s: float = knob(600.0, gt=0)
    """Timeout in seconds per request."""
    retries: int = knob(4, ge=0)
    """Number of retries after a timeout, a rate limit, a server error or an invalid reply. Each
    attempt that times out is charged."""
    usd_per_million_prompt_tokens: float = knob(0.0, ge=0)
    """Price in US dollars, for `budget.usd`. 0: free."""
    usd_per_million_completion_tokens: float = knob(0.0, ge=0)
    """Price in US dollars, for `budget.usd`. 0: free."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Additional fields of the request body, such as `chat_template_kwargs`."""

    def check(self) -> None:
        require_endpoints("author", self.base_url, self.api_key_env)
        self.require(bool(self.model), "model", "must name the endpoint's model")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig(Section, path="budget"):
    """Limits on the total tokens and cost of all calls, including calls from earlier starts in the
    same folder."""

    tokens: int = knob(0, ge=0)
    """Maximum number of prompt and completion tokens. 0: no limit."""
    usd: float = knob(0.0, ge=0)
    """Maximum cost in US dollars, computed from the authors' prices. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisConfig(Section):
    """The recipe for `keel synthesize`."""

    RECIPES = "synthesize/"

    family: _Family
    """Kind of tasks to make: for general agents, code agents or search agents."""
    dir: str
    """Folder for the tasks and the record of rejected ones. Run again to resume."""
    seed: int = 0
    """Seed for all random choices that Keel makes."""
    at_once: int = knob(4, ge=1)
    """Number of tasks to create concurrently."""
    author: AuthorConfig
    reference: AuthorConfig | None = None
    """general: the model that measures difficulty. null: use the author."""
    budget: CostConfig = field(default_factory=CostConfig)
    code: CodeTasksConfig = field(default_factory=CodeTasksConfig)
    search: SearchTasksConfig = field(default_factory=SearchTasksConfig)
    general: GeneralConfig = field(default_factory=GeneralConfig)

    def check(self) -> None:
        self.require(bool(self.dir), "dir", "must name a folder")
        author = self.author
        priced = author.usd_per_million_prompt_tokens or author.usd_per_million_completion_tokens
        rule = "needs author.usd_per_million_prompt_tokens and usd_per_million_completion_tokens"
        self.require(not self.budget.usd or bool(priced), "budget.usd", rule)
        if self.family == "search":
            self._check_search()

    def _check_search(self) -> None:
        search = self.search
        self.require(
            bool(search.corpus) != bool(search.library),
            "search.corpus",
            "must name a folder of text, HTML or JSONL, unless search.library is set",
        )
        self.require(
            not (search.library and search.count) or bool(search.entities),
            "search.entities",
            "must name a file, as search.library cannot list its entities",
        )
        changed = {f"answerers[{n}].author": one.author for n, one in enumerate(search.answerers)}
        for name, changes in (*changed.items(), ("verifier", search.verifier)):
            try:
                replace(self.author, **changes)
            except TypeError as error:
                reason = f"not a knob of author: {error}"
                raise ConfigError(f"search.{name} = {dict(changes)}: {reason}") from error


def affects_tasks(knob: str) -> bool:
    """Return whether this knob affects the tasks. Such knobs can't be changed for an existing
    folder."""
    return knob.partition(".")[0] in {"family", "seed", *get_args(_Family)}
