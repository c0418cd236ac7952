from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.model.load import checkpoint_tensors, load_policy
from keel.trainer.engine.export import write_model
from tests.model.test_load import built


def test_generation_config_is_preserved(tmp_path: Path) -> None:
    """Settings that transformers refuses to write are preserved, too."""
    settings = {"eos_token_id": 2, "temperature": 0.9, "top_p": 0.6}
    built("qwen3").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(settings))
    model = load_policy(str(tmp_path / "base"), torch.float32)
    write_model(tmp_path / "out", model, checkpoint_tensors(model), dtype="float32")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: written.get(name) for name in settings} == settings
    assert load_policy(str(tmp_path / "out"), torch.float32).generation_config.top_p == 0.6


@pytest.mark.parametrize(
    ("settings", "end", "written"),
    [(2, 5, [5, 2]), (2, 2, 2), ([2, 5], 5, [2, 5]), (None, 5, 5), (2, None, 2)],
)
def test_generation_config_has_the_tokenizer_eos(
    settings: Any, end: int | None, written: Any, tmp_path: Path
) -> None:
    """`generate` of transformers reads generation_config.json only."""
    base = built("qwen3")
    base.generation_config.eos_token_id = settings
    write_model(tmp_path / "out", base, checkpoint_tensors(base), dtype="float32", end=end)
    model = load_policy(str(tmp_path / "out"), torch.float32)
    assert model.generation_config.eos_token_id == written
    assert base.generation_config.eos_token_id == settings
