"""Detect damaged files and changed models.

A manifest lists the size and SHA-256 digests of every file in a folder. It is written last, so a
folder with a manifest is complete. Several threads compute the digests, in chunks of 64 MiB.
Fingerprints identify models quickly.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from keel.configs.schema import Config, ConfigError
from keel.configs.sections.model import TINY_MODEL

MANIFEST = "keel_manifest.json"
_PIECE = 64 * 2**20
_BLOCK = 2**20
_SAMPLES = 64  # the number of positions at which a fingerprint samples each file
_LISTED = 3  # the number of damaged files that a message names


class Entry(NamedTuple):
    """A file's size when it was written, along with a digest of each chunk."""

    bytes: int
    sha256: list[str]


def seal(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Flush these files in `folder` to disk and return their manifest entries."""
    paths = {name: folder / name for name in names}
    with _threads() as threads:
        synced = [threads.submit(sync, path) for path in paths.values()]
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        pieces = {
            name: [threads.submit(_digest, path, at) for at in range(0, sizes[name], _PIECE)]
            for name, path in paths.items()
        }
        entries = {
            name: Entry(sizes[name], [piece.result() for piece in pieces[name]]) for name in paths
        }
        for future in synced:
            future.result()
    return entries


def fingerprint(folder: Path) -> str:
    """Return a quick fingerprint of a model folder, or "" if it has neither a manifest nor tensor
    files. Reads only parts of the manifest, or of the tensor files if there is no manifest."""
    digest = hashlib.sha256()
    manifest = folder / MANIFEST
    files = [manifest] if manifest.is_file() else sorted(folder.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_BLOCK // _SAMPLES))
    return digest.hexdigest()[:12] if files else ""


def fingerprint_base(config: Config) -> str:
    """Return the fingerprint of the initial model, or "" if it isn't a local folder."""
    folder = Path(config.model.path).expanduser()
    return fingerprint(folder) if config.model.path != TINY_MODEL and folder.is_dir() else ""


def write_manifest(folder: Path, sealed: Mapping[str, Entry]) -> None:
    """Write the manifest of `folder`, computing digests for any files that aren't in `sealed`.
    Raises ValueError if a sealed file is missing or has a different size, which means that the
    ranks aren't on the same file system."""
    here = sizes(folder)
    for name, entry in sealed.items():
        if here.get(name) != entry.bytes:
            raise ValueError(
                f"{folder / name}: a trainer rank wrote {entry.bytes:,} bytes, but there are "
                f"{here.get(name, 0):,} here. Put run.dir on a file system that all machines share"
            )
    entries = {**sealed, **seal(folder, [name for name in here if name not in sealed])}
    content = {name: entries[name]._asdict() for name in here}
    text = json.dumps({"sha256": _digest_json(content), "files": content}, indent=1)
    (folder / MANIFEST).write_text(text + "\n")
    sync(folder / MANIFEST)
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))


def find_damage(folder: Path, *, extra: bool, bits: bool = True) -> list[str]:
    """Return the differences between `folder` and its manifest, one line per file. With `extra`,
    files that the manifest doesn't list are reported too. With `bits`, the contents of all files
    are checked too."""
    try:
        entries = _read(folder / MANIFEST)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {error.strerror if isinstance(error, OSError) else error}"]
    here = sizes(folder)
    problems = [f"{name}: missing" for name in entries if name not in here]
    for name, size in here.items():
        if name not in entries:
            problems += [f"{name}: extra, it was not written with the rest"] * extra
        elif size != (expected := entries[name].bytes):
            kind = "truncated" if size < expected else "too long"
            problems.append(f"{name}: {kind}, {size:,} bytes of {expected:,}")
    if problems or not bits:
        return problems
    with _threads() as threads:
        pieces = {
            (name, index): threads.submit(_digest, folder / name, index * _PIECE)
            for name, entry in entries.items()
            for index in range(len(entry.sha256))
        }
        for (name, index), piece in pieces.items():
            try:
                same = piece.result() == entries[name].sha256[index]
            except OSError as error:
                problems.append(f"{name}: cannot be read ({error.strerror})")
                continue
            if not same:
                end = min(entries[name].bytes, (index + 1) * _PIECE)
                problems.append(f"{name}: changed, between bytes {index * _PIECE:,} and {end:,}")
    return problems


def check_exported(folder: Path, remedy: str) -> None:
    if (folder / MANIFEST).exists() and (problems := find_damage(folder, extra=False)):
        raise ConfigError(
            f"{folder}: this exported model has changed ({join_problems(problems)}); {remedy}"
        )


def join_problems(problems: list[str]) -> str:
    more = len(problems) - _LISTED
    return "; ".join([*problems[:_LISTED], *[f"and {more} more"] * (more > 0)])


def sizes(folder: Path) -> dict[str, int]:
    """Map the path of each file in `folder` and its subfolders to its size in bytes, leaving out
    the manifest."""
    by_name: dict[str, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with suppress(FileNotFoundError):  # a dangling link, or a folder being deleted
                by_name[os.path.relpath(path, folder)] = os.stat(path).st_size
    by_name.pop(MANIFEST, None)
    return dict(sorted(by_name.items()))


def sync(path: Path) -> None:
    """Flush a file to disk. Raises `OSError` with the file name if this fails."""
    with path.open("rb") as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Entry]:
    try:
        content: Any = json.loads(path.read_bytes())
        files = content["files"]
        if _digest_json(files) != content["sha256"]:
            raise ValueError("changed since it was written")
        return {name: Entry(**entry) for name, entry in files.items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("cannot be parsed") from None


def _digest_json(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path, start: int) -> str:
    digest, remaining = hashlib.sha256(), _PIECE
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while remaining and (block := file.read(min(remaining, _BLOCK))):
            digest.update(block)
            remaining -= len(block)
    return digest.hexdigest()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))
