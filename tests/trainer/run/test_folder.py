"""A run folder belongs to one config, one model and one process, and no data in it is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, DataConfig, RunConfig, SourceConfig
from keel.rl.metrics import Mean
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import Journal
from keel.trainer.run.manifest import MANIFEST, Entry, check_exported
from keel.trainer.run.view import PlainView


def config(folder: Path) -> Config:
    source = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
    return Config(run=RunConfig(dir=str(folder)), data=DataConfig(sources=(source,)))


def weights(folder: Path) -> dict[str, Entry]:
    (folder / "weights").write_text("w")
    return {}


def empty(folder: Path) -> dict[str, Entry]:
    folder.mkdir()
    return {}


def save(folder: RunFolder, config: Config, step: int, **fields: Any) -> Path:
    state = State(step=step, version=step, config=config_digest(config), **fields)
    return folder.save(state, weights)


def checkpoint(folder: RunFolder, config: Config, *steps: int) -> None:
    for step in steps:
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        save(folder, config, step)


def record(folder: Path, steps: range, resumed_at: int = 0) -> None:
    journal = Journal(folder, PlainView(9), trajectories=0, resumed_at=resumed_at)
    for step in steps:
        journal.record(step, {"loss": Mean(step, 1)}, [])
    journal.close()


def test_newest_checkpoint_is_continued(tmp_path: Path) -> None:
    made = config(tmp_path / "run")
    with RunFolder(made) as folder:
        assert folder.state() is None
        assert load_config(folder.path / "config.yaml") == made
        checkpoint(folder, made, 1, 2, 3)
    longer = replace(made, run=replace(made.run, steps=made.run.steps + 1))
    with RunFolder(longer) as folder:
        state = folder.state()
        assert state is not None and state.step == 3
        assert "step 3 of 101" in folder.status()
        assert folder.latest is not None and (folder.latest / "weights").read_text() == "w"
    done = replace(made, run=replace(made.run, steps=3))
    assert "run.steps" in RunFolder(done).status()


def test_model_export_is_atomic(tmp_path: Path) -> None:
    def fails(folder: Path) -> dict[str, Entry]:
        folder.mkdir()
        (folder / "config.json").touch()
        raise OSError("no space left")

    def writes(folder: Path) -> dict[str, Entry]:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return {}

    with RunFolder(config(tmp_path)) as folder:
        with pytest.raises(OSError, match="/model"):
            folder.export(fails)
        assert not folder.model.exists() and not (folder.path / ".model").exists()
        folder.export(writes)
        assert sorted(path.name for path in folder.model.iterdir()) == ["config.json", MANIFEST]
        (folder.model / "README.md").touch()
        folder.check_model()
        (folder.model / "config.json").write_text("[]")
        with pytest.raises(ConfigError, match=r"config\.json"):
            folder.check_model()
        (folder.model / MANIFEST).unlink()
        check_exported(folder.model, "there is nothing to compare with")
        folder.begin(60)
        assert not folder.model.exists() and (tmp_path / "model_60").exists()


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "add", "no manifest", "no state"])
def test_damaged_checkpoint_is_set_aside(tmp_path: Path, harm: str) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1, 2)
        folder.export(empty)
    newest = tmp_path / "checkpoints" / "step_000002"
    names = {"add": "more", "no manifest": MANIFEST, "no state": "state.json"}
    victim = newest / names.get(harm, "weights")
    if harm in ("flip", "truncate", "add"):
        victim.write_text({"flip": "v", "truncate": "", "add": ""}[harm])
    else:
        victim.unlink()

    reader = RunFolder(made)  # `keel check` and `keel eval` change nothing
    reader.check()
    text = "\n".join(reader.warnings())
    assert f"{newest} is damaged ({victim.name}: " in text and "step_000001" in text
    assert newest.is_dir()

    with RunFolder(made) as folder:
        state = folder.state()
        assert state is not None and state.step == 1 and len(folder.warnings()) == 1
        folder.begin(1)
        assert (tmp_path / "model_2").is_dir()
        checkpoint(folder, made, 2)
    assert newest.with_name("damaged_step_000002").is_dir() and newest.is_dir()
    with RunFolder(made) as folder:
        state = folder.state()
        assert state is not None and state.step == 2 and folder.warnings() == []
    (newest / "weights").unlink()
    with RunFolder(made):
        assert newest.with_name("damaged_step_000002_2").is_dir()


def test_run_does_not_restart_over_damaged_checkpoints(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1, 2)
    before = sorted(tmp_path.rglob("*"))
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step_{step:06d}" / "weights").write_text("v")
    with pytest.raises(ConfigError, match=r"step_000002: weights.*\n.*step_000001: weights"):
        RunFolder(made).check()
    for _ in range(2):
        with pytest.raises(ConfigError, match="checkpoints"):
            RunFolder(made).__enter__()
    assert sorted(tmp_path.rglob("*")) == before


def test_another_config_is_refused_with_a_checkpoint(tmp_path: Path) -> None:
    made = config(tmp_path)
    other = replace(made, trainer=replace(made.trainer, grad_clip=9.0))
    with RunFolder(made):
        pass
    with RunFolder(other) as folder:  # no checkpoint yet
        checkpoint(folder, other, 1)
    with pytest.raises(ConfigError, match=r"trainer\.grad_clip"):
        RunFolder(made).__enter__()
    never = replace(other, run=replace(other.run, resume="never"))
    with pytest.raises(ConfigError, match=r"run\.resume"):
        RunFolder(never).__enter__()
    (tmp_path / "config.yaml").unlink()
    RunFolder(replace(other, run=replace(other.run, steps=7))).check()
    with pytest.raises(ConfigError, match="step_000001"):
        RunFolder(made).check()


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made), pytest.raises(ConfigError, match=r"run\.dir"):
        RunFolder(made).__enter__()
    with RunFolder(made):
        pass


def test_run_without_checkpoint_is_set_aside(tmp_path: Path) -> None:
    made = config(tmp_path)
    for number in (1, 2):
        with RunFolder(made) as folder:
            assert folder.set_aside == (tmp_path / "before_1" if number == 2 else None)
            (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
            (tmp_path / "trajectories").mkdir()
            (tmp_path / "nonfinite").mkdir()
    with RunFolder(made) as folder:
        assert folder.set_aside == tmp_path / "before_2"
        assert not (tmp_path / "metrics.jsonl").exists()
        for number in (1, 2):
            aside = tmp_path / f"before_{number}"
            assert (aside / "metrics.jsonl").read_text() == f'{{"step": {number}}}\n'
            assert (aside / "trajectories").is_dir() and (aside / "nonfinite").is_dir()
            assert load_config(aside / "config.yaml") == made
        checkpoint(folder, made, 1)
    with RunFolder(made) as folder:
        assert folder.set_aside is None and (tmp_path / "metrics.jsonl").exists()


def test_missing_steps_are_a_warning(tmp_path: Path) -> None:
    made, metrics = config(tmp_path), tmp_path / "metrics.jsonl"
    with RunFolder(made) as folder:
        record(tmp_path, range(6))
        save(folder, made, 5)
        assert folder.warnings() == []
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:4]) + lines[4][:9])  # steps 0 to 3, and a torn line
    with RunFolder(made) as folder:
        (line,) = folder.warnings()
        assert "steps 4 to 5" in line
        record(tmp_path, range(6, 7), resumed_at=5)
        save(folder, made, 6)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 6]
    assert "steps 4 to 5" in (tmp_path / "events.jsonl").read_text().splitlines()[-1]
    metrics.unlink()
    with RunFolder(made) as folder:
        assert "steps 1 to 6" in folder.warnings()[0]


def test_run_continues_with_its_initial_model_only(tmp_path: Path) -> None:
    """The initial model is the reference policy."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"before")
    made = load_config("quickstart", [f"run.dir={tmp_path / 'run'}"])
    made = replace(made, model=replace(made.model, path=str(base)))
    with RunFolder(made, "digest") as folder:
        (base / "model.safetensors").write_bytes(b"behind")  # changed while the run is active
        save(folder, made, 1, model=folder.base, tokenizer="other")
    with pytest.raises(ConfigError, match="other weights"):
        RunFolder(made).check()
    evaluation = RunFolder(made, "digest")
    evaluation.check(("data.",))
    weights, tokenizer, *_ = evaluation.warnings()
    assert "other weights" in weights and "tokenizer" in tokenizer
    (base / "model.safetensors").write_bytes(b"before")
    RunFolder(made, "other").check()
