"""Plans, refusals and metrics of `keel pretrain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.model.tiny.build import build_model
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.metrics import Mean, values
from keel.trainer.prepare import prepare, prepare_pretraining, prepare_sft, text_encoder
from keel.trainer.run.checkpoint import State, save
from keel.trainer.run.manifest import Entry
from keel.trainer.sft import evaluation_metrics

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


def test_plan(tmp_path: Path) -> None:
    task = prepare_pretraining(recipe(tmp_path), ["trainer.attention=warm-up"])
    message = task.text()
    assert "text: 14 windows to learn from, 2 held out; of 7 documents" in message
    assert "32 windows a step" in message and "chats are written" not in message
    assert "dense; the indexers alone are trained, by Eq. 3" in message
    assert (
        "attention"
        not in prepare_pretraining(recipe(tmp_path), ["model.tiny.family=qwen3_moe"]).text()
    )


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


def test_epochs_count_from_the_complete_checkpoint(tmp_path: Path) -> None:
    path, knobs = recipe(tmp_path), ["sft.conversations_per_step=4", "sft.epochs=1"]
    batches, root = prepare_pretraining(path, knobs).batches, tmp_path / "run" / "checkpoints"

    def write(folder: Path) -> dict[str, Entry]:
        (folder / "weights").write_text("w")
        return {}

    root.mkdir(parents=True)
    for step in range(1, 5):
        batches.take()
        if step in (2, 4):
            state = State(step=step, version=step, config="", cursor=batches.position())
            newest = save(root, state, write, keep=2)
    more = [*knobs, "sft.epochs=2"]
    assert prepare_pretraining(path, more).config.run.steps == 8, "after a step of 2 windows"
    (newest / "weights").unlink()
    assert prepare_pretraining(path, more).config.run.steps == 7


def test_text_and_chats_mix(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    chats = [{"prompt": f"What is {i}?", "completion": str(i)} for i in range(4)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    both = [
        {"name": "text", "source": "text", "path": str(tmp_path / "text.jsonl")},
        {"name": "chats", "source": "jsonl", "path": str(tmp_path / "chats.jsonl")},
    ]
    given = [f"sft.sources={json.dumps(both)}"]
    assert len(prepare_sft(path, given).lessons.train.take(20)) == 20
    with pytest.raises(ConfigError, match=r"sources: chats: no text\. `keel pretrain` learns from"):
        prepare_pretraining(path, given)
    with pytest.raises(ConfigError, match=r"nothing to sample"):
        prepare(path, [])


def test_base_model_needs_no_chat_template(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    config = load_config(recipe(tmp_path))
    build_model(config.model.tiny, tokenizer, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    model = f"model.path={tmp_path / 'model'}"
    assert prepare_pretraining(recipe(tmp_path), [model]).facts.index_top_k == 16
    sums = {"name": "s", "source": "reasoning_gym", "task": "chain_sum", "size": 9}
    with pytest.raises(ConfigError, match="chat template"):
        prepare_sft(recipe(tmp_path, data={"sources": [sums]}), [model])


def test_shipped_stages_chain_their_models(tmp_path: Path) -> None:
    few = ["sft.sources[retrieval].size=80", f"run.dir={tmp_path / 'run'}", "run.device=cpu"]
    task = prepare_pretraining("pretrain-dense", few)
    windows = task.lessons.train.take(16)
    assert all(window.total_tokens == 112 for window in windows), "a pair is one token"
    tokenizer = build_tokenizer(task.config.model.tiny.phrases)
    build_model(task.config.model.tiny, tokenizer, seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for stage in ("warm-up", "sparse"):
        name = f"pretrain-{stage}"
        after = prepare_pretraining(name, [*few, f"model.path={tmp_path}"])
        assert after.config.trainer.attention == stage
        assert after.tokenizer_digest == task.tokenizer_digest and after.facts.index_top_k == 12
        before = load_config(name).model.path
        assert before.startswith("runs/pretrain-") and before.endswith("/model")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["trainer.attention=warm-up", "model.tiny.family=qwen3_moe"],
            r"'warm-up': Qwen3MoeForCausalLM",
        ),
        (
            ["sft.max_context_tokens=16"],
            r"16 tokens.*max_context_tokens",
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
        (["sft.sources=[]"], r"sources = \[\]"),
        (["trainer.ranks=2", "trainer.sequence_parallel=2"], "sequence_parallel = 2"),
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


def test_heldout_metrics() -> None:
    scored = {
        "a/nll": Mean(6.0, 2),
        "b/c/nll": Mean(2.0, 2),
        "a/indexer/held": Mean(1.0, 4),
        "b/c/indexer/held": Mean(3.0, 4),
    }
    assert values(evaluation_metrics(scored)) == {
        "eval/a/loss": 3.0,
        "eval/b/c/loss": 1.0,
        "eval/loss": 2.0,
        "eval/a/indexer/held": 0.25,
        "eval/b/c/indexer/held": 0.75,
        "eval/indexer/held": 0.5,
    }
    assert evaluation_metrics({}) == {}
