"""A candidate from the archives of two releases: what the changelog gained is the issue."""

from __future__ import annotations

import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from keel.agents.environments.code.languages import matches
from keel.agents.environments.code.tree import Tree, is_safe
from keel.configs.schema import ConfigError
from keel.configs.synthesis import CodeSourceConfig
from keel.synthesis.code.candidate import Candidate, is_text
from keel.synthesis.ledger import Refused

CHANGELOGS = ("change*", "history*", "news*", "release*notes*")
MADE_BY_PACKING = ("PKG-INFO", "*.egg-info/", "SOURCES.txt")
UNREADABLE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(NotImplementedError, RuntimeError),  # of zipfile: methods it lacks, a password
)
"""What the archive of a release may raise."""
MOST_BYTES = 256 << 20
"""Of an archive, unpacked."""


class Releases:
    """A `Source` of one candidate."""

    def __init__(self, source: CodeSourceConfig) -> None:
        """Raises ConfigError."""
        self._source = source
        self._paths = [Path(path).expanduser() for path in source.archives]
        for path in self._paths:
            if not path.is_file():
                raise ConfigError(
                    f"code.sources[{source.name}].archives: there is no file {str(path)!r}"
                )
        self._key = f"{source.name}-{'-'.join(version_of(path) for path in self._paths)}"
        self.keys: Sequence[str] = [self._key]

    def load(self, key: str) -> Candidate:
        base, after = (_unpacked(path) for path in self._paths)
        return Candidate(
            key=key,
            source=self._source,
            base=base,
            after=after,
            issue=gained(base, after),
            version=version_of(self._paths[0]),
            origin={"archives": [path.name for path in self._paths]},
        )


def version_of(path: Path) -> str:
    found = re.search(r"\d+(\.\d+)*[0-9A-Za-z.]*?(?=\.tar|\.zip|\.tgz|$)", path.name)
    return found[0] if found else "1.0"


def gained(base: Tree, after: Tree) -> str:
    """Lines that the changelog has now and had not."""
    for path in sorted(after, key=lambda path: (path.count("/"), path)):
        name = path.lower()
        entry = after[path]
        if not matches(name.rpartition("/")[2], CHANGELOGS) or not is_text(entry):
            continue
        if not name.endswith((".md", ".rst", ".txt", "changes", "changelog", "history", "news")):
            continue
        if path not in base:  # all of it would be new
            raise Refused("issue", "the older release has no changelog")
        old = set(base[path][1].decode(errors="replace").splitlines())
        lines = [line for line in entry[1].decode().splitlines() if line not in old]
        if text := "\n".join(lines).strip():
            return text
    raise Refused("issue", "no changelog says what changed")


def _unpacked(path: Path) -> Tree:
    tree: Tree = {}
    size = 0
    data = path.read_bytes()
    try:
        members = _zipped(data) if zipfile.is_zipfile(path) else _tarred(data)
        for name, kind, content in members:
            # The folder that everything lies in.
            inside = name.removeprefix("./").partition("/")[2]
            size += len(content)
            if size > MOST_BYTES:
                raise Refused("tree", f"{path.name} has more than {MOST_BYTES >> 20} MiB")
            if is_safe(inside) and not matches(inside, MADE_BY_PACKING):
                tree[inside] = (kind, content)
    except UNREADABLE as error:
        raise Refused("tree", f"{path.name} cannot be unpacked: {error}") from error
    return tree


def _tarred(data: bytes) -> list[tuple[str, str, bytes]]:
    found: list[tuple[str, str, bytes]] = []
    left = MOST_BYTES
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            left -= member.size
            if left < 0:
                raise tarfile.TarError(f"more than {MOST_BYTES >> 20} MiB")
            if member.issym():
                found.append((member.name, "l", os.fsencode(member.linkname)))
            elif member.isreg() or member.islnk():
                try:
                    file = archive.extractfile(member)
                except KeyError as error:
                    raise tarfile.TarError(f"{member.name}: {error}") from error
                content = file.read() if file is not None else b""
                # A hard link has no size of its own.
                left -= len(content) if member.islnk() else 0
                found.append((member.name, "x" if member.mode & 0o100 else "f", content))
    return found


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
    """Of a member of a zip; 0 where it was not packed by Unix."""
    return "l" if stat.S_ISLNK(mode) else "x" if mode & 0o100 else "f"
