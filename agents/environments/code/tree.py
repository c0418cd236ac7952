"""Reads source trees from untrusted folders, writes source trees, and encrypts files."""

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
"""("f", contents) for a file, ("x", contents) for an executable file, or ("l", target) for a
link."""
Tree = dict[str, Entry]
"""Maps the path of each file to its entry. Paths are relative to the root and use slashes."""
_MAX_FILES = 20_000
_ERASE_S = 60.0
_DIGEST_BYTES = 32


class UnreadableTree(ValueError):
    """Raised when a folder cannot be used as a source tree, for example because it is too large."""


def read_tree(root: str, *, max_mib: int, skip: Callable[[str], bool]) -> Tree:
    """Read all regular files and links in a folder, except those for which `skip` returns True. No
    process may write to the folder meanwhile. Raises UnreadableTree if the tree is too large."""
    if not stat.S_ISDIR(os.lstat(root).st_mode):
        raise UnreadableTree(f"{root} is no folder")
    tree: Tree = {}
    remaining, pending = max_mib << 20, [""]
    while pending:
        folder = pending.pop()
        for one in os.scandir(os.path.join(root, folder)):
            path = f"{folder}/{one.name}" if folder else one.name
            if skip(path):
                continue
            status = one.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
                continue
            if stat.S_ISLNK(status.st_mode):
                tree[path] = ("l", os.fsencode(os.readlink(one.path)))
            elif stat.S_ISREG(status.st_mode):
                remaining -= status.st_size
                if remaining < 0:
                    raise UnreadableTree(f"its files take more than {max_mib} MiB")
                with open(os.open(one.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                    tree[path] = ("x" if status.st_mode & 0o100 else "f", file.read())
            if len(tree) + len(pending) > _MAX_FILES:
                raise UnreadableTree(f"it has more than {_MAX_FILES:,} files and folders")
    return tree


def write_tree(root: str, tree: Tree) -> None:
    """Write a tree to a new folder. Raises UnreadableTree if a path lies below a file or link."""
    for path in tree:
        if blocking := [part for part in _parents(path) if part in tree]:
            raise UnreadableTree(f"{path} lies under {blocking[0]}, which is no folder")
    os.mkdir(root)
    for path, (kind, data) in tree.items():
        place = os.path.join(root, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if kind == "l":
            os.symlink(os.fsdecode(data), place)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(place, flags, 0o755 if kind == "x" else 0o644), "wb") as file:
                file.write(data)


def erase_folder(folder: str) -> None:
    """Delete everything in a folder except mounts, regardless of permissions and depth."""
    subprocess.run(
        ["/bin/sh", "-c", _ERASE, "sh", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_ERASE_S,
    )


_ERASE = """
chmod -R u+rwx "$1"
find "$1" -xdev -mindepth 1 -depth -delete
"""


def merge_trees(under: Tree, over: Tree) -> Tree:
    """Merge `over` into `under`. If they conflict, the files and folders of `over` win."""
    folders = {part for path in over for part in _parents(path)}
    visible = {
        path: entry
        for path, entry in under.items()
        if path not in folders and not any(part in over for part in _parents(path))
    }
    return {**visible, **over}


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def is_safe(path: str) -> bool:
    """Check that a path stays inside the root of the tree."""
    return bool(path) and not any(part in ("", ".", "..") for part in path.split("/"))


def tree_as_json(tree: Tree) -> dict[str, list[str]]:
    # Latin-1 has a character for each byte.
    return {path: [kind, data.decode("latin-1")] for path, (kind, data) in tree.items()}


def tree_from_json(value: dict[str, list[str]]) -> Tree:
    return {path: (kind, text.encode("latin-1")) for path, (kind, text) in value.items()}


def encrypt(content: dict[str, Any], key: bytes) -> bytes:
    """Encrypt a file. Never use a key for more than one file."""
    data = zlib.compress(json.dumps(content).encode(), 6)
    return _xor(hashlib.sha256(data).digest() + data, key)


def decrypt(data: bytes, key: bytes) -> dict[str, Any]:
    """Decrypt a file. Raises ValueError if the key is wrong or the file was modified."""
    plain = _xor(data, key)
    if hashlib.sha256(plain[_DIGEST_BYTES:]).digest() != plain[:_DIGEST_BYTES]:
        raise ValueError("the key is not this file's, or the file was changed")
    return json.loads(zlib.decompress(plain[_DIGEST_BYTES:]))


def _xor(data: bytes, key: bytes) -> bytes:
    stream = hashlib.shake_256(key).digest(len(data))
    number = int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")
    return number.to_bytes(len(data), "little")
