"""The tiny model's tokenizer and chat template."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from keel.configs.schema import ConfigError, TinyModelConfig
from keel.model.load import load_tokenizer
from keel.model.tiny.tokenizer import (
    END_OF_TEXT,
    MARKS,
    PHRASES,
    TURN_END,
    VOCAB_MULTIPLE,
    build_tokenizer,
    vocab_rows,
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


@settings(deadline=None)
@given(st.lists(st.sampled_from([*PHRASES, *MARKS, *string.printable])).map("".join))
def test_phrases_and_marks_round_trip(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_characters_and_phrases_are_single_tokens() -> None:
    for text in [*string.printable, *PHRASES, *MARKS]:
        assert len(encode(text)) == 1, text
    assert len(encode("3141")) == 4
    assert len(encode("é")) == 2


def test_ids_fit_the_embedding() -> None:
    rows = vocab_rows(TOKENIZER)
    assert rows % VOCAB_MULTIPLE == 0
    assert max(TOKENIZER.get_vocab().values()) == len(TOKENIZER) - 1 < rows <= 512
    assert TOKENIZER.pad_token == END_OF_TEXT
    assert TOKENIZER.eos_token == TURN_END


def test_phrases_are_no_words_and_keep_the_size() -> None:
    """A larger embedding would change all random weights."""
    assert not [text for text in PHRASES if text.isalnum()]
    assert vocab_rows(TOKENIZER) == 288


def test_thinking_marks_are_not_special() -> None:
    ids = encode("<think>\n1\n</think>\n\n2<|im_end|><|endoftext|>")
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<think>\n1\n</think>\n\n2"


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        text = "".join([*PHRASES, string.printable, *MARKS, "é→"])
        assert loaded.encode(text, add_special_tokens=False) == encode(text)
        assert loaded.decode(encode(text)) == text
        assert loaded.chat_template == TOKENIZER.chat_template
        assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


def test_sampled_turns_stay_a_prefix() -> None:
    turn = {"role": "assistant", "content": "2", "reasoning_content": "1 + 1"}
    sampled = "<think>\n1 + 1\n</think>\n\n2<|im_end|>\n"
    prompt = render(QUESTION, add_generation_prompt=True)
    assert render([*QUESTION, turn]) == prompt + sampled
    tool = [*QUESTION, turn, {"role": "tool", "content": "ok"}]
    assert render(tool).startswith(prompt + sampled)


def test_system_and_tools_share_a_turn() -> None:
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert render(system).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    properties = {"text": {"type": "string"}, "most": {"type": "integer"}}
    tool = {"name": "search", "description": "Searches.", "parameters": {"properties": properties}}
    for tools in ([tool], [{"type": "function", "function": tool}]):
        text = render(system, tools=tools)
        listed = "Tools:\n@search text, most: Searches."
        assert text.startswith(f"<|im_start|>system\nBe brief.\n\n{listed}<|im_end|>\n")
        assert text.count("system\n") == 1
    assert "Tools:\n@now: <|im_end|>" in render(system, tools=[{"name": "now"}])


def test_calls_follow_the_schemas_order() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "integer"}}
    tool = {"name": "search", "parameters": {"properties": properties}}

    def called(content: str, *arguments: dict[str, object]) -> str:
        calls = [{"function": {"name": "search", "arguments": given}} for given in arguments]
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        text = render([*QUESTION, turn], tools=[tool])
        return text.rpartition("assistant\n")[2].removesuffix("<|im_end|>\n")

    assert called("", {"b": 1, "a": "x, y"}) == '@search "x, y", 1'
    assert called("So:", {"c": 1}, {}) == "So:\n@search null, null, 1\n@search"


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


@pytest.mark.parametrize(
    ("task", "limit"),
    [("chain_sum", 40), ("spell_backward", 20), ("spiral_matrix", 30), ("gcd", 30)],
)
def test_taught_questions_are_short(task: str, limit: int) -> None:
    params = {"max_n": 3} if task == "spiral_matrix" else {}
    for entry in reasoning_gym.create_dataset(task, seed=1, size=50, **params):
        assert len(encode(entry["question"])) <= limit


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
