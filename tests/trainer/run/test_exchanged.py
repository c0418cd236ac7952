"""A run's model folder, which somebody has changed meanwhile."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.manifest import Entry


def weights(folder: Path) -> dict[str, Entry]:
    (folder / "weights").write_text("w")
    return {}


def said_of_model(folder: RunFolder) -> list[str]:
    return [line for line in folder.words() if line.startswith("model.path")]


def test_a_run_goes_on_with_the_model_that_it_began_with(tmp_path: Path) -> None:
    """Its reference policy is that model."""
    base, moved = tmp_path / "base", tmp_path / "moved"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"before")
    (base / "config.json").write_text('{"rope_theta": 1, "dtype": "float32"}')
    made = load_config("quickstart", [f"run.dir={tmp_path / 'run'}"])
    made = replace(made, model=replace(made.model, path=str(base)))
    shutil.copytree(base, moved)
    with RunFolder(made) as folder:
        (base / "model.safetensors").write_bytes(b"behind")  # while it runs
        state = State(step=1, version=1, config=config_digest(made), model=folder.base)
        folder.save(state, weights)
    with pytest.raises(ConfigError, match=r"has other weights than when step_000001 was written"):
        RunFolder(made).check()
    asked = RunFolder(made, "digest")
    asked.check(("data.",))  # whose policy alone is asked for
    (said,) = said_of_model(asked)
    assert "has other weights than when step_000001 was written" in said
    shutil.rmtree(base)
    moved.rename(base)
    with RunFolder(made, "digest") as folder:
        assert folder.state() == state and said_of_model(folder) == []
        folder.save(replace(state, tokenizer="other"), weights)
        (said,) = said_of_model(folder)
        assert "has another tokenizer or chat template than when step_000001 was" in said
        folder.save(replace(state, tokenizer="digest"), weights)
        assert said_of_model(folder) == []
    (base / "config.json").write_text('{"dtype": "bfloat16", "rope_theta": 1}')  # saved again
    RunFolder(made).check()
    (base / "config.json").write_text('{"rope_theta": 2}')
    with pytest.raises(ConfigError, match=r"has another config\.json than when step_000001 was"):
        RunFolder(made).check()
    older = replace(made, run=replace(made.run, dir=str(tmp_path / "older")))
    with RunFolder(older) as folder:  # whose checkpoints know of weights alone
        known = state.model.split("+")[0]
        folder.save(replace(state, config=config_digest(older), model=known), weights)
    RunFolder(older).check()
