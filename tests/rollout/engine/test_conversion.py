"""Prompts to ids, text to messages, recordings to segments."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import pytest
from transformers import AddedToken

from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.types import SamplingMasks
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.engine.conversion import (
    build_segment,
    build_trajectory,
    check_fits,
    decode_all,
    render_prompt,
    sibling_seed,
    split_message,
)
from tests.rl.rollouts import prompt
from tests.rollout.chat.families import tokenizer_of


class FakeTokenizer:
    """One id a character; remembers what it was asked for."""

    chat_template = "its own"
    eos_token_id = 0

    def __init__(self, suffix: str = "") -> None:
        self.suffix, self.options = suffix, {}

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        self.options = options
        return "".join(message["content"] for message in conversation) + self.suffix

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens, "the template writes the special tokens"
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def test_a_prompt_goes_through_the_chat_template() -> None:
    tokenizer = FakeTokenizer()
    rendered = render_prompt(tokenizer, prompt("hi", thinking=False, tools=({"name": "add"},)))
    assert rendered.token_ids == [104, 105] and not rendered.thinking
    assert tokenizer.options == {
        "tools": [{"name": "add"}],
        "add_generation_prompt": True,
        "enable_thinking": False,
        "thinking": False,
        "reasoning": False,
        "tokenize": False,
    }


@pytest.mark.parametrize(
    ("suffix", "thinking"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_template_may_open_the_think_block(suffix: str, thinking: bool) -> None:
    assert render_prompt(FakeTokenizer(suffix), prompt()).thinking == thinking


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(ValueError, match="prompt p: the chat template renders it to nothing"):
        render_prompt(FakeTokenizer(), prompt(messages=({"role": "user", "content": ""},)))


class BaseTokenizer(FakeTokenizer):
    """Begins every text, and ends it."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        raise AssertionError("a raw prompt goes through no template")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = super().encode(text, add_special_tokens=False)
        return [1, *ids, self.eos_token_id] if add_special_tokens else ids


def test_a_raw_prompt_begins_as_the_tokenizer_begins_a_text() -> None:
    rendered = render_prompt(BaseTokenizer(), prompt("Q: <think>", raw=True))
    assert rendered.token_ids == [1, *map(ord, "Q: <think>")] and rendered.thinking
    assert not render_prompt(BaseTokenizer(), prompt("Q:", raw=True)).thinking


def test_a_prompt_must_leave_room_for_its_answer() -> None:
    check_fits(prompt(), 40, 60, 100)
    with pytest.raises(ValueError, match=r"prompt p: its 41 tokens .* = 60 exceed .* of 100"):
        check_fits(prompt(), 41, 60, 100)


@pytest.mark.parametrize(
    ("raw", "opened", "content", "reasoning"),
    [
        ("four", False, "four", None),
        ("<think>\n2+2\n</think>\n\n4", False, "4", "2+2"),
        ("2+2\n</think>\n\n4", True, "4", "2+2"),
        ("<think>2+2</think>4", True, "4", "2+2"),
        ("<think>\n\n</think>\n\n4", False, "4", None),
        ("<think>2+2 is 4", False, "", "2+2 is 4"),
        ("2+2 is 4", True, "", "2+2 is 4"),
        ("4 <think>or 5", False, "", "4 or 5"),
        ("<think>a</think>4<think>b</think>", False, "4", "a\nb"),
        ("<think>a</think>4<think>b", False, "", "a4b"),
        ("<think>a<think>b</think>4", False, "4", "a<think>b"),
        ("a</think>4</think>5", True, "4</think>5", "a"),
        ("</think>4", False, "</think>4", None),
        ("<think></think>", False, "", None),
        ("", True, "", None),
    ],
)
def test_text_is_split_into_thought_and_answer(
    raw: str, opened: bool, content: str, reasoning: str | None
) -> None:
    message = split_message(raw, thinking=opened)
    assert message["content"] == content
    assert message.get("reasoning_content") == reasoning
    assert message["raw"] == raw and message["role"] == "assistant"


def test_a_completion_of_beginnings_alone_is_split_in_no_time() -> None:
    began = time.thread_time()
    for raw in ("<think>" * 50_000, "<think>a</think>" + "<think>\nwait\n" * 50_000):
        assert split_message(raw, thinking=True)["content"] == ""
    assert time.thread_time() - began < 5  # by trying each beginning: minutes


