"""Finds code changes in git repositories that can become tasks."""

import difflib
import hashlib
import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.agents.environments.code.languages import (
    LANGUAGES,
    ProjectLanguage,
    affects_grading,
    matches_pattern,
)
from keel.agents.environments.code.tree import Entry, Tree, is_safe
from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeSourceConfig
from keel.synthesis.ledger import Rejected

_NO_PACKAGES = ("setup", "conftest", "noxfile", "docs", "doc", "examples", "tasks", "versioneer")
"""Modules in the root folder that do not belong to the installed project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A repository before and after a code change, along with the issue that the change
    resolves."""

    key: str
    source: CodeSourceConfig
    base: Tree
    after: Tree
    issue: str
    version: str
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def language(self) -> ProjectLanguage:
        return LANGUAGES[self.source.language]

    @property
    def gold(self) -> dict[str, Entry | None]:
        """The gold patch: all changed files except tests and files that control how tests run. A
        deleted file is None."""
        return self._changed(affecting_grading=False)

    @property
    def harness(self) -> dict[str, Entry | None]:
        return self._changed(affecting_grading=True)

    def _changed(self, *, affecting_grading: bool) -> dict[str, Entry | None]:
        return {
            path: self.after.get(path)
            for path in sorted({*self.base, *self.after})
            if self.base.get(path) != self.after.get(path)
            and affects_grading(self.language, path) == affecting_grading
        }

    def test_files(self) -> list[str]:
        return [path for path in self.harness if matches_pattern(path, self.language.tests)]

    def patch(self, paths: Iterable[str]) -> str:
        return "".join(_diff(path, self.base.get(path), self.after.get(path)) for path in paths)

    @property
    def project(self) -> list[str]:
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
                if (
                    "/" not in module
                    and module != inside
                    and not affects_grading(self.language, path)
                ):
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


_GIT_S = 120.0
_REFERS = re.compile(r"(?:#|\bgh-|/issues/|/pull/)(\d+)\b", re.IGNORECASE)
_TRAILER = re.compile(r"^(signed-off-by|co-authored-by|reviewed-by|cc|change-id):", re.IGNORECASE)
_MERGE = re.compile(r"^Merge (pull request #\d+ from|branch|remote-tracking branch)\b.*")
_NUMBER = re.compile(r"\s*\((?:#|gh-)\d+\)\s*$", re.IGNORECASE)


