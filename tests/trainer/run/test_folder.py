"""A run folder belongs to one config and one process."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, DataConfig, RunConfig, SourceConfig
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder


def config(folder: Path) -> Config:
    source = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
    return Config(run=RunConfig(dir=str(folder)), data=DataConfig(sources=(source,)))


def checkpoint(folder: RunFolder, config: Config, step: int) -> None:
    state = State(step=step, version=step, cursor={}, config=config_digest(config))
    folder.save(state, lambda path: (path / "weights").write_text("w") and None)


def test_the_resolved_config_is_kept_and_read_back(tmp_path: Path) -> None:
    made = config(tmp_path / "run")
    with RunFolder(made) as folder:
        assert folder.state() is None
        assert load_config(folder.path / "config.yaml") == made


def test_the_newest_checkpoint_is_continued(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        for step in (1, 2, 3):
            checkpoint(folder, made, step)
    longer = replace(made, run=replace(made.run, steps=made.run.steps + 1))
    with RunFolder(longer) as folder:
        state = folder.state()
        assert state is not None and state.step == 3
        assert folder.latest is not None and (folder.latest / "weights").read_text() == "w"


def test_a_model_is_exported_whole_or_not_at_all(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").touch()
        raise OSError("no space left")

    def writes(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    with RunFolder(config(tmp_path)) as folder:
        with pytest.raises(OSError, match="no space"):
            folder.export(fails)
        assert not folder.model.exists()
        folder.export(writes)
        assert [path.name for path in folder.model.iterdir()] == ["config.json"]


def test_a_run_that_goes_on_keeps_the_model_of_its_earlier_end(tmp_path: Path) -> None:
    with RunFolder(config(tmp_path)) as folder:
        folder.begin(0)
        folder.export(lambda made: made.mkdir())
        folder.begin(60)
        assert not folder.model.exists() and (tmp_path / "model_60").exists()
        folder.export(lambda made: made.mkdir())
        assert folder.model.exists()


def test_another_config_is_refused_only_when_something_would_be_lost(tmp_path: Path) -> None:
    made = config(tmp_path)
    other = replace(made, trainer=replace(made.trainer, lr=1.0))
    with RunFolder(made):
        pass
    with RunFolder(other) as folder:  # no checkpoint yet: nothing to mix up
        checkpoint(folder, other, 1)
    with pytest.raises(ConfigError, match=r"another config:\n  trainer.lr: 1.0 → "):
        RunFolder(made).__enter__()
    never = replace(other, run=replace(other.run, resume="never"))
    with pytest.raises(ConfigError, match=r"holds step_000001, and run\.resume is never"):
        RunFolder(never).__enter__()


def test_without_its_config_a_folder_is_known_by_its_checkpoint(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1)
    (tmp_path / "config.yaml").unlink()
    RunFolder(replace(made, run=replace(made.run, steps=7))).check()
    other = replace(made, trainer=replace(made.trainer, lr=1.0))
    with pytest.raises(ConfigError, match=r"holds step_000001 of a run with another config"):
        RunFolder(other).check()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made), pytest.raises(ConfigError, match="another process is running there"):
        RunFolder(made).__enter__()
    with RunFolder(made):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run.dir = .*file/run: cannot be written"):
        RunFolder(config(tmp_path / "file" / "run")).__enter__()


def test_a_file_in_its_place_is_named_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    folder = RunFolder(config(path))
    with pytest.raises(ConfigError, match="is a file; choose another folder"):
        folder.check()


def test_evaluations_are_read_from_the_metrics(tmp_path: Path) -> None:
    with RunFolder(config(tmp_path)) as folder:
        lines = ['{"step": 0, "eval/sums/pass@1": 0.25}', '{"step": 1, "loss": 0.1}']
        lines.append('{"step": 2, "eval/sums/pass@1": 0.75}')
        (folder.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert folder.evaluations() == {"sums/pass@1": [(0, 0.25), (2, 0.75)]}


def test_what_a_run_without_a_checkpoint_wrote_is_kept(tmp_path: Path) -> None:
    made = config(tmp_path)
    for number in (1, 2):
        with RunFolder(made) as folder:
            assert folder.set_aside == (tmp_path / "before_1" if number == 2 else None)
            (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
            (tmp_path / "trajectories").mkdir()
            (tmp_path / "trajectories" / "step_000001.txt").write_text("?")
    with RunFolder(made) as folder:
        assert folder.set_aside == tmp_path / "before_2"
        assert not (tmp_path / "metrics.jsonl").exists()
        for number in (1, 2):
            aside = tmp_path / f"before_{number}"
            assert (aside / "metrics.jsonl").read_text() == f'{{"step": {number}}}\n'
            assert (aside / "trajectories" / "step_000001.txt").exists()
            assert load_config(aside / "config.yaml") == made
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        checkpoint(folder, made, 1)
    with RunFolder(made) as folder:  # goes on
        assert folder.set_aside is None and (tmp_path / "metrics.jsonl").exists()


def test_metrics_that_cannot_be_read_are_named_before_anything_starts(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1)
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:1: not an object with"):
        RunFolder(made).check()


def test_on_a_full_disk_the_config_stays_as_it_was(tmp_path: Path) -> None:
    made = config(tmp_path / "run")
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # bytes; a config has thousands
    try:
        with pytest.raises(ConfigError, match="run: cannot be written"), RunFolder(made):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with RunFolder(made) as folder:
        assert load_config(folder.path / "config.yaml") == made
