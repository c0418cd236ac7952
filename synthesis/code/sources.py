"""Finds candidates in git repositories."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.agents.environments.code.tree import Tree, is_safe
from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeSourceConfig
from keel.synthesis.code.candidate import Candidate
from keel.synthesis.ledger import Rejected

_GIT_S = 120.0
_REFERS = re.compile(r"(?:#|\bgh-|/issues/|/pull/)(\d+)\b", re.IGNORECASE)
_TRAILER = re.compile(r"^(signed-off-by|co-authored-by|reviewed-by|cc|change-id):", re.IGNORECASE)
_MERGE = re.compile(r"^Merge (pull request #\d+ from|branch|remote-tracking branch)\b.*")
_NUMBER = re.compile(r"\s*\((?:#|gh-)\d+\)\s*$", re.IGNORECASE)


class GitSource:
    """Takes candidates from the first-parent commits of a git repository that refer to an issue. No
    code from the repository runs: only plumbing commands are used, since even `git log` may run a
    configured program."""

    def __init__(self, source: CodeSourceConfig) -> None:
        """Read the repository. Raises ConfigError if it cannot be used."""
        self._source = source
        self._issues = _read_issues(source)
        folder = Path(source.git).expanduser().absolute()
        self._folder = str(folder / ".git" if (folder / ".git").exists() else folder)
        try:
            commits = self._log_fields(["%H", "%P", "%B"], "--first-parent", source.ref)
        except (OSError, subprocess.SubprocessError) as error:
            reply = str(error)  # git is missing, or timed out
            if isinstance(error, subprocess.CalledProcessError):
                reply = error.stderr.decode(errors="replace").strip()
            knob = f"code.sources[{source.name}].git = {source.git!r}"
            raise ConfigError(f"{knob}: {reply}") from error
        self._commits: dict[str, tuple[str, list[str], str]] = {}
        for commit, parents, message in commits:
            if parents and (not source.refers or _REFERS.search(message)):
                key = f"{source.name}-{commit[:12]}"
                self._commits[key] = (commit, parents.split(), message)
        self.keys: Sequence[str] = list(self._commits)[: source.most]

    def load(self, key: str) -> Candidate:
        """Load a candidate. Raises Rejected if it cannot become a task."""
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
        try:
            tag = self._git("describe", "--tags", "--abbrev=0", parent)
        except subprocess.SubprocessError:
            tag = ""
        version = re.search(r"\d+(\.\d+)+", tag)
        return Candidate(
            key=key,
            source=self._source,
            base=base,
            after=after,
            issue=known[0] if known else _issue_text(message),
            version=version[0] if version else "1.0",
            origin={"commit": commit, "parent": parent, "date": date, "refers": numbers},
        )

    def _tree(self, commit: str) -> Tree:
        """Read the files in a commit without `git archive`, which honours export-ignore."""
        modes: dict[str, tuple[str, str]] = {}
        for line in self._git("ls-tree", "-r", "-z", "--full-tree", commit).split("\0")[:-1]:
            about, _, path = line.partition("\t")
            mode, kind, number = about.split()
            if kind == "blob" and is_safe(path):
                modes[path] = (mode, number)
        numbers = "".join(f"{number}\n" for _, number in modes.values()).encode()
        data = self._run(["cat-file", "--batch"], numbers)
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
        """Return the formatted fields of each commit. They are separated by NUL bytes, which
        messages cannot contain."""
        form = "".join(f"%x00{word}" for word in what)
        parts = self._git("rev-list", f"--format={form}%x00", *which).split("\0")
        size = len(what) + 1  # plus the line with the commit hash
        return [parts[at + 1 : at + size] for at in range(0, len(parts) - 1, size)]

    def _git(self, *words: str) -> str:
        return self._run(list(words)).decode(errors="replace")

    def _run(self, words: list[str], data: bytes = b"") -> bytes:
        command = ["git", f"--git-dir={self._folder}", "-c", "safe.directory=*", *words]
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/"}
        # A partial mirror must not fetch missing objects.
        env |= {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
        return subprocess.run(
            command, env=env, input=data, capture_output=True, timeout=_GIT_S, check=True
        ).stdout


def _issue_text(message: str) -> str:
    """Turn a commit message into an issue: remove trailers, merge line and its own number."""
    lines = [
        line.rstrip()
        for line in message.splitlines()
        if not _TRAILER.match(line.strip()) and not _MERGE.match(line)
    ]
    kept = [line for n, line in enumerate(lines) if not line or line not in lines[:n]]
    return "\n".join(_NUMBER.sub("", line) for line in kept).strip()


def _read_issues(source: CodeSourceConfig) -> Mapping[int, str]:
    issues: dict[int, str] = {}
    if source.issues:
        try:
            # JSONL lines end with \n only.
            for line in filter(None, Path(source.issues).expanduser().read_bytes().split(b"\n")):
                issue: dict[str, Any] = json.loads(line)
                text = f"{issue['title']}\n\n{issue.get('body') or ''}"
                issues[int(issue["number"])] = text.strip()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"code.sources[{source.name}].issues = {source.issues!r}: each line must be "
                f'{{"number": 12, "title": "…", "body": "…"}}: {error!r}'
            ) from error
    return issues
