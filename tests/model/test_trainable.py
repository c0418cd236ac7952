"""Models and tokenizers that are refused before an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DogeConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    NemotronConfig,
    PhimoeConfig,
    Qwen3Config,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from keel.configs.schema import ConfigError
from keel.model.embedded.tokenizer import build_tokenizer
from keel.model.trainable import check_ids, check_same_family, check_trainable

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_known_families_pass() -> None:
    check_trainable("dense", Qwen3Config(**SMALL, num_hidden_layers=2))
    check_trainable("moe", Qwen3MoeConfig(**SMALL, num_hidden_layers=2, num_experts=4))


def test_an_unknown_router_and_layers_with_state_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.path = 'phi': .*routing of .* is not known"):
        check_trainable("phi", PhimoeConfig(**SMALL, num_hidden_layers=2, num_local_experts=4))
    with pytest.raises(ConfigError, match=r"model.path = 'next': .*linear_attention"):
        check_trainable("next", Qwen3NextConfig(**SMALL, num_hidden_layers=4, num_experts=4))


def test_attention_that_only_a_forward_pass_shows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.path = 'gemma2': .*softcap: not supported"):
        check_trainable("gemma2", Gemma2Config(**SMALL, num_hidden_layers=2, head_dim=16))
    with pytest.raises(ConfigError, match=r"model.path = 'oss': .*s_aux: not supported"):
        check_trainable("oss", GptOssConfig(**SMALL, num_hidden_layers=2, num_local_experts=4))
    with pytest.raises(ConfigError, match=r"model.path = 'nemotron': .*needs the keyword"):
        check_trainable("nemotron", NemotronConfig(**SMALL, num_hidden_layers=2))


def test_attention_by_a_computed_mask_and_recurrent_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.path = 'doge': .*by a mask that the model"):
        check_trainable("doge", DogeConfig(**SMALL, num_hidden_layers=2))
    with pytest.raises(ConfigError, match=r"model.path = 'rg': .*recurrent.*carry state"):
        check_trainable("rg", RecurrentGemmaConfig(**SMALL, num_hidden_layers=3))


@pytest.mark.parametrize("error", [ValueError, TypeError, NotImplementedError])
def test_a_forward_pass_that_needs_numbers_refuses_nothing(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: Any, **__: Any) -> None:
        raise error("no numbers on this device")

    monkeypatch.setattr(Qwen3Model, "forward", forward)
    check_trainable("dense", Qwen3Config(**SMALL, num_hidden_layers=2))


def test_a_family_that_looks_at_its_numbers_passes() -> None:
    check_trainable("gpt2", GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=2))


def test_a_tokenizer_with_names_for_reserved_ids_is_of_the_same_family(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tokenizer.add_tokens(["<new>"])
    check_same_family(str(tmp_path), tokenizer, "new")
    check_same_family(str(tmp_path / "none"), tokenizer, "the model has none")


def test_an_id_beyond_the_embedding_is_refused() -> None:
    check_ids([], 64, "prompt a")
    check_ids([0, 63], 64, "prompt a")
    with pytest.raises(ConfigError, match=r"prompt a has token id 64, .* ends at 63"):
        check_ids([1, 64, 2], 64, "prompt a")
