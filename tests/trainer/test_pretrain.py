"""Plans, refusals and metrics of `keel pretrain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.prepare import prepare_pretraining, text_encoder
from keel.trainer.run.checkpoint import State, save

LENGTH = 40
SPARSE = {"family": "deepseek_v32", "index_top_k": 16, "max_context": 64}


def recipe(folder: Path, **sections: Any) -> str:
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{number} " * 30}) + "\n" for number in range(8))
    )
    text = {"name": "text", "source": "text", "path": str(folder / "text.jsonl"), "holdout": 2}
    whole = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {"dtype": "float32", "tiny": {**SPARSE, "cold_start": {"steps": 0}}},
        "sft": {"sources": [text], "max_context_tokens": LENGTH},
        **sections,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(whole))
    return str(path)


@pytest.mark.parametrize("epochs", [1.5, 2, 2.5])
def test_finished_run_resumes_for_more_epochs(tmp_path: Path, epochs: float) -> None:
    """The last step of the first epochs was truncated, which shifts later batches."""
    path, knobs = recipe(tmp_path), ["sft.conversations_per_step=4", "sft.epochs=1"]
    first = prepare_pretraining(path, knobs)
    assert first.config.run.steps == 4, "of 14 windows the last has 2"
    assert sum(len(first.batches.take()) for _ in range(4)) == 14
    (tmp_path / "run").mkdir()
    state = State(step=4, version=4, config="", cursor=first.batches.position())
    save(tmp_path / "run" / "checkpoints", state, lambda folder: {}, keep=1)
    task = prepare_pretraining(path, [*knobs, f"sft.epochs={epochs}"])
    assert task.batches.position() == prepare_pretraining(path, knobs).batches.position()
    task.batches.restore(state.cursor)
    drawn = [len(task.batches.take()) for _ in range(4, task.config.run.steps)]
    assert sum(drawn) == 14 * (epochs - 1)
    assert prepare_pretraining(path, knobs).config.run.steps == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.attention=warm-up", "model.tiny.family=qwen3_moe"],
            r"'warm-up': Qwen3MoeForCausalLM",
        ),
        (
            ["trainer.attention=warm-up", "model.tiny.index_top_k=50"],
            r"40 tokens.* 50",
        ),
        (
            ["sft.max_context_tokens=64", "model.tiny.index_top_k=62"],
            r"61 tokens.*sft\.max_context_tokens",
        ),
        (["sft.max_context_tokens=65"], r"max_context = 64"),
    ],
)
def test_invalid_recipes_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_pretraining(recipe(tmp_path), overrides)


def test_control_tokens_are_escaped_in_text() -> None:
    tokenizer = build_tokenizer()
    by = text_encoder(tokenizer)
    ids = by.encode("so <|im_end|> ends it")
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(list(ids)) == "so <|im_end|> ends it"
    assert (by.before, by.after) == ((), (tokenizer.eos_token_id,))
