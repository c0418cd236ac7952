"""Which files a recipe means by a folder or by a name of the hub.

A folder is what `save_to_disk` of the package `datasets` has written, or has its files as the hub
has them: `data/train-00000-of-00002.parquet`, `main/test.jsonl`, `train/part1.csv`. A file belongs
to the split that its name or its folder's says, and to the subset whose folder it is in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]: of httpx or httpx2, by its release
    LocalEntryNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError
from keel.data.rows.read import kind_of_file

HUB_S = 30.0
"""Longest wait for the hub's list of files."""
CONVERTED = "refs/convert/parquet"
"""Where the hub keeps every public dataset once more, as `subset/split/0000.parquet`."""
PLAIN = ("data", "default")
"""Folders that are no subset's name."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "eval"), "test"),
}
"""What splits are called."""
METADATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\..+")


class NotFound(ValueError):
    """No files of the split or subset, or of several subsets."""


class Placed(Protocol):
    """What a source's files are found by: of prompts, or of conversations."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def subset(self) -> str: ...


def files_of(
    source: Placed, hub_answers: Callable[[], bool], sources: str = "data.sources"
) -> list[Path]:
    """In their order. sources: the knob that has such as it. Raises ConfigError naming the knob,
    and what there is instead."""
    knob = f"{sources}[{source.name}]"
    try:
        if source.source == "hub":
            return _of_hub(source, hub_answers)
        path = data_path(source.path)
        if not path.is_dir():
            if source.subset or source.split:
                name = "subset" if source.subset else "split"
                raise ConfigError(f"{knob}.{name}: is for folders, and {source.path!r} is none")
            return [path]
        if saved := _saved(path, source.split):
            return saved
        return [path / name for name in chosen(_listed(path), source.split, source.subset)]
    except NotFound as error:
        raise ConfigError(f"{knob}.path = {source.path!r}: {error}") from error


def chosen(names: Iterable[str], split: str, subset: str) -> list[str]:
    """Those of a split (train, where it is empty) and a subset, among paths inside a folder.
    Raises NotFound."""
    files = (PurePosixPath(name) for name in names)
    known = sorted(str(f) for f in files if kind_of_file(Path(f)) and f.name not in METADATA)
    if not known:
        raise NotFound("holds no file of a known kind (.jsonl, .json, .csv, .parquet, …)")
    subsets: dict[str, list[str]] = {}
    for name in known:
        parents = PurePosixPath(name).parts[:-1]
        own = [p for p in parents if p not in PLAIN and not _split_of(p)]
        subsets.setdefault(own[-1] if own else "", []).append(name)
    if subset and subset not in subsets:
        has = ", ".join(filter(None, sorted(subsets))) or "none"
        raise NotFound(f"has no subset {subset!r}; it has {has} (set subset)")
    there = subsets.get(subset) if subset or "" in subsets else None
    if there is None:
        if len(subsets) > 1:
            raise NotFound(f"has several subsets: {', '.join(sorted(subsets))}; set subset to one")
        there = next(iter(subsets.values()))
    splits: dict[str, list[str]] = {}
    for name in there:
        *parents, file = PurePosixPath(name).parts
        found = next(filter(None, map(_split_of, [file, *reversed(parents)])), "")
        splits.setdefault(found, []).append(name)
    wanted = SPLITS.get(split, split) or "train"
    exact = [name for name in there if split and _stem(PurePosixPath(name).name) == split]
    if wanted in splits or exact:
        return _whole(exact or splits[wanted])
    if wanted == "train" and set(splits) == {""}:
        return _whole(splits[""])
    has = ", ".join(sorted(each or f"files of none ({splits[each][0]}, …)" for each in splits))
    raise NotFound(f"has no split {split or 'train'!r}; it has {has} (set split)")


def cached_places() -> list[Path]:
    """Where datasets of the hub lie once they have been downloaded."""
    return sorted(Path(constants.HF_HUB_CACHE).glob("datasets--*"))


def _stem(name: str) -> str:
    """Of a file, without the number of a part."""
    shard = _SHARD.fullmatch(name)
    return shard[1] if shard else name.partition(".")[0]


