"""The tiny model's tokenizer and chat template."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keel.model.tiny.tokenizer import build_tokenizer

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
