"""Source trees as data: read from a folder that somebody else wrote, written to one, and sealed
into files that only the holder of a key can read.

Any Python from 3.9, no package.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import zlib
from collections.abc import Callable
from typing import Any

Entry = tuple[str, bytes]
"""("f", contents), ("x", contents of an executable file) or ("l", where a link leads to)."""
Tree = dict[str, Entry]
"""Path from the root, with slashes → entry."""
MOST_FILES = 20_000
ERASING_S = 60.0
_CHECK = 32
"""Bytes of the digest in front of what is sealed."""


class UnreadableTree(ValueError):
    """A folder that is no source tree: too large, or no folder."""


def read_tree(root: str, *, most_mib: int, skip: Callable[[str], bool]) -> Tree:
    """Regular files and links; sockets, devices and pipes are left out. No link is followed, so
    nobody may write there meanwhile. skip: paths that are not read, nor what is below them.

    Raises UnreadableTree.
    """
    if not stat.S_ISDIR(os.lstat(root).st_mode):
        raise UnreadableTree(f"{root} is no folder")
    found: Tree = {}
    left, pending = most_mib << 20, [""]
    while pending:
        folder = pending.pop()
        for one in os.scandir(os.path.join(root, folder)):
            path = f"{folder}/{one.name}" if folder else one.name
            if skip(path):
                continue
            about = one.stat(follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                pending.append(path)
                continue
            if stat.S_ISLNK(about.st_mode):
                found[path] = ("l", os.fsencode(os.readlink(one.path)))
            elif stat.S_ISREG(about.st_mode):
                left -= about.st_size
                if left < 0:
                    raise UnreadableTree(f"its files take more than {most_mib} MiB")
                with open(os.open(one.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                    found[path] = ("x" if about.st_mode & 0o100 else "f", file.read())
            if len(found) + len(pending) > MOST_FILES:
                raise UnreadableTree(f"it has more than {MOST_FILES:,} files and folders")
    return found


def write_tree(root: str, tree: Tree) -> None:
    """Into a folder that is not there yet. Raises UnreadableTree where something would be written
    through a link of the same tree."""
    for path in tree:
        if above := [part for part in _above(path) if part in tree]:
            raise UnreadableTree(f"{path} lies under {above[0]}, which is no folder")
    os.mkdir(root)
    for path, (kind, data) in tree.items():
        where = os.path.join(root, path)
        os.makedirs(os.path.dirname(where), exist_ok=True)
        if kind == "l":
            os.symlink(os.fsdecode(data), where)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(where, flags, 0o755 if kind == "x" else 0o644), "wb") as file:
                file.write(data)


def erase(folder: str) -> None:
    """What is in a folder, whatever its owner made of its permissions and however deep it is; what
    is mounted there stays."""
    subprocess.run(
        ["/bin/sh", "-c", _ERASE, "sh", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=ERASING_S,
    )


_ERASE = """
chmod -R u+rwx "$1"
find "$1" -xdev -mindepth 1 -depth -delete
"""


def overlay(under: Tree, over: Tree) -> Tree:
    """`over` on top of `under`: where a file of one stands in the way of the other, over's."""
    folders = {part for path in over for part in _above(path)}
    kept = {
        path: entry
        for path, entry in under.items()
        if path not in folders and not any(part in over for part in _above(path))
    }
    return {**kept, **over}


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def is_safe(path: str) -> bool:
    """Whether it stays below the root."""
    return bool(path) and not any(part in ("", ".", "..") for part in path.split("/"))


def tree_as_json(tree: Tree) -> dict[str, list[str]]:
    # Latin-1 has a character for each byte.
    return {path: [kind, data.decode("latin-1")] for path, (kind, data) in tree.items()}


def tree_from_json(given: dict[str, list[str]]) -> Tree:
    return {path: (kind, text.encode("latin-1")) for path, (kind, text) in given.items()}


def seal(content: dict[str, Any], key: bytes) -> bytes:
    """What others who can read the file cannot read without the key, which is for one file."""
    data = zlib.compress(json.dumps(content).encode(), 6)
    return _crossed(hashlib.sha256(data).digest() + data, key)


def unseal(data: bytes, key: bytes) -> dict[str, Any]:
    """Raises ValueError for another key, or a file that was changed."""
    plain = _crossed(data, key)
    if hashlib.sha256(plain[_CHECK:]).digest() != plain[:_CHECK]:
        raise ValueError("the key is not this file's, or the file was changed")
    return json.loads(zlib.decompress(plain[_CHECK:]))


def _crossed(data: bytes, key: bytes) -> bytes:
    stream = hashlib.shake_256(key).digest(len(data))
    number = int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")
    return number.to_bytes(len(data), "little")
