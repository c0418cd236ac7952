"""What a command says when it ends."""

from __future__ import annotations

from pathlib import Path

from keel.configs.load import load_config
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.words import closing_words


def test_the_command_for_the_curves_takes_a_folder_with_spaces(tmp_path: Path) -> None:
    path = tmp_path / "my run"
    config = load_config("quickstart", [f"run.dir={path}"])
    with RunFolder(config) as folder:
        (path / "metrics.jsonl").touch()
        said = closing_words(folder, config, 1, ["train", "quickstart"])
    assert f"tensorboard --logdir '{path}'" in said
