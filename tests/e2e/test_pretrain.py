"""`keel pretrain` as a user runs it: warm-up of sparse-attention indexers on text files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from keel.commands.cli import main
from keel.configs.schema import TinyModelConfig
from keel.model.tiny.build import build_model
from keel.model.tiny.tokenizer import build_tokenizer
from tests.e2e.in_process import in_this_process

pytestmark = pytest.mark.e2e


def test_warm_up_trains_indexers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, folder = tmp_path / "base", tmp_path / "run"
    tokenizer = build_tokenizer()
    shape = TinyModelConfig(family="deepseek_v32", layers=2, index_top_k=8, max_context=64)
    build_model(shape, tokenizer, seed=0).save_pretrained(base)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(base)
    (tmp_path / "text").mkdir()
    for number in range(6):
        (tmp_path / "text" / f"{number}.txt").write_text(f"The number is {number}. " * 8)
    text = {"name": "text", "source": "text", "path": str(tmp_path / "text"), "holdout": 1}
    recipe = {
        "run": {"dir": str(folder), "steps": 4, "device": "cpu"},
        "model": {"path": str(base), "dtype": "float32"},
        "sft": {"sources": [text], "max_context_tokens": 64, "conversations_per_step": 4},
        "trainer": {"attention": "warm-up", "lr": 1e-2, "threads": 1},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    with in_this_process():
        status = main(["pretrain", str(path)])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, *steps, last = lines
    assert last["indexer/kl"] < steps[0]["indexer/kl"]
    assert all(0 < line["eval/text/indexer/held"] <= 1 for line in (first, last))
    assert first["eval/text/loss"] == pytest.approx(last["eval/text/loss"], rel=1e-6)
    before, after = (load_file(path / "model.safetensors") for path in (base, folder / "model"))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed and after.keys() == before.keys()
    assert all(".indexer." in name for name in changed), changed