def segment(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "logp": np.array([-1, -2], np.float32),
        "versions": np.array([4, 5], np.int32),
        "sampling_mask": SamplingMasks.from_lists([[7, 8], [9]]),
        "routes": np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2),
    }
    return build_segment("p", [1, 2, 3], [7, 9], **{**fields, **changes})


@pytest.mark.parametrize("clean_up", [False, True])
def test_answers_are_decoded_as_one_by_one(clean_up: bool) -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.clean_up_tokenization_spaces = clean_up
    end = tokenizer.eos_token_id
    answers = [tokenizer.encode(text) for text in ("one , two", "", "three")] + [[end]]
    alone = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    assert decode_all(tokenizer, answers) == alone
    assert alone[-1] == "" != tokenizer.decode([end])
    assert decode_all(tokenizer, []) == []


def test_a_segment_aligns_what_was_recorded() -> None:
    built = segment()
    assert built.token_ids_T.tolist() == [1, 2, 3, 7, 9]
    assert built.trainable_T.tolist() == [False, False, False, True, True]
    assert built.logp_old_T.tolist() == [0, 0, 0, -1, -2]
    assert built.version_T.tolist() == [-1, -1, -1, 4, 5]
    assert [built.sampling_mask[t].tolist() for t in range(5)] == [[], [], [], [7, 8], [9]]
    assert built.routes_TLK.shape == (5, 3, 2)
    assert built.routes_TLK[3].tolist() == [[18, 19], [20, 21], [22, 23]]
    assert (built.routes_TLK[4] == -1).all()


def test_without_recordings_a_segment_has_none() -> None:
    built = segment(sampling_mask=None, routes=None)
    assert built.sampling_mask is None and built.routes_TLK is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logp", np.zeros(3, np.float32)),
        ("versions", np.zeros(1, np.int32)),
        ("sampling_mask", SamplingMasks.empty(5)),
        ("routes", np.zeros((5, 3, 2), np.int16)),
    ],
)
def test_recordings_of_the_wrong_length_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"segment of p: {name} has"):
        segment(**{name: value})


def test_a_trajectory_is_one_turn() -> None:
    built = build_trajectory(
        3, segment(), "<think>x</think>4", thinking=False, finish_reason="stop"
    )
    assert (built.sibling, built.sampled_tokens, built.finish_reason) == (3, 2, "stop")
    assert built.messages[0]["content"] == "4"


def test_seeds_differ_in_everything_and_fit_vllm() -> None:
    seeds = {
        sibling_seed(seed, name, version, draw, sibling)
        for seed in (0, 1)
        for name in ("p1", "p11")
        for version in (0, 1)
        for draw in (0, 1)
        for sibling in range(8)
    }
    assert len(seeds) == 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sibling_seed(0, "p1", 1, 0, 2) == sibling_seed(0, "p1", 1, 0, 2)


def test_thinking_marks_stay_where_a_tokenizer_calls_them_special() -> None:
    tokenizer: Any = tokenizer_of("qwen3")
    ids = tokenizer.encode("<think>\nno, 4\n</think>\n\nIt is 4", add_special_tokens=False)
    ids.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    (plain,) = decode_all(tokenizer, [ids])
    marked = copy.deepcopy(tokenizer)
    marked.add_tokens([AddedToken(m, special=True) for m in ("<think>", "</think>")], True)
    assert "think" not in marked.decode(ids, skip_special_tokens=True)
    assert decode_all(marked, [ids]) == [plain]
    assert split_message(plain, thinking=False)["content"] == "It is 4"


def test_a_developers_message_must_be_shown() -> None:
    messages = ({"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    asked = prompt(messages=messages)
    assert render_prompt(tokenizer_of("chatml"), asked).token_ids
    assert TemplateChat(tokenizer_of("chatml")).opening(messages, (), thinking=False)
    with pytest.raises(ValueError, match="does not show a message of the role developer"):
        render_prompt(tokenizer_of("qwen3"), asked)
    with pytest.raises(ValueError, match="does not show a message of the role developer"):
        TemplateChat(tokenizer_of("qwen3")).opening(messages, (), thinking=False)