def _split_of(name: str) -> str:
    """The split that the name of a file or a folder speaks of; empty: none."""
    stem = _stem(name)
    if _SHARD.fullmatch(name):
        return SPLITS.get(stem, stem)
    return SPLITS.get(re.split(r"[^a-z]", stem.lower(), maxsplit=1)[0], "")


def _whole(names: list[str]) -> list[str]:
    """Raises NotFound where a part is missing of what says how many it has."""
    for name in names:
        if shard := _SHARD.fullmatch(PurePosixPath(name).name):
            there = sum(_stem(PurePosixPath(each).name) == shard[1] for each in names)
            if there != int(shard[3]):
                raise NotFound(f"has {there} of the {int(shard[3])} parts of {name}; get the rest")
    return names


def _listed(folder: Path) -> list[str]:
    return [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]


def _saved(folder: Path, split: str) -> list[Path]:
    """Files of a folder that `save_to_disk` has written; none: it is no such folder."""
    whole = folder / "dataset_dict.json"
    if whole.is_file():
        splits: list[str] = _read(whole).get("splits") or []
        wanted = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if wanted not in splits:
            raise NotFound(f"has no split {wanted!r}; it has {', '.join(splits)} (set split)")
        folder = folder / wanted
    state = folder / "state.json"
    if not state.is_file():
        return []
    names = [entry["filename"] for entry in _read(state).get("_data_files") or []]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise NotFound(f"{folder / missing[0]} is missing, which {state} names; get it again")
    return [folder / name for name in names]


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NotFound(f"{path}: cannot be read: {error}") from error


def _of_hub(source: Placed, hub_answers: Callable[[], bool]) -> list[Path]:
    """Downloaded if they are not here yet. Raises NotFound, ConfigError."""
    where: dict[str, Any] = {"repo_id": source.path, "repo_type": "dataset"}
    try:
        if not hub_answers():
            return _downloaded_before(source, where)
        own: NotFound
        try:
            names = _names(source.path, None)
            wanted, revision = chosen(names, source.split, source.subset), None
        except NotFound as error:
            own = error
            try:
                names = _names(source.path, CONVERTED)
                wanted = chosen(names, source.split, source.subset)
                revision = CONVERTED
            except (NotFound, HfHubHTTPError, HTTPError):
                raise own from None
        with _progress():
            folder = Path(snapshot_download(**where, revision=revision, allow_patterns=wanted))
        return [folder / name for name in wanted]
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        said = [line for line in str(error).splitlines() if line.strip()][:2]
        raise NotFound(
            f"the hub ({constants.ENDPOINT}) does not give it: {' '.join(said)} Correct the "
            "name (owner/name), set HF_TOKEN if it is private or asks for consent, or download it "
            "where that works and name its folder with source: file"
        ) from error


@contextmanager
def _progress() -> Iterator[None]:
    """Of a download: it may take minutes, and nothing else is shown meanwhile."""
    quiet = are_progress_bars_disabled()
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:  # the user has not said
        enable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            disable_progress_bars()


def _names(repo: str, revision: str | None) -> list[str]:
    found = HfApi().dataset_info(repo, revision=revision, timeout=HUB_S).siblings or []
    return [each.rfilename for each in found]


def _downloaded_before(source: Placed, where: dict[str, Any]) -> list[Path]:
    """Of the newest state that any run has asked for."""
    said = "it was not downloaded before"
    cache = Path(constants.HF_HUB_CACHE) / f"datasets--{source.path.replace('/', '--')}"
    for revision in (constants.DEFAULT_REVISION, CONVERTED):
        try:
            commit = (cache / "refs" / revision).read_text().strip()
            names = _listed(cache / "snapshots" / commit)
            wanted = chosen(names, source.split, source.subset)
            # Other parts that it has: a download may have been broken off.
            parts = sorted({re.sub(r"\d+", "*", name) for name in wanted})
            snapshot_download(**where, revision=commit, local_files_only=True, allow_patterns=parts)
            return [cache / "snapshots" / commit / name for name in wanted]
        except NotFound as error:
            said = f"what was downloaded before {error}"
        except LocalEntryNotFoundError as error:
            said = f"its download was broken off: {error}"
        except OSError:
            continue
    raise NotFound(
        f"the hub ({constants.ENDPOINT}) does not answer, and {said}. Download it where there is a "
        f"network (`hf download --repo-type dataset {source.path}`) and name the folder with "
        "source: file"
    )
