from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from keel.model.load import checkpoint_tensors, load_policy
from keel.trainer.engine.export import write_model
from tests.model.test_load import CONFIGS


def test_a_model_is_written_with_the_generation_settings_it_came_with(tmp_path: Path) -> None:
    """Transformers warns of these when it reads them, and would refuse to write them."""
    given = {"eos_token_id": 2, "temperature": 0.9, "top_p": 0.6}
    AutoModelForCausalLM.from_config(CONFIGS["dense, tied"]).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(given))
    model = load_policy(str(tmp_path / "base"), torch.float32)
    write_model(tmp_path / "out", model, checkpoint_tensors(model), dtype="float32")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: written.get(name) for name in given} == given
    assert load_policy(str(tmp_path / "out"), torch.float32).generation_config.top_p == 0.6
