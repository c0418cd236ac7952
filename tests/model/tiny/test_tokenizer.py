"""The tiny model's tokenizer and chat template."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from keel.configs.schema import ConfigError, TinyModelConfig
from keel.model.load import load_tokenizer
from keel.model.tiny.tokenizer import (
    MARKS,
    PHRASES,
    build_tokenizer,
)

TOKENIZER = build_tokenizer()
QUESTION = [{"role": "user", "content": "1 + 1 ="}]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def render(messages: list[dict], **options: object) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, **options)


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        text = "".join([*PHRASES, string.printable, *MARKS, "é→"])
        assert loaded.encode(text, add_special_tokens=False) == encode(text)
        assert loaded.decode(encode(text)) == text
        assert loaded.chat_template == TOKENIZER.chat_template
        assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


def test_rendering_without_tools() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "2", "reasoning_content": "\n1 + 1\n"},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "3"},
        *QUESTION,
        {"role": "assistant", "content": "2", "reasoning_content": "\n1 + 1\n"},
        {"role": "assistant", "content": None},
    ]
    thought = "<|im_start|>assistant\n<think>\n1 + 1\n</think>\n\n2<|im_end|>\n"
    question = "<|im_start|>user\n1 + 1 =<|im_end|>\n"
    expected = (
        f"<|im_start|>system\nBe brief.<|im_end|>\n{question}"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n"
        f"<|im_start|>assistant\n3<|im_end|>\n{question}{thought}<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    thinks = render(turns, add_generation_prompt=True)
    assert thinks == render(turns, add_generation_prompt=True, enable_thinking=True) == expected
    closed = render(turns, add_generation_prompt=True, enable_thinking=False)
    assert closed == expected + "<think>\n\n</think>\n\n"


def test_recipe_phrases_are_appended() -> None:
    more = build_tokenizer(("Who built ", "@search", PHRASES[0], "Who built "))
    assert len(more) == len(TOKENIZER) + 2
    text = '@search "Bako"\nWho built Bako?'
    ids = more.encode(text, add_special_tokens=False)
    assert more.decode(ids) == text and len(ids) == len(encode(text)) - 6 - 9
    assert more.encode("1 + 1 =") == TOKENIZER.encode("1 + 1 =")
    again = build_tokenizer(("a", "\n", "<think>", "@search"))
    assert len(again) == len(TOKENIZER) + 1 == max(again.get_vocab().values()) + 1
    assert again.encode("a\n<think>") == TOKENIZER.encode("a\n<think>")
    for wrong in ("", "é"):
        with pytest.raises(ConfigError, match=r"model\.tiny\.phrases"):
            TinyModelConfig(phrases=(wrong,))
