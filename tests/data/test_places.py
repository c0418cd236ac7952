"""The files of a folder or a dataset on the hub, and errors for missing files."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from keel.configs.schema import ConfigError, SourceConfig
from keel.data import rows
from keel.data.jsonl import load_jsonl
from keel.data.rows import _choose_files, _files_of, _FilesNotFound, cached_places

LINES = b'{"question": "1+1?", "answer": "so #### 2"}\n{"question": "1+2?", "answer": "#### 3"}\n'
GSM8K: dict[str, Any] = {"columns": {"prompt": "question"}, "answer_after": "####"}


def source(place: Path | str, **knobs: Any) -> SourceConfig:
    return SourceConfig(**{"name": "s", "source": "file", "path": str(place), **knobs})


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(LINES)
    return folder


SHARDS = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
SAVED = [f"{split}/data-00000-of-00001.arrow" for split in ("train", "test")]
OWN = ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("names", "split", "subset", "chosen"),
    [
        ([*SHARDS, "README.md"], "", "", SHARDS),
        (["train.jsonl", "test.jsonl"], "test", "", ["test.jsonl"]),
        (["dev.csv", "train.csv"], "validation", "", ["dev.csv"]),
        (["train/a.json", "test/a.json"], "", "", ["train/a.json"]),
        (["main/train.csv", "socratic/train.csv"], "", "main", ["main/train.csv"]),
        (["main/train/0.parquet", "main/test/0.parquet"], "test", "", ["main/test/0.parquet"]),
        (OWN, "train_sft", "", OWN[:1]),
        ([*SAVED, "dataset_dict.json", "test/state.json"], "test", "", SAVED[1:]),
        (["a.jsonl.gz", "b.jsonl.gz", "state.json"], "", "", ["a.jsonl.gz", "b.jsonl.gz"]),
    ],
)
def test_split_and_subset(names: list[str], split: str, subset: str, chosen: list[str]) -> None:
    assert _choose_files(names, source("x", split=split, subset=subset)) == chosen


def test_missing_files() -> None:
    for names in (["main/0.csv", "socratic/0.csv"], ["state.json"], ["train-00001-of-00002.csv"]):
        with pytest.raises(_FilesNotFound):
            _choose_files(names, source("x"))


def test_folders(tmp_path: Path) -> None:
    folder = filled(tmp_path / "sums", "train/1.jsonl", "train/2.jsonl", "test.jsonl")
    items = load_jsonl(source(folder, **GSM8K, size=3)).items
    assert [item.prompt.prompt_id for item in items] == ["s/1", "s/2", "s/3"]
    assert items[2].origin == f"{folder}/train/2.jsonl:1"
    with pytest.raises(ConfigError, match=r"data.sources\[s\].path"):
        load_jsonl(source(folder, split="dev"))
    with pytest.raises(ConfigError, match=r"data.sources\[s\].split"):
        load_jsonl(source(folder / "test.jsonl", split="test"))


def test_saved_folders_are_read_by_their_index(tmp_path: Path) -> None:
    folder = filled(tmp_path, "train_sft/data-0.jsonl", "train_sft/cache-1.jsonl", "hard/b.jsonl")
    (folder / "dataset_dict.json").write_text('{"splits": ["train_sft", "hard"]}')
    for split, file in (("train_sft", "data-0.jsonl"), ("hard", "b.jsonl")):
        state = {"_data_files": [{"filename": file}]}
        (folder / split / "state.json").write_text(json.dumps(state))
        assert _files_of(source(folder, split=split), "s") == [folder / split / file]
    assert len(load_jsonl(source(folder / "train_sft", **GSM8K)).items) == 2
    with pytest.raises(ConfigError, match="no split 'train'; it has train_sft, hard"):
        load_jsonl(source(folder, **GSM8K))


def test_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "datasets--owner--sums"
    names = {"main": ["main/train.jsonl", "main/test.jsonl", "README.md"]}
    asked: list[str] = []

    def listed(_: str, revision: str) -> list[str]:
        return names.get(revision, ["x.xml"])

    def offline(_: str, revision: str) -> list[str]:
        raise ConnectionError(revision)

    def download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(filled(folder / "snapshots/c0ffee", *allow_patterns))

    monkeypatch.setattr(rows, "_names", listed)
    monkeypatch.setattr(rows, "snapshot_download", download)
    gsm = hub(subset="main")
    items = load_jsonl(gsm).items
    assert [item.prompt.reward["answer"] for item in items] == ["2", "3"]
    assert asked == ["main/train.jsonl"]
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("c0ffee")
    for names_of in (listed, offline):
        monkeypatch.setattr(rows, "_names", names_of)
        again = load_jsonl(gsm).items
        assert [item.prompt for item in again] == [item.prompt for item in items]
        with pytest.raises(ConfigError, match="minor"):
            load_jsonl(hub(subset="minor"))
    assert [place.name for place in cached_places()] == [folder.name]
    with pytest.raises(ConfigError, match="does not give it"):
        load_jsonl(source("owner/other", source="hub", **GSM8K))


def hub(**knobs: Any) -> SourceConfig:
    return source("owner/sums", **{"source": "hub", **GSM8K, **knobs})
