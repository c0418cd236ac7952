"""Candidates from a git repository: its first-parent commits that refer to an issue."""

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
from keel.synthesis.ledger import Refused

GIT_S = 120.0
_REFERS = re.compile(r"(?:#|\bgh-|/issues/|/pull/)(\d+)\b", re.IGNORECASE)
_TRAILER = re.compile(r"^(signed-off-by|co-authored-by|reviewed-by|cc|change-id):", re.IGNORECASE)
_MERGE = re.compile(r"^Merge (pull request #\d+ from|branch|remote-tracking branch)\b.*")
_NUMBER = re.compile(r"\s*\((?:#|gh-)\d+\)\s*$", re.IGNORECASE)


class Mirror:
    """A `Source`. Reads the repository, and runs nothing of it: no hook, filter or configuration.

    So it asks git's plumbing alone: `git log` runs `gpg.program` where `log.showSignature` is set.
    """

    def __init__(self, source: CodeSourceConfig) -> None:
        """Raises ConfigError."""
        self._source = source
        self._issues = _issues(source)
        if not Path(source.git).expanduser().is_dir():
            raise ConfigError(
                f"code.sources[{source.name}].git = {source.git!r}: there is no such folder"
            )
        try:
            self._folder = self._found_folder()
            told_of = self._told(["%H", "%P", "%B"], "--first-parent", source.ref)
        except (OSError, subprocess.SubprocessError) as error:
            said = str(error)  # there is no git, or it takes too long
            if isinstance(error, subprocess.CalledProcessError):
                said = error.stderr.decode(errors="replace").strip()
            raise ConfigError(
                f"code.sources[{source.name}].git = {source.git!r}: {said}"
            ) from error
        self._commits: dict[str, tuple[str, list[str], str]] = {}
        for commit, parents, message in told_of:
            if not parents or (source.refers and not _REFERS.search(message)):
                continue
            if len(self._commits) == source.most:
                break
            key = f"{source.name}-{commit[:12]}"
            self._commits[key] = (commit, parents.split(), message)
        self.keys: Sequence[str] = list(self._commits)

    def load(self, key: str) -> Candidate:
        try:
            return self._loaded(key)
        except subprocess.SubprocessError as error:
            raise Refused("tree", f"git cannot read the change: {error}") from error

    def _loaded(self, key: str) -> Candidate:
        commit, (parent, *merged), message = self._commits[key]
        base, after = self._tree(parent), self._tree(commit)
        numbers = [int(one) for one in _REFERS.findall(message)]
        known = [self._issues[number] for number in numbers if number in self._issues]
        if not known and merged and _MERGE.match(message):
            merges = self._told(["%B"], f"{parent}..{merged[0]}")
            message = "\n".join([message, *(text for (text,) in merges)])
        try:
            tag = self._git("describe", "--tags", "--abbrev=0", parent)
        except subprocess.CalledProcessError:
            tag = ""
        version = re.search(r"\d+(\.\d+)+", tag)
        ((date,),) = self._told(["%cI"], "--max-count=1", commit)
        return Candidate(
            key=key,
            source=self._source,
            base=base,
            after=after,
            issue=known[0] if known else told(message),
            version=version[0] if version else "1.0",
            origin={"commit": commit, "parent": parent, "date": date, "refers": numbers},
        )

    def _tree(self, commit: str) -> Tree:
        """Not `git archive`: what a project does not export is wanted here, too."""
        modes: dict[str, tuple[str, str]] = {}
        for line in self._git("ls-tree", "-r", "-z", "--full-tree", commit).split("\0")[:-1]:
            about, _, path = line.partition("\t")
            mode, kind, number = about.split()
            if kind == "blob" and is_safe(path):
                modes[path] = (mode, number)
        wanted = "".join(f"{number}\n" for _, number in modes.values()).encode()
        data = self._run(["cat-file", "--batch"], given=wanted)
        tree: Tree = {}
        at = 0
        for path, (mode, number) in modes.items():
            end = data.index(b"\n", at)
            words = data[at:end].split()
            if words[1:2] != [b"blob"]:
                raise Refused("tree", f"the mirror lacks {path} ({number})")
            size = int(words[2])
            at = end + 1 + size + 1
            kinds = {"120000": "l", "100755": "x"}
            tree[path] = (kinds.get(mode, "f"), data[end + 1 : end + 1 + size])
        return tree

    def _found_folder(self) -> str:
        folder = Path(self._source.git).expanduser().absolute()
        return str(folder / ".git" if (folder / ".git").exists() else folder)

    def _told(self, what: Sequence[str], *which: str) -> list[list[str]]:
        """Each of these commits in these words of git's formats. No message holds a zero byte."""
        form = "".join(f"%x00{word}" for word in what)
        parts = self._git("rev-list", f"--format={form}%x00", *which).split("\0")
        size = len(what) + 1  # and the line with the commit's name
        return [parts[at + 1 : at + size] for at in range(0, len(parts) - 1, size)]

    def _git(self, *words: str) -> str:
        return self._run(list(words)).decode(errors="replace")

    def _run(self, words: list[str], given: bytes = b"") -> bytes:
        command = ["git", f"--git-dir={self._folder}", "-c", "safe.directory=*", *words]
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/"}
        # A mirror that lacks objects must not fetch them.
        env |= {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
        ran = subprocess.run(
            command, env=env, input=given, capture_output=True, timeout=GIT_S, check=True
        )
        return ran.stdout


def told(message: str) -> str:
    """A commit message as an issue: without trailers, the line of a merge, and its own number."""
    lines = [
        line.rstrip()
        for line in message.splitlines()
        if not _TRAILER.match(line.strip()) and not _MERGE.match(line)
    ]
    kept = [line for n, line in enumerate(lines) if not line or line not in lines[:n]]
    return "\n".join(_NUMBER.sub("", line) for line in kept).strip()


def _issues(source: CodeSourceConfig) -> Mapping[int, str]:
    if not source.issues:
        return {}
    path, found = Path(source.issues).expanduser(), dict[int, str]()
    knob = f"code.sources[{source.name}].issues"
    try:
        lines = path.read_bytes().split(b"\n")  # no other line break ends a line of JSONL
    except OSError as error:
        raise ConfigError(f"{knob} = {source.issues!r}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            issue: dict[str, Any] = json.loads(line)
            found[int(issue["number"])] = f"{issue['title']}\n\n{issue.get('body') or ''}".strip()
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{path}:{number}: must be {{"number": 12, "title": "…", "body": "…"}}: {error!r}'
            ) from error
    return found
