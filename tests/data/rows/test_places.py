"""Which files a folder or a name of the hub means, and what is said where there are none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.data.rows import places
from keel.data.rows.places import NotFound, cached_places, chosen, files_of
from tests.data.rows.hub import CONVERTED, MAIN, NAME, serving

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
def test_a_split_and_a_subset_of_a_folder(tree: str) -> None:
    names, knobs, wanted = TREES[tree]
    assert chosen(names, knobs.get("split", ""), knobs.get("subset", "")) == wanted


WRONG: dict[str, tuple[list[str], dict[str, str]]] = {
    "has several subsets: main, socratic; set subset": (
        ["main/train.csv", "socratic/train.csv"],
        {},
    ),
    "has no subset 'mian'; it has main": (["main/train.csv"], {"subset": "mian"}),
    "has no split 'trian'; it has test, train": (["test.csv", "train.csv"], {"split": "trian"}),
    "has no split 'train'; it has test": (["test.csv"], {}),
    "holds no file of a known kind": (["README.md", "state.json"], {}),
    "has 1 of the 2 parts of train-00001-of-00002.csv": (["train-00001-of-00002.csv"], {}),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_a_folder_does_not_have_is_said(words: str) -> None:
    names, knobs = WRONG[words]
    with pytest.raises(NotFound, match=words):
        chosen(names, knobs.get("split", ""), knobs.get("subset", ""))


def test_a_folder_is_read_split_by_split(tmp_path: Path) -> None:
    folder = filled(tmp_path / "sums", "train/1.jsonl", "train/2.jsonl", "test.jsonl")
    items = load_jsonl(source(folder, **GSM8K, size=3)).items
    assert [item.prompt.prompt_id for item in items] == ["s/1", "s/2", "s/3"]
    assert items[2].origin == f"{folder}/train/2.jsonl:1"
    with pytest.raises(ConfigError, match=r"data.sources\[s\].path = .*has no split 'dev'"):
        load_jsonl(source(folder, split="dev"))
    with pytest.raises(ConfigError, match=r"data.sources\[s\].split: is for folders"):
        load_jsonl(source(folder / "test.jsonl", split="test"))


def test_what_save_to_disk_writes(tmp_path: Path) -> None:
    """Its own list of files counts, which are not all that lie there."""
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        part = filled(tmp_path / split, "data-00000-of-00001.arrow", "cache-1.arrow")
        files = [{"filename": "data-00000-of-00001.arrow"}]
        (part / "state.json").write_text(json.dumps({"_data_files": files}))
    wanted = [tmp_path / "test/data-00000-of-00001.arrow"]
    assert files_of(source(tmp_path, split="test"), lambda: True) == wanted
    assert files_of(source(tmp_path / "test"), lambda: True) == wanted
    with pytest.raises(ConfigError, match="has no split 'dev'; it has train, test"):
        files_of(source(tmp_path, split="dev"), lambda: True)
    wanted[0].unlink()
    with pytest.raises(ConfigError, match=r"data-00000-of-00001\.arrow is missing"):
        files_of(source(tmp_path, split="test"), lambda: True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    return tmp_path / "cache"


def of_hub(**knobs: Any) -> SourceConfig:
    return source(NAME, **{"source": "hub", **GSM8K, **knobs})


def test_gsm8k_is_a_source_of_three_lines(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"main/train-00000-of-00001.jsonl": LINES, "main/test.jsonl": b"{", "README.md": b""}
    with serving(monkeypatch, {MAIN: files}) as asked:
        items = load_jsonl(of_hub(subset="main")).items
        assert [(i.prompt.messages[0]["content"], i.prompt.reward["answer"]) for i in items] == [
            ("1+1?", "2"),
            ("1+2?", "3"),
        ]
        assert not any("test.jsonl" in path for path in asked), "what is not asked for stays there"
        said = refused(of_hub(subset="minor"))
        assert "has no subset 'minor'; it has main" in said
        assert "does not give it" in refused(of_hub(path="owner/none"))
    again = load_jsonl(of_hub(subset="main"), hub_answers=lambda: False).items
    assert [item.prompt for item in again] == [item.prompt for item in items]
    assert [place.name for place in cached_places()] == ["datasets--owner--sums"]


def test_a_dataset_in_a_form_of_its_own_is_read_as_the_hub_converted_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {MAIN: {"sums.xml": b""}, CONVERTED: {"default/train/0000.jsonl": LINES}}
    with serving(monkeypatch, files):
        assert len(load_jsonl(of_hub()).items) == 2
    assert len(load_jsonl(of_hub(), hub_answers=lambda: False).items) == 2
    with serving(monkeypatch, {MAIN: {"sums.xml": b""}}):
        assert "holds no file of a known kind" in refused(of_hub())


def test_a_download_that_was_broken_off_is_not_taken_for_all(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"train/1.jsonl": LINES, "train/2.jsonl": b'{"question": "?", "answer": "#### 9"}'}
    with serving(monkeypatch, {MAIN: parts}):
        assert len(load_jsonl(of_hub()).items) == 3
    (second,) = cache.rglob("2.jsonl")
    second.unlink()
    assert "its download was broken off" in refused(of_hub(), hub_answers=lambda: False)


def test_a_download_shows_how_far_it_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bars are off otherwise, since a view is drawn."""
    for module in (constants, sys.modules["huggingface_hub.utils.tqdm"]):
        monkeypatch.setattr(module, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    shown: list[bool] = []

    def download(**_: Any) -> str:
        shown.append(not are_progress_bars_disabled())
        return str(filled(tmp_path / "there", "train.jsonl"))

    monkeypatch.setattr(places, "snapshot_download", download)
    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with serving(monkeypatch, {MAIN: {"train.jsonl": LINES}}):
            assert len(load_jsonl(of_hub()).items) == 2
        assert shown == [True] and are_progress_bars_disabled()
    finally:
        if not before:
            enable_progress_bars()


def test_a_hub_that_is_lost_on_the_way_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(monkeypatch, {MAIN: {}}):
        pass
    assert "does not give it" in refused(of_hub())


def test_a_hub_that_does_not_answer_is_not_waited_for(cache: Path) -> None:
    said = refused(of_hub(), hub_answers=lambda: False)
    for words in (
        "data.sources[s].path = 'owner/sums': the hub (",
        "does not answer, and it was not downloaded before",
        "hf download --repo-type dataset owner/sums",
        "source: file",
    ):
        assert words in said


def refused(asked: SourceConfig, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_jsonl(asked, **options)
    return str(caught.value)
