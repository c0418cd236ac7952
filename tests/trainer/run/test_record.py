"""What a run has written of its steps is on the disk when a checkpoint is, and what is lost of it
all the same is named when the run resumes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from keel.configs.schema import Config, DataConfig, RunConfig, SourceConfig
from keel.rl.metrics import Mean
from keel.trainer.run.checkpoint import SaveError, State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import Journal, keep_until, lacking
from keel.trainer.run.manifest import Entry
from keel.trainer.run.view import PlainView


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files and folders that were brought to the disk, in order."""
    found, fsync = list[Path](), os.fsync

    def noted(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def config(folder: Path) -> Config:
    source = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
    return Config(run=RunConfig(dir=str(folder)), data=DataConfig(sources=(source,)))


def save(folder: RunFolder, config: Config, step: int) -> Path:
    def write(path: Path) -> dict[str, Entry]:
        (path / "weights").write_text("w")
        return {}

    digest = config_digest(config)
    return folder.save(State(step=step, version=step, config=digest), write)


def record(folder: Path, steps: range, resumed_at: int = 0) -> None:
    journal = Journal(folder, PlainView(9), trajectories=0, resumed_at=resumed_at)
    for step in steps:
        journal.record(step, {"loss": Mean(step, 1)}, [])
    journal.close()


def test_what_was_written_of_steps_is_on_the_disk_before_a_checkpoint_is_whole(
    tmp_path: Path, synced: list[Path]
) -> None:
    made, trajectories = config(tmp_path), tmp_path / "trajectories"
    with RunFolder(made) as folder:
        record(tmp_path, range(1, 3))
        for name in ("step_000001.txt", "step_000002.jsonl", "mine.txt"):
            (trajectories / name).touch()
        (tmp_path / "events.jsonl").touch()
        saved = save(folder, made, 2)
        before = synced[: synced.index(saved.with_name(f".{saved.name}") / "keel_manifest.json")]
        wanted = [tmp_path / "metrics.jsonl", tmp_path / "events.jsonl", tmp_path, trajectories]
        wanted += [trajectories / "step_000001.txt", trajectories / "step_000002.jsonl"]
        assert set(wanted) <= set(before)
        (trajectories / "step_000003.txt").touch()
        synced.clear()
        save(folder, made, 3)
        assert trajectories / "step_000003.txt" in synced
        assert trajectories / "step_000002.jsonl" not in synced, "once is enough"


def test_a_users_folder_among_the_trajectories_ends_no_run(tmp_path: Path) -> None:
    made, mine = config(tmp_path), tmp_path / "trajectories" / "step_000002"
    with RunFolder(made) as folder:
        record(tmp_path, range(1, 3))
        mine.mkdir()
        (mine.parent / "step_000002.jsonl").symlink_to("nowhere")
        save(folder, made, 1)
        assert folder.latest is not None
        record(tmp_path, range(2, 3), resumed_at=1)
    assert mine.is_dir()


def test_a_record_that_cannot_be_brought_to_the_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            raise OSError(errno.EIO, "Input/output error")

    made = config(tmp_path)
    with RunFolder(made) as folder:
        record(tmp_path, range(1, 2))
        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(SaveError, match=r"step_000001: cannot be written: .*metrics\.jsonl'"):
            save(folder, made, 1)
        assert folder.latest is None


def test_steps_that_the_record_lacks_are_named_when_the_run_resumes(tmp_path: Path) -> None:
    made, metrics = config(tmp_path), tmp_path / "metrics.jsonl"
    with RunFolder(made) as folder:
        record(tmp_path, range(6))
        save(folder, made, 5)
    with RunFolder(made) as folder:
        assert folder.words() == []
    whole = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(whole[:4]) + whole[4][:9])  # steps 0 to 3, and a torn line
    with RunFolder(made) as folder:
        (line,) = folder.words()
        assert line.startswith(f"{metrics} lacks steps 4 to 5, which the run has done")
        assert "training itself is not affected" in line and "step_000005" in line
        record(tmp_path, range(6, 7), resumed_at=5)
        save(folder, made, 6)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [
        0,
        1,
        2,
        3,
        6,
    ]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1]["text"] == "resumed after step 5; metrics.jsonl lacks steps 4 to 5"
    metrics.unlink()
    with RunFolder(made) as folder:
        assert f"{metrics} lacks steps 1 to 6, which" in folder.words()[0]


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ([*range(13)], ""),
        ([*range(12)], "step 12"),
        ([0, 1, 2, 6, *range(8, 13)], "steps 3 to 5 and 7"),
        ([2, 4, 6, 8, 10], "steps 1, 3, 5, 7 and 3 more"),
    ],
)
def test_steps_are_named_in_few_words(tmp_path: Path, there: list[int], words: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in there))
    assert lacking(path, 12) == words


def test_a_record_that_is_cut_back_is_on_the_disk_before_it_takes_the_others_place(
    tmp_path: Path, synced: list[Path]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    keep_until(path, 1)
    assert path.read_text() == '{"step": 1}\n' and len(synced) == 1