class GitSource:
    """Finds candidates in a git repository, among the first-parent commits that refer to an issue.
    None of the repository's code is run. Only plumbing commands are used, because even `git log`
    can run a program set in the config."""

    def __init__(self, source: CodeSourceConfig) -> None:
        self._source = source
        folder = Path(source.git).expanduser().absolute()
        self._folder = str(folder / ".git" if (folder / ".git").exists() else folder)
        self._issues = _read_issues(source)
        self._commits: dict[str, tuple[str, list[str], str]] = {}
        self.keys: Sequence[str] = self._read_keys()

    def _read_keys(self) -> list[str]:
        source = self._source
        try:
            commits = self._log_fields(["%H", "%P", "%B"], "--first-parent", source.ref)
        except (OSError, subprocess.SubprocessError) as error:
            reply = str(error)  # git is missing, or timed out
            if isinstance(error, subprocess.CalledProcessError):
                reply = error.stderr.decode(errors="replace").strip()
            knob = f"code.sources[{source.name}].git = {source.git!r}"
            raise ConfigError(f"{knob}: {reply}") from error
        for commit, parents, message in commits:
            if parents and (not source.refers or _REFERS.search(message)):
                key = f"{source.name}-{commit[:12]}"
                self._commits[key] = (commit, parents.split(), message)
        return list(self._commits)[: source.most]

    def load(self, key: str) -> Candidate:
        commit, (parent, *merged), message = self._commits[key]
        try:
            base, after = self._tree(parent), self._tree(commit)
            numbers = [int(one) for one in _REFERS.findall(message)]
            known = [self._issues[number] for number in numbers if number in self._issues]
            if not known and merged and _MERGE.match(message):
                merges = self._log_fields(["%B"], f"{parent}..{merged[0]}")
                message = "\n".join([message, *(text for (text,) in merges)])
            ((date,),) = self._log_fields(["%cI"], "--max-count=1", commit)
        except subprocess.SubprocessError as error:
            raise Rejected("tree", f"git cannot read the change: {error}") from error
        return Candidate(
            key=key,
            source=self._source,
            base=base,
            after=after,
            issue=known[0] if known else _issue_text(message),
            version=self._version(parent),
            origin={"commit": commit, "parent": parent, "date": date, "refers": numbers},
        )

    def _version(self, commit: str) -> str:
        try:
            tag = self._git("describe", "--tags", "--abbrev=0", commit)
        except subprocess.SubprocessError:
            tag = ""
        version = re.search(r"\d+(\.\d+)+", tag)
        return version[0] if version else "1.0"

    def _tree(self, commit: str, env: Mapping[str, str] = {}) -> Tree:
        """Read the files in a commit. `git archive` isn't used because it would leave out files
        marked export-ignore."""
        modes: dict[str, tuple[str, str]] = {}
        for line in self._git("ls-tree", "-r", "-z", "--full-tree", commit, env=env).split("\0")[
            :-1
        ]:
            about, _, path = line.partition("\t")
            mode, kind, number = about.split()
            if kind == "blob" and is_safe(path):
                modes[path] = (mode, number)
        numbers = "".join(f"{number}\n" for _, number in modes.values()).encode()
        data = self._run(["cat-file", "--batch"], numbers, env)
        tree: Tree = {}
        at = 0
        for path, (mode, number) in modes.items():
            end = data.index(b"\n", at)
            words = data[at:end].split()
            if words[1:2] != [b"blob"]:
                raise Rejected("tree", f"the mirror lacks {path} ({number})")
            size = int(words[2])
            at = end + 1 + size + 1
            kinds = {"120000": "l", "100755": "x"}
            tree[path] = (kinds.get(mode, "f"), data[end + 1 : end + 1 + size])
        return tree

    def _log_fields(self, what: Sequence[str], *which: str) -> list[list[str]]:
        """Return the requested fields for each commit. In git's output, they are separated by NUL
        bytes, which commit messages can't contain."""
        form = "".join(f"%x00{word}" for word in what)
        parts = self._git("rev-list", f"--format={form}%x00", *which).split("\0")
        size = len(what) + 1  # plus the line with the commit hash
        return [parts[at + 1 : at + size] for at in range(0, len(parts) - 1, size)]

    def _git(self, *words: str, env: Mapping[str, str] = {}) -> str:
        return self._run(list(words), env=env).decode(errors="replace")

    def _run(self, words: list[str], data: bytes = b"", env: Mapping[str, str] = {}) -> bytes:
        command = ["git", f"--git-dir={self._folder}", "-c", "safe.directory=*", *words]
        path = "/usr/local/bin:/usr/bin:/bin"
        env = {"PATH": path, "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/", **env}
        # A partial mirror must not fetch missing objects.
        env |= {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
        return subprocess.run(
            command, env=env, input=data, capture_output=True, timeout=_GIT_S, check=True
        ).stdout


_PAIR = ("base_commit", "problem_statement", "patch", "test_patch")


class PairSource(GitSource):
    """Reads candidates from a JSONL file of issues and pull requests in SWE-bench format. The
    repository must contain every `base_commit`."""

    def _read_keys(self) -> list[str]:
        super()._read_keys()  # checks that the repository can be read
        source = self._source
        self._pairs: dict[str, dict[str, str]] = {}
        try:
            for line in filter(None, Path(source.pairs).expanduser().read_bytes().split(b"\n")):
                pair = {name: str(value) for name, value in json.loads(line).items()}
                if pair["repo"].rpartition("/")[2] == source.name:
                    _ = [pair[name] for name in _PAIR]  # KeyError if one is missing
                    digest = hashlib.blake2b(line, digest_size=6).hexdigest()
                    self._pairs[f"{source.name}-{digest}"] = pair
            if not self._pairs:
                raise ValueError(f"no pair has a `repo` named {source.name}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            knob = f"code.sources[{source.name}].pairs = {source.pairs!r}"
            raise ConfigError(f"{knob}: not in the format of SWE-bench: {error!r}") from error
        return list(self._pairs)[: source.most]

    def load(self, key: str) -> Candidate:
        pair = self._pairs[key]
        commit = pair["base_commit"]
        with tempfile.TemporaryDirectory() as folder:
            # The patched tree is written to its own index and objects, not to the repository.
            env = {"GIT_INDEX_FILE": f"{folder}/index", "GIT_OBJECT_DIRECTORY": folder}
            try:
                objects = self._git("rev-parse", "--git-path", "objects").strip()
                env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(Path(objects).absolute())
                self._git("read-tree", commit, env=env)
                for name in ("patch", "test_patch"):
                    if pair[name].strip():
                        words = ["apply", "--cached", "--whitespace=nowarn", "-"]
                        self._run(words, f"{pair[name].rstrip()}\n".encode(), env)
                after = self._tree(self._git("write-tree", env=env).strip(), env)
                base = self._tree(commit)
            except subprocess.SubprocessError as error:
                why = getattr(error, "stderr", None) or str(error).encode()
                text = why.decode(errors="replace").strip()[:300]
                raise Rejected("tree", f"git cannot apply the patches: {text}") from error
        return Candidate(
            key=key,
            source=self._source,
            base=base,
            after=after,
            issue=pair["problem_statement"].strip(),
            version=self._version(commit),
            origin={"parent": commit, "instance_id": pair.get("instance_id", "")},
        )


def _issue_text(message: str) -> str:
    """Turn a commit message into an issue by dropping trailers, the merge line and the issue's own
    number."""
    lines = [
        line.rstrip()
        for line in message.splitlines()
        if not _TRAILER.match(line.strip()) and not _MERGE.match(line)
    ]
    kept = [line for n, line in enumerate(lines) if not line or line not in lines[:n]]
    return "\n".join(_NUMBER.sub("", line) for line in kept).strip()


def _read_issues(source: CodeSourceConfig) -> Mapping[int, str]:
    if not source.issues:
        return {}
    issues: dict[int, str] = {}
    try:
        # JSONL lines end with \n only.
        for line in filter(None, Path(source.issues).expanduser().read_bytes().split(b"\n")):
            issue: dict[str, Any] = json.loads(line)
            text = f"{issue['title']}\n\n{issue.get('body') or ''}"
            issues[int(issue["number"])] = text.strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        knob = f"code.sources[{source.name}].issues = {source.issues!r}"
        form = "each line must have `number` and `title`, and may have `body`"
        raise ConfigError(f"{knob}: {form}: {error!r}") from error
    return issues
