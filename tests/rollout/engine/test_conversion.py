"""Tests the conversion of token ids to text, and of text to messages."""

from __future__ import annotations

from typing import Any

import pytest

from keel.model.tiny.tokenizer import build_tokenizer
from keel.rollout.engine.conversion import decode_all, split_message


@pytest.mark.parametrize(
    ("raw", "opened", "content", "reasoning"),
    [
        ("<think>\n2+2\n</think>\n\n4", False, "4", "2+2"),
        ("2+2\n</think>\n\n4", True, "4", "2+2"),
        ("<think>2+2</think>4", True, "4", "2+2"),
        ("<think>2+2 is 4", False, "", "2+2 is 4"),
        ("4 <think>or 5", False, "", "4 or 5"),
        ("<think>a</think>4<think>b</think>", False, "4", "a\nb"),
        ("<think>a</think>4<think>b", False, "", "a4b"),
        ("<think>a<think>b</think>4", False, "4", "a<think>b"),
        ("a</think>4</think>5", True, "4</think>5", "a"),
        ("</think>4", False, "</think>4", None),
        ("", True, "", None),
    ],
)
def test_text_is_split_into_reasoning_and_content(
    raw: str, opened: bool, content: str, reasoning: str | None
) -> None:
    message = split_message(raw, thinking=opened)
    assert message["content"] == content and message.get("reasoning_content") == reasoning
    assert message["raw"] == raw and message["role"] == "assistant"


@pytest.mark.parametrize("clean_up", [False, True])
def test_batch_decoding_equals_decoding_one_by_one(clean_up: bool) -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.clean_up_tokenization_spaces = clean_up
    end = tokenizer.eos_token_id
    completions = [tokenizer.encode(text) for text in ("one , two", "", "three")] + [[end]]
    alone = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    assert decode_all(tokenizer, completions) == alone
    assert alone[-1] == "" != tokenizer.decode([end])
    assert decode_all(tokenizer, []) == []
