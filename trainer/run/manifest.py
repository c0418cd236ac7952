"""What a folder holds, to the bit: size and SHA-256 of every file in it.

A manifest is written after everything else, so that a folder with one is whole. Files are digested
in pieces of 64 MiB, by several threads: the digest of a file of one piece is what `sha256sum` says.
"""

from __future__ import annotations

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
PIECE = 64 * 2**20
BLOCK = 2**20
PARTS = 64
"""Of a file, that a fingerprint looks into."""
WRITERS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
"""Of a config.json: what says nothing of the model, or what a recipe says."""
THREADS = 8
"""At most: a disk, or the ranks of a host together, have no use for more."""


class Entry(NamedTuple):
    """A file as it was written."""

    bytes: int
    sha256: list[str]
    """Of each piece."""


def seal(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Bring these files of `folder` to the disk, and digest them. Call it where they were written,
    while they are in memory still. Raises `OSError`."""
    paths = {name: folder / name for name in names}
    with _threads() as threads:
        synced = [threads.submit(sync, path) for path in paths.values()]
        entries = _digests(threads, paths)
        for future in synced:
            future.result()
    return entries


def fingerprint(folder: Path) -> str:
    """Of the weights in a checkpoint or a model folder, in a moment: of its manifest, or of parts
    of its tensor files where it has none; "" where there are no weights. A copy has the same."""
    digest = hashlib.sha256()
    named = folder / MANIFEST
    files = [named] if named.is_file() else sorted(folder.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for part in range(PARTS):
                file.seek(size * part // PARTS)
                digest.update(file.read(BLOCK // PARTS))
    return digest.hexdigest()[:12] if files else ""


def described(folder: Path) -> str:
    """Fingerprint of what a model folder's config.json says of the model, without what differs
    from writer to writer; "" where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        return ""
    content = json.loads(path.read_text())
    if not isinstance(content, dict):  # which is refused elsewhere
        return ""
    said = {name: value for name, value in content.items() if name not in WRITERS}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


def base_of(config: Config) -> str:
    """Fingerprints of the model folder that a run begins with: "weights+config.json"; "" of one of
    the hub, and of the tiny model."""
    folder = Path(config.model.path).expanduser()
    with suppress(OSError, ValueError):
        if config.model.path != TINY_MODEL and folder.is_dir():
            return f"{fingerprint(folder)}+{described(folder)}"
    return ""


def other_than(then: str, now: str) -> str:
    """What a model has that is another, of two of its `base_of`; "" where nothing is. What one of
    them does not have, such as that of an older checkpoint, is not compared."""
    names = ("other weights", "another config.json")
    parts = zip(names, then.split("+"), now.split("+"), strict=False)
    return next((name for name, a, b in parts if a and b and a != b), "")


def write_manifest(folder: Path, sealed: Mapping[str, Entry]) -> None:
    """Of all that `folder` holds; what others have not `sealed` is sealed here.

    Raises `ValueError` naming a file that others have sealed and that is not the same here: ranks
    on other machines must see this folder, not one of the same name.
    """
    here = sizes(folder)
    for name, entry in sealed.items():
        size = here.get(name, "no")
        if size != entry.bytes:
            raise ValueError(
                f"{folder / name}: a trainer rank wrote {entry.bytes:,} bytes, and {size} are "
                "here. run.dir must be on a file system that all machines of the run share"
            )
    entries = {**sealed, **seal(folder, [name for name in here if name not in sealed])}
    content = {name: entries[name]._asdict() for name in here}
    text = json.dumps({"sha256": _digest_of(content), "files": content}, indent=1)
    (folder / MANIFEST).write_text(text + "\n")
    sync(folder / MANIFEST)
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))


def find_damage(folder: Path, *, extra: bool, bits: bool = True) -> list[str]:
    """What is not as the manifest of `folder` says: a line for each file. Reads all files, unless
    some are missing or have another size, or `bits` is False. extra: whether files that it does not
    list count.
    """
    try:
        entries = _read(folder / MANIFEST)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {error.strerror if isinstance(error, OSError) else error}"]
    here = sizes(folder)
    found = [f"{name}: missing" for name in entries if name not in here]
    for name in here:
        if name in entries:
            size, written = here[name], entries[name].bytes
            if size != written:
                what = "truncated" if size < written else "too long"
                found.append(f"{name}: {what}, {size:,} bytes of {written:,}")
        elif extra:
            found.append(f"{name}: extra, it was not written with the rest")
    return found or (_changed(folder, entries) if bits else [])


def _changed(folder: Path, entries: Mapping[str, Entry]) -> list[str]:
    """Files whose bits are not those that were written, and where."""
    found: list[str] = []
    with _threads() as threads:
        pieces = {
            (name, index): threads.submit(_digest, folder / name, index * PIECE)
            for name, entry in entries.items()
            for index in range(len(entry.sha256))
        }
        for (name, index), piece in pieces.items():
            try:
                same = piece.result() == entries[name].sha256[index]
            except OSError as error:
                found.append(f"{name}: cannot be read ({error.strerror})")
                continue
            if not same:
                end = min(entries[name].bytes, (index + 1) * PIECE)
                found.append(f"{name}: changed, between bytes {index * PIECE:,} and {end:,}")
    return found


def check_exported(folder: Path, cure: str) -> None:
    """Raises ConfigError if a model folder that Keel has written has changed since then. Files that
    were added do not count."""
    if (folder / MANIFEST).exists() and (found := find_damage(folder, extra=False)):
        raise ConfigError(f"{folder}: this model is not as it was exported ({said(found)}); {cure}")


def said(problems: list[str], most: int = 3) -> str:
    """Some of them on a line."""
    more = len(problems) - most
    return "; ".join([*problems[:most], *[f"and {more} more"] * (more > 0)])


def sizes(folder: Path) -> dict[str, int]:
    """Name, relative to `folder`, and bytes of every file below it but its manifest."""
    found: dict[str, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with suppress(FileNotFoundError):  # a link that leads nowhere, a folder being deleted
                found[os.path.relpath(path, folder)] = os.stat(path).st_size
    found.pop(MANIFEST, None)
    return dict(sorted(found.items()))


def sync(path: Path) -> None:
    """Bring what a file holds to the disk. Raises `OSError` naming it."""
    with path.open("rb") as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Bring the names in it to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Entry]:
    """Raises `OSError`, or `ValueError` for what is no manifest or damaged."""
    try:
        content: Any = json.loads(path.read_bytes())
        files = content["files"]
        if _digest_of(files) != content["sha256"]:
            raise ValueError("changed since it was written")
        return {name: Entry(**entry) for name, entry in files.items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("cannot be parsed") from None


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digests(threads: ThreadPoolExecutor, paths: Mapping[str, Path]) -> dict[str, Entry]:
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    pieces = {
        name: [threads.submit(_digest, path, start) for start in range(0, sizes[name], PIECE)]
        for name, path in paths.items()
    }
    return {name: Entry(sizes[name], [piece.result() for piece in pieces[name]]) for name in paths}


def _digest(path: Path, start: int) -> str:
    """Of the piece that begins there."""
    digest, left = hashlib.sha256(), PIECE
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (block := file.read(min(left, BLOCK))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))))
