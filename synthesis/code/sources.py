"""Find candidates in git repositories and in archives of releases."""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import stat
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.agents.environments.code.languages import matches
from keel.agents.environments.code.tree import Tree, is_safe
from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeSourceConfig
from keel.synthesis.code.candidate import Candidate, is_text
from keel.synthesis.ledger import Rejected

GIT_S = 120.0
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
        self._issues = _issues(source)
        if not Path(source.git).expanduser().is_dir():
            raise ConfigError(f"code.sources[{source.name}].git = {source.git!r}: no such folder")
        try:
            self._folder = self._found_folder()
            commits = self._log_fields(["%H", "%P", "%B"], "--first-parent", source.ref)
        except (OSError, subprocess.SubprocessError) as error:
            reply = str(error)  # git is missing, or timed out
            if isinstance(error, subprocess.CalledProcessError):
                reply = error.stderr.decode(errors="replace").strip()
            raise ConfigError(
                f"code.sources[{source.name}].git = {source.git!r}: {reply}"
            ) from error
        self._commits: dict[str, tuple[str, list[str], str]] = {}
        for commit, parents, message in commits:
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
            raise Rejected("tree", f"git cannot read the change: {error}") from error

    def _loaded(self, key: str) -> Candidate:
        commit, (parent, *merged), message = self._commits[key]
        base, after = self._tree(parent), self._tree(commit)
        numbers = [int(one) for one in _REFERS.findall(message)]
        known = [self._issues[number] for number in numbers if number in self._issues]
        if not known and merged and _MERGE.match(message):
            merges = self._log_fields(["%B"], f"{parent}..{merged[0]}")
            message = "\n".join([message, *(text for (text,) in merges)])
        try:
            tag = self._git("describe", "--tags", "--abbrev=0", parent)
        except subprocess.CalledProcessError:
            tag = ""
        version = re.search(r"\d+(\.\d+)+", tag)
        ((date,),) = self._log_fields(["%cI"], "--max-count=1", commit)
        return Candidate(
            key=key,
            source=self._source,
            base=base,
            after=after,
            issue=known[0] if known else issue_text(message),
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
        expected = "".join(f"{number}\n" for _, number in modes.values()).encode()
        data = self._run(["cat-file", "--batch"], given=expected)
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

    def _found_folder(self) -> str:
        folder = Path(self._source.git).expanduser().absolute()
        return str(folder / ".git" if (folder / ".git").exists() else folder)

    def _log_fields(self, what: Sequence[str], *which: str) -> list[list[str]]:
        """Return the formatted fields of each commit. They are separated by NUL bytes, which
        messages cannot contain."""
        form = "".join(f"%x00{word}" for word in what)
        parts = self._git("rev-list", f"--format={form}%x00", *which).split("\0")
        size = len(what) + 1  # plus the line with the commit hash
        return [parts[at + 1 : at + size] for at in range(0, len(parts) - 1, size)]

    def _git(self, *words: str) -> str:
        return self._run(list(words)).decode(errors="replace")

    def _run(self, words: list[str], given: bytes = b"") -> bytes:
        command = ["git", f"--git-dir={self._folder}", "-c", "safe.directory=*", *words]
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/"}
        # A partial mirror must not fetch missing objects.
        env |= {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
        ran = subprocess.run(
            command, env=env, input=given, capture_output=True, timeout=GIT_S, check=True
        )
        return ran.stdout


def issue_text(message: str) -> str:
    """Turn a commit message into an issue: remove trailers, merge line and its own number."""
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
    path, result = Path(source.issues).expanduser(), dict[int, str]()
    knob = f"code.sources[{source.name}].issues"
    try:
        lines = path.read_bytes().split(b"\n")  # JSONL lines end with \n only
    except OSError as error:
        raise ConfigError(f"{knob} = {source.issues!r}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            issue: dict[str, Any] = json.loads(line)
            result[int(issue["number"])] = f"{issue['title']}\n\n{issue.get('body') or ''}".strip()
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{path}:{number}: must be {{"number": 12, "title": "…", "body": "…"}}: {error!r}'
            ) from error
    return result


CHANGELOGS = ("change*", "history*", "news*", "release*notes*")
MADE_BY_PACKING = ("PKG-INFO", "*.egg-info/", "SOURCES.txt")
UNREADABLE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(NotImplementedError, RuntimeError),  # of zipfile: methods it lacks, a password
)
"""Errors raised when an archive cannot be unpacked."""
MOST_BYTES = 256 << 20
"""Maximum size in bytes of an unpacked archive."""


class ArchiveSource:
    """A source with a single candidate: the change between two releases, with the difference of
    their changelogs as its issue."""

    def __init__(self, source: CodeSourceConfig) -> None:
        """Check the archives. Raises ConfigError if they cannot be used."""
        self._source = source
        self._paths = [Path(path).expanduser() for path in source.archives]
        for path in self._paths:
            if not path.is_file():
                raise ConfigError(f"code.sources[{source.name}].archives: no file {str(path)!r}")
        self._key = f"{source.name}-{'-'.join(version_of(path) for path in self._paths)}"
        self.keys: Sequence[str] = [self._key]

    def load(self, key: str) -> Candidate:
        base, after = (_unpacked(path) for path in self._paths)
        return Candidate(
            key=key,
            source=self._source,
            base=base,
            after=after,
            issue=changelog_additions(base, after),
            version=version_of(self._paths[0]),
            origin={"archives": [path.name for path in self._paths]},
        )


def version_of(path: Path) -> str:
    result = re.search(r"\d+(\.\d+)*[0-9A-Za-z.]*?(?=\.tar|\.zip|\.tgz|$)", path.name)
    return result[0] if result else "1.0"


def changelog_additions(base: Tree, after: Tree) -> str:
    """Return the lines that the newer changelog adds to the older one."""
    for path in sorted(after, key=lambda path: (path.count("/"), path)):
        name = path.lower()
        entry = after[path]
        if not matches(name.rpartition("/")[2], CHANGELOGS) or not is_text(entry):
            continue
        if not name.endswith((".md", ".rst", ".txt", "changes", "changelog", "history", "news")):
            continue
        if path not in base:  # the whole file would be new
            raise Rejected("issue", "the older release has no changelog")
        old = set(base[path][1].decode(errors="replace").splitlines())
        lines = [line for line in entry[1].decode().splitlines() if line not in old]
        if text := "\n".join(lines).strip():
            return text
    raise Rejected("issue", "no changelog describes the change")


def _unpacked(path: Path) -> Tree:
    tree: Tree = {}
    size = 0
    data = path.read_bytes()
    try:
        members = _zipped(data) if zipfile.is_zipfile(path) else _tarred(data)
        for name, kind, content in members:
            # Without the archive's top folder.
            inside = name.removeprefix("./").partition("/")[2]
            size += len(content)
            if size > MOST_BYTES:
                raise Rejected("tree", f"{path.name} has more than {MOST_BYTES >> 20} MiB")
            if is_safe(inside) and not matches(inside, MADE_BY_PACKING):
                tree[inside] = (kind, content)
    except UNREADABLE as error:
        raise Rejected("tree", f"{path.name} cannot be unpacked: {error}") from error
    return tree


def _tarred(data: bytes) -> list[tuple[str, str, bytes]]:
    result: list[tuple[str, str, bytes]] = []
    remaining = MOST_BYTES
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            remaining -= member.size
            if remaining < 0:
                raise tarfile.TarError(f"more than {MOST_BYTES >> 20} MiB")
            if member.issym():
                result.append((member.name, "l", os.fsencode(member.linkname)))
            elif member.isreg() or member.islnk():
                try:
                    file = archive.extractfile(member)
                except KeyError as error:
                    raise tarfile.TarError(f"{member.name}: {error}") from error
                content = file.read() if file is not None else b""
                # A hard link has no size in its header.
                remaining -= len(content) if member.islnk() else 0
                result.append((member.name, "x" if member.mode & 0o100 else "f", content))
    return result


def _zipped(data: bytes) -> list[tuple[str, str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
            raise zipfile.BadZipFile(f"more than {MOST_BYTES >> 20} MiB")
        return [
            (member.filename, _kind(member.external_attr >> 16), archive.read(member))
            for member in archive.infolist()
            if not member.is_dir()
        ]


def _kind(mode: int) -> str:
    """Return the file type of a zip member from its Unix mode, which is 0 if the archive was not
    packed on Unix."""
    return "l" if stat.S_ISLNK(mode) else "x" if mode & 0o100 else "f"
