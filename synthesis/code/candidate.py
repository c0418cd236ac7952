"""Code changes that may become tasks."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.agents.environments.code.languages import LANGUAGES, ProjectLanguage, is_grading, matches
from keel.agents.environments.code.tree import Entry, Tree
from keel.configs.synthesis import CodeSourceConfig

_NO_PACKAGES = ("setup", "conftest", "noxfile", "docs", "doc", "examples", "tasks", "versioneer")
"""Modules in the root folder that are not part of the installed project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A repository before and after a change, together with the issue that asked for it."""

    key: str
    source: CodeSourceConfig
    base: Tree
    after: Tree
    issue: str
    version: str
    """Version of the project before the change, if known."""
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The commit of the change, for human readers."""

    @property
    def language(self) -> ProjectLanguage:
        return LANGUAGES[self.source.language]

    def changed(self, of: Callable[[str], bool]) -> dict[str, Entry | None]:
        """Return the changed paths with their new contents, or None for a removed file."""
        paths = {*self.base, *self.after}
        return {
            path: self.after.get(path)
            for path in sorted(paths)
            if self.base.get(path) != self.after.get(path) and of(path)
        }

    @property
    def gold(self) -> dict[str, Entry | None]:
        """The part of the change that solves the task, without tests and the files that decide how
        tests run."""
        return self.changed(lambda path: not is_grading(self.language, path))

    @property
    def harness(self) -> dict[str, Entry | None]:
        """The part of the change in tests and in the files that decide how tests run."""
        return self.changed(lambda path: is_grading(self.language, path))

    def test_files(self) -> list[str]:
        return [path for path in self.harness if matches(path, self.language.tests)]

    def patch(self, paths: Sequence[str]) -> str:
        """Return changes as a unified diff."""
        return "".join(_diff(path, self.base.get(path), self.after.get(path)) for path in paths)

    @property
    def project(self) -> list[str]:
        """Names under which copies of the project may be installed."""
        names = {self.source.name}
        if "pyproject.toml" in self.base:
            try:
                data: dict[str, Any] = tomllib.loads(self.base["pyproject.toml"][1].decode())
                names.add(str(data["project"]["name"]) or self.source.name)
            except (ValueError, LookupError, TypeError, RecursionError):  # untrusted file
                pass
        if self.source.language == "python":
            for path in self.base:
                inside = path.removeprefix("src/")
                module = inside.removesuffix("/__init__.py").removesuffix(".py")
                if "/" not in module and module != inside and not is_grading(self.language, path):
                    names.add(module)
        return sorted(names - set(_NO_PACKAGES))


def is_text(entry: Entry | None) -> bool:
    if entry is None:
        return True
    try:
        return entry[0] != "l" and "\0" not in entry[1].decode()
    except UnicodeDecodeError:
        return False


def _diff(path: str, before: Entry | None, after: Entry | None) -> str:
    if not (is_text(before) and is_text(after)):
        return f"Binary files a/{path} and b/{path} differ\n"
    old, new = (
        entry[1].decode().splitlines(keepends=True) if entry else [] for entry in (before, after)
    )
    names = (f"a/{path}" if before else "/dev/null", f"b/{path}" if after else "/dev/null")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(old, new, *names)
    )
