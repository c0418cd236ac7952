"""A run keeps its chosen layout as long as the hardware stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keel.configs.schema import Config, DataConfig, RunConfig, SourceConfig
from keel.trainer.placement.choose import (
    SavedChoice,
    load_choice,
    save_choice,
    update_choice,
)
from keel.trainer.placement.hardware import Hardware, idle_nodes
from keel.trainer.run.checkpoint import STATE

SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
VALUES = {"trainer.micro_batch_tokens": 18_432, "trainer.ranks": 4, "rollout.time_share": False}
FOUR = Hardware(gpu=True, nodes=tuple(idle_nodes(1, 4)), gpu_gib=139.7).signature


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The config of a run that has a checkpoint and a saved choice."""
    saved = tmp_path / "checkpoints" / "step_000002"
    saved.mkdir(parents=True)
    (saved / STATE).write_text("{}")
    save_choice(tmp_path, VALUES, FOUR)
    return Config(run=RunConfig(dir=str(tmp_path)), data=DataConfig(sources=(SOURCE,)))


def test_choice_is_reused_on_the_same_hardware(config: Config, tmp_path: Path) -> None:
    assert load_choice(config, FOUR) == SavedChoice(values=VALUES)
    update_choice(tmp_path, {"trainer.micro_batch_tokens": 9216, "trainer.compile": True})
    assert load_choice(config, FOUR).values == {**VALUES, "trainer.micro_batch_tokens": 9216}
    started_over = replace(config, run=replace(config.run, resume="never"))
    assert load_choice(started_over, FOUR) == SavedChoice()


def test_missing_checkpoint_or_damaged_file_means_no_choice(config: Config, tmp_path: Path) -> None:
    (tmp_path / "chosen.json").write_text('{"values": 3')
    assert load_choice(config, FOUR) == SavedChoice()
    update_choice(tmp_path, {"trainer.micro_batch_tokens": 1})  # no error
    save_choice(tmp_path, VALUES, FOUR)
    (tmp_path / "checkpoints" / "step_000002" / STATE).unlink()
    assert load_choice(config, FOUR) == SavedChoice()
