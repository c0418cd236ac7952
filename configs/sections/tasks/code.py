"""`keel synthesize` for the family `code`: tasks from repositories with tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keel.configs.sections.base import require

CodeLanguage = Literal["python", "javascript", "cpp", "go", "rust", "java"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSourceConfig:
    """A project: a git repository, or the archives of two of its releases."""

    name: str
    """Of the project, as its packages are called: a copy that lies about goes by it."""
    language: CodeLanguage = "python"
    """Of the project: how it is set up and tested."""
    git: str = ""
    """Folder of a repository or mirror of yours. Its first-parent commits are candidates."""
    archives: tuple[str, ...] = ()
    """Two releases (.tar.gz, .zip), the older first: one candidate, with what its changelog gained
    as the issue."""
    issues: str = ""
    """JSONL of {"number", "title", "body"}; without one, the commit message is the issue."""
    ref: str = "HEAD"
    """The last commit that is looked at."""
    most: int = 200
    """Newest candidates, at most."""
    refers: bool = True
    """Only commits whose message names an issue (`#12`)."""
    setup: str = ""
    """A bash script in place of the language's own: docs/synthesis.md."""
    test: str = ""
    """A bash command in place of the language's own."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the tests."""

    def __post_init__(self) -> None:
        knob = "code.sources[]"
        require(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name)),
            f"{knob}.name",
            self.name,
            "must be letters, digits, dots and dashes",
        )
        require(
            bool(self.git) != bool(self.archives),
            f"{knob}.git",
            self.git,
            "name git or archives, one of them",
        )
        require(
            len(self.archives) in (0, 2),
            f"{knob}.archives",
            self.archives,
            "must be two files, the older release first",
        )
        require(self.most >= 1, f"{knob}.most", self.most, "must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTasksConfig:
    """From changes with tests to tasks. Each limit is a gate."""

    sources: tuple[CodeSourceConfig, ...] = ()
    python: str = ""
    """The interpreter of the sandbox, and of what is installed for tests; the recipe that trains
    names the same as environment.python. Empty: the one that Keel's virtual environment is made
    from, whose packages the policy does not see."""
    setup_turns: int = 30
    """Of the set-up agent, where the language's own set-up fails; 0: there is none."""
    setup_s: float = 900.0
    """Seconds for a set-up."""
    setup_env: tuple[str, ...] = ()
    """Names of environment variables that a set-up is told of: proxies, package indexes. It runs
    projects' own code, so no secret."""
    setup_readable: tuple[str, ...] = ()
    """Files and folders that a set-up may read: certificates, packages."""
    tests_s: float = 300.0
    """Seconds for all tests of a project."""
    memory_mib: int = 4096
    """Address space of each process of a set-up or a test, in MiB."""
    runs: int = 2
    """Of the tests, before the change and after it. A test that differs between them is left
    out."""
    judge: bool = True
    """Whether the author is asked if the issue is clear and says what the tests want."""
    least_judged: int = 3
    """Of 5, for both."""
    least_issue: int = 60
    """Characters."""
    most_issue: int = 20_000
    """Characters."""
    most_lines: int = 400
    """Changed by the gold patch in source files."""
    most_files: int = 10
    """Changed by the gold patch."""
    most_revealed: float = 0.5
    """Share of the gold patch's telling lines that stand in the issue."""
    most_tree_mib: int = 32
    """Size of the repository."""

    def __post_init__(self) -> None:
        for name, least in (
            ("setup_turns", 0),
            ("runs", 2),
            ("least_judged", 1),
            ("least_issue", 1),
            ("most_issue", 1),
            ("most_lines", 1),
            ("most_files", 1),
            ("most_tree_mib", 1),
            ("memory_mib", 64),
        ):
            value = getattr(self, name)
            require(value >= least, f"code.{name}", value, f"must be >= {least}")
        for name in ("setup_s", "tests_s"):
            require(getattr(self, name) > 0, f"code.{name}", getattr(self, name), "must be > 0")
        share = self.most_revealed
        require(0 <= share <= 1, "code.most_revealed", share, "must be from 0 to 1")
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, "code.sources[].name", twice, "must differ from source to source")
