"""Find the data files in a folder or in a hub dataset.

A folder may have been written by `save_to_disk` of the package `datasets`. Otherwise it has the
same layout as on the hub: `data/train-00000-of-00002.parquet`, `main/test.jsonl`,
`train/part1.csv`. The split is part of the name of a file or its folder, and the subset is part of
the folder name.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]: of httpx or httpx2, by its release
    LocalEntryNotFoundError,
)

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig, SourceConfig
from keel.data.rows.read import Row, data_extension, read_file_rows, read_jsonl_rows

_HUB_TIMEOUT_S = 30.0
_CONVERTED = "refs/convert/parquet"
"""Revision in which the hub stores its Parquet conversion, as `subset/split/0000.parquet`."""
_PLAIN_FOLDERS = ("data", "default")
"""Folder names that are not subsets."""
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "eval"), "test"),
}
_METADATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\..+")


class _FilesNotFound(ValueError):
    """Raised if the split or subset has no files, or if the user must choose one of several
    subsets."""


_Source = SourceConfig | ConversationsConfig


def read_source_rows(source: _Source, hub_answers: Callable[[], bool], knob: str) -> Iterator[Row]:
    """Yield the rows of a source. `knob` is the name of the setting with its path. Raises
    ConfigError with the available splits or subsets if no file matches."""
    if source.source == "jsonl":
        return read_jsonl_rows(data_path(source.path), knob)
    return read_file_rows(_files_of(source, hub_answers, knob), knob)


def _files_of(source: _Source, hub_answers: Callable[[], bool], knob: str) -> list[Path]:
    try:
        if source.source == "hub":
            return _find_hub_files(source, hub_answers)
        path = data_path(source.path)
        if not path.is_dir():
            if source.subset or source.split:
                name = "subset" if source.subset else "split"
                knob = f"{knob.removesuffix('.path')}.{name}"
                raise ConfigError(f"{knob} is for folders, but {source.path!r} is a file")
            return [path]
        if saved := _find_saved_files(path, source.split):
            return saved
        names = _choose_files(_list_files(path), source.split, source.subset)
        return [path / name for name in names]
    except _FilesNotFound as error:
        raise ConfigError(f"{knob} = {source.path!r}: {error}") from error


def _choose_files(names: Iterable[str], split: str, subset: str) -> list[str]:
    subsets: dict[str, list[str]] = {}
    for name in sorted(names):
        *folders, file = PurePosixPath(name).parts
        if data_extension(Path(file)) and file not in _METADATA:
            own = [f for f in folders if f not in _PLAIN_FOLDERS and not _split_of(f)]
            subsets.setdefault(own[-1] if own else "", []).append(name)
    if not subsets:
        raise _FilesNotFound("has no file of a known kind (.jsonl, .json, .csv, .parquet, …)")
    if not subset and len(subsets) == 1:
        subset = next(iter(subsets))
    if subset not in subsets:
        problem = f"has no subset {subset!r}" if subset else "has several subsets"
        raise _FilesNotFound(f"{problem}; set subset to one of {', '.join(filter(None, subsets))}")
    splits: dict[str, list[str]] = {}
    for name in subsets[subset]:
        parts = reversed(PurePosixPath(name).parts)
        splits.setdefault(next(filter(None, map(_split_of, parts)), ""), []).append(name)
    exact = [n for n in subsets[subset] if split and _stem(PurePosixPath(n).name) == split]
    canonical = _SPLITS.get(split, split) or "train"
    if canonical == "train" and set(splits) == {""}:
        canonical = ""
    if not exact and canonical not in splits:
        has = ", ".join(each or f"files without one ({splits[each][0]}, …)" for each in splits)
        raise _FilesNotFound(f"has no split {split or 'train'!r}; it has {has} (set split)")
    chosen = exact or splits[canonical]
    for name in chosen:
        if shard := _SHARD.fullmatch(PurePosixPath(name).name):
            count = sum(_stem(PurePosixPath(each).name) == shard[1] for each in chosen)
            if count != int(shard[3]):
                raise _FilesNotFound(f"has {count} of the {int(shard[3])} parts of {name}")
    return chosen


def cached_places() -> list[Path]:
    """Return the local folders in which hub datasets are cached."""
    return sorted(Path(constants.HF_HUB_CACHE).glob("datasets--*"))


def _stem(name: str) -> str:
    shard = _SHARD.fullmatch(name)
    return shard[1] if shard else name.partition(".")[0]


def _split_of(name: str) -> str:
    stem = _stem(name)
    if _SHARD.fullmatch(name):
        return _SPLITS.get(stem, stem)
    return _SPLITS.get(re.split(r"[^a-z]", stem.lower(), maxsplit=1)[0], "")


def _list_files(folder: Path) -> list[str]:
    return [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]


def _find_saved_files(folder: Path, split: str) -> list[Path]:
    try:
        if (index := folder / "dataset_dict.json").is_file():
            splits: list[str] = json.loads(index.read_text("utf-8"))["splits"]
            name = split or (splits[0] if len(splits) == 1 else "train")
            if name not in splits:
                raise _FilesNotFound(f"has no split {name!r}; it has {', '.join(splits)}")
            folder = folder / name
        if not (state := folder / "state.json").is_file():
            return []
        files = json.loads(state.read_text("utf-8"))["_data_files"]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise _FilesNotFound(f"{folder} cannot be read: {error!r}") from error
    return [folder / entry["filename"] for entry in files]


def _find_hub_files(source: _Source, hub_answers: Callable[[], bool]) -> list[Path]:
    repo: dict[str, Any] = {"repo_id": source.path, "repo_type": "dataset"}
    try:
        if not hub_answers():
            return _from_cache(source, repo)
        revision = None
        try:
            files = _choose_files(_names(source.path, None), source.split, source.subset)
        except _FilesNotFound as original:
            revision = _CONVERTED
            try:
                files = _choose_files(_names(source.path, revision), source.split, source.subset)
            except (_FilesNotFound, HfHubHTTPError, HTTPError):
                raise original from None
        folder = Path(snapshot_download(**repo, revision=revision, allow_patterns=files))
        return [folder / name for name in files]
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        raise _FilesNotFound(
            f"the hub ({constants.ENDPOINT}) refuses it: {error}. Correct the name (owner/name), "
            "set HF_TOKEN if it is private or gated, or download it elsewhere and name its folder "
            "with source: file"
        ) from error


def _names(repo: str, revision: str | None) -> list[str]:
    info = HfApi().dataset_info(repo, revision=revision, timeout=_HUB_TIMEOUT_S)
    return [each.rfilename for each in info.siblings or []]


def _from_cache(source: _Source, repo: dict[str, Any]) -> list[Path]:
    problem = "it was not downloaded before"
    cache = Path(constants.HF_HUB_CACHE) / f"datasets--{source.path.replace('/', '--')}"
    for revision in (constants.DEFAULT_REVISION, _CONVERTED):
        try:
            commit = (cache / "refs" / revision).read_text("utf-8").strip()
            names = _list_files(cache / "snapshots" / commit)
            files = _choose_files(names, source.split, source.subset)
            # Checks all parts: a download may have been interrupted.
            parts = sorted({re.sub(r"\d+", "*", name) for name in files})
            snapshot_download(**repo, revision=commit, local_files_only=True, allow_patterns=parts)
            return [cache / "snapshots" / commit / name for name in files]
        except (_FilesNotFound, LocalEntryNotFoundError) as error:
            problem = f"the earlier download is incomplete: {error}"
        except OSError:
            continue
    raise _FilesNotFound(
        f"the hub ({constants.ENDPOINT}) does not answer, and {problem}. Download it elsewhere "
        f"(`hf download --repo-type dataset {source.path}`) and name the folder with source: file"
    )
