"""The files of a folder or a dataset on the hub, and errors for missing files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.data.rows.places import FilesNotFound, cached_places, choose_files, files_of
from tests.data.rows.hub import MAIN, NAME, serving

LINES = b'{"question": "1+1?", "answer": "so #### 2"}\n{"question": "1+2?", "answer": "#### 3"}\n'
GSM8K: dict[str, Any] = {"columns": {"prompt": "question"}, "answer_after": "####"}


def source(place: Path | str, **knobs: Any) -> SourceConfig:
    return SourceConfig(**{"name": "s", "source": "file", "path": str(place), **knobs})


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(LINES)
    return folder


TREES: dict[str, tuple[list[str], dict[str, str], list[str]]] = {
    "parts": (
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "README.md"],
        {},
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
    ),
    "split": (["train.jsonl", "test.jsonl"], {"split": "test"}, ["test.jsonl"]),
    "alike": (["dev.csv", "train.csv"], {"split": "validation"}, ["dev.csv"]),
    "folders": (["train/a.json", "test/a.json"], {}, ["train/a.json"]),
    "subset": (["main/train.csv", "socratic/train.csv"], {"subset": "main"}, ["main/train.csv"]),
    "converted": (
        ["main/train/0000.parquet", "main/test/0000.parquet"],
        {"split": "test"},
        ["main/test/0000.parquet"],
    ),
    "own names": (
        ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"],
        {"split": "train_sft"},
        ["data/train_sft-00000-of-00001.parquet"],
    ),
    "no split": (
        ["a.jsonl.gz", "b.jsonl.gz", "dataset_infos.json"],
        {},
        ["a.jsonl.gz", "b.jsonl.gz"],
    ),
}


@pytest.mark.parametrize("tree", TREES)
def test_split_and_subset(tree: str) -> None:
    names, knobs, wanted = TREES[tree]
    assert choose_files(names, knobs.get("split", ""), knobs.get("subset", "")) == wanted


@pytest.mark.parametrize(
    ("names", "split", "subset", "named"),
    [
        (["main/train.csv", "socratic/train.csv"], "", "", "subset"),
        (["main/train.csv"], "", "mian", "mian"),
        (["test.csv", "train.csv"], "trian", "", "trian"),
        (["test.csv"], "", "", "train"),
        (["README.md", "state.json"], "", "", "file"),
        (["train-00001-of-00002.csv"], "", "", "train-00001-of-00002.csv"),
    ],
)
def test_missing_files(names: list[str], split: str, subset: str, named: str) -> None:
    with pytest.raises(FilesNotFound, match=named):
        choose_files(names, split, subset)


def test_folders(tmp_path: Path) -> None:
    folder = filled(tmp_path / "sums", "train/1.jsonl", "train/2.jsonl", "test.jsonl")
    items = load_jsonl(source(folder, **GSM8K, size=3)).items
    assert [item.prompt.prompt_id for item in items] == ["s/1", "s/2", "s/3"]
    assert items[2].origin == f"{folder}/train/2.jsonl:1"
    with pytest.raises(ConfigError, match=r"data.sources\[s\].path"):
        load_jsonl(source(folder, split="dev"))
    with pytest.raises(ConfigError, match=r"data.sources\[s\].split"):
        load_jsonl(source(folder / "test.jsonl", split="test"))


def test_datasets_saved_to_disk(tmp_path: Path) -> None:
    """Only files listed in `state.json` are read."""
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        part = filled(tmp_path / split, "data-00000-of-00001.arrow", "cache-1.arrow")
        files = [{"filename": "data-00000-of-00001.arrow"}]
        (part / "state.json").write_text(json.dumps({"_data_files": files}))
    wanted = [tmp_path / "test/data-00000-of-00001.arrow"]
    assert files_of(source(tmp_path, split="test"), lambda: True) == wanted
    assert files_of(source(tmp_path / "test"), lambda: True) == wanted
    with pytest.raises(ConfigError, match="'dev'"):
        files_of(source(tmp_path, split="dev"), lambda: True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    return tmp_path / "cache"


def of_hub(**knobs: Any) -> SourceConfig:
    return source(NAME, **{"source": "hub", **GSM8K, **knobs})


def test_hub_dataset(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"main/train-00000-of-00001.jsonl": LINES, "main/test.jsonl": b"{", "README.md": b""}
    with serving(monkeypatch, {MAIN: files}) as asked:
        items = load_jsonl(of_hub(subset="main")).items
        assert [(i.prompt.messages[0]["content"], i.prompt.reward["answer"]) for i in items] == [
            ("1+1?", "2"),
            ("1+2?", "3"),
        ]
        assert not any("test.jsonl" in path for path in asked)
        assert "minor" in error_of(of_hub(subset="minor"))
        assert "owner/none" in error_of(of_hub(path="owner/none"))
    again = load_jsonl(of_hub(subset="main"), hub_answers=lambda: False).items
    assert [item.prompt for item in again] == [item.prompt for item in items]
    assert [place.name for place in cached_places()] == ["datasets--owner--sums"]


def test_incomplete_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train/1.jsonl": LINES, "train/2.jsonl": b'{"question": "?", "answer": "#### 9"}'}
    with serving(monkeypatch, {MAIN: parts}):
        assert len(load_jsonl(of_hub()).items) == 3
    (second,) = cache.rglob("2.jsonl")
    second.unlink()
    assert "data.sources[s].path" in error_of(of_hub(), hub_answers=lambda: False)


def error_of(source: SourceConfig, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_jsonl(source, **options)
    return str(caught.value)
