"""The tiny models, as they are built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keel.configs.schema import ColdStartConfig, ConfigError, TinyModelConfig
from keel.model.load import facts_of, load_model_config, load_policy
from keel.model.tiny.build import build_model
from keel.model.tiny.cache import content_key, make_folder
from keel.model.tiny.cold_start import Curriculum, Example, Lesson, train
from keel.model.tiny.tokenizer import build_tokenizer

TINY = TinyModelConfig(
    family="deepseek_v32",
    layers=2,
    hidden_size=32,
    heads=2,
    head_dim=16,
    latent_size=32,
    expert_size=32,
    experts=4,
    index_top_k=4,
    max_context=64,
    cold_start=ColdStartConfig(steps=0),
)
QWEN = TinyModelConfig()


def test_the_sparse_model_is_written_and_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_folder(folder, TINY, Curriculum(seed=1))
    facts = facts_of(load_model_config(str(folder)))
    assert (facts.architecture, facts.moe_layer_ids) == ("DeepseekV32ForCausalLM", (0, 1))
    assert facts.kv_width == TINY.latent_size + TINY.head_dim // 2
    assert json.loads((folder / "config.json").read_text())["index_topk"] == 4
    loaded = load_policy(str(folder), torch.float32).state_dict()
    for name, weight in build_model(TINY, build_tokenizer(), seed=1).state_dict().items():
        assert torch.equal(loaded[name], weight), name


def test_a_cold_start_attends_to_everything() -> None:
    model = build_model(TINY, build_tokenizer(), seed=1)
    kept = [p.clone() for name, p in model.named_parameters() if ".indexer." in name]
    widths: list[int] = []
    for name, module in model.named_modules():
        if name.endswith("indexer"):
            module.register_forward_hook(lambda *call: widths.append(call[2].shape[-1]))
    lesson = Lesson(list(range(5, 17)), [False] * 4 + [True] * 8)
    config = ColdStartConfig(steps=1, batch_size=2, questions=2)
    train(model, build_tokenizer(), [Example(lesson, lesson)] * 2, config, seed=0)
    assert widths == [12, 12]
    assert all(getattr(m, "index_topk", 4) == 4 for m in model.modules())
    after = [p for name, p in model.named_parameters() if ".indexer." in name]
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))


def test_what_is_not_of_its_family_does_not_name_a_model_anew() -> None:
    key = content_key(QWEN, Curriculum(seed=3))
    assert key == content_key(TinyModelConfig(index_top_k=5), Curriculum(seed=3))
    assert key != content_key(TinyModelConfig(family="deepseek_v32"), Curriculum(seed=3))
    with pytest.raises(ConfigError, match=r"tiny\.head_dim = 18: must be a multiple of 4"):
        TinyModelConfig(family="deepseek_v32", head_dim=18)
