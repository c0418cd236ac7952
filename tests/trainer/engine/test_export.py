"""The generation settings of exported models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.model.load import checkpoint_tensors, load_policy
from keel.trainer.engine import export
from tests.trainer.engine import batches


@pytest.fixture
def base(tmp_path: Path) -> Path:
    batches.write_model(tmp_path / "base", "dense")
    return tmp_path / "base"


def exported(base: Path, **options: Any) -> dict[str, Any]:
    model, out = load_policy(str(base), torch.float32), base.with_name("out")
    export.write_model(out, model, checkpoint_tensors(model), dtype="float32", **options)
    assert load_policy(str(out), torch.float32).generation_config.top_p == 0.6
    return json.loads((out / "generation_config.json").read_text())


@pytest.mark.parametrize(
    ("eos", "end", "written"),
    [(2, 5, [5, 2]), (2, 2, 2), ([2, 5], 5, [2, 5]), (None, 5, 5), (2, None, 2)],
)
def test_generation_config_is_preserved_with_the_tokenizer_eos(
    base: Path, eos: Any, end: int | None, written: Any
) -> None:
    """Also settings that transformers refuses to write. Its `generate` reads this file only."""
    settings = {"eos_token_id": eos, "temperature": 0.9, "top_p": 0.6}
    (base / "generation_config.json").write_text(json.dumps(settings))
    result = exported(base, end=end)
    assert {name: result.get(name) for name in settings} == {**settings, "eos_token_id": written}


def test_large_models_are_split_into_shards(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "generation_config.json").write_text('{"top_p": 0.6, "do_sample": true}')
    monkeypatch.setattr(export, "_SHARD_BYTES", 50_000)
    exported(base)
    index = json.loads((base.with_name("out") / "model.safetensors.index.json").read_text())
    written = {path.name for path in base.with_name("out").glob("*.safetensors")}
    assert len(written) > 2 and set(index["weight_map"].values()) == written
