"""Tests the conversion of prompts to ids, texts to messages and recordings to segments."""

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
    """Tokenizer with one id per character, which adds start and end tokens to raw texts."""

    chat_template = "custom"
    eos_token_id = 0

    def __init__(self, suffix: str = "") -> None:
        self.suffix, self.options = suffix, dict[str, Any]()

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        self.options = options
        return "".join(message["content"] for message in conversation) + self.suffix

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [ord(character) for character in text]
        return [1, *ids, self.eos_token_id] if add_special_tokens else ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def test_prompts_are_rendered_by_the_chat_template() -> None:
    tokenizer = FakeTokenizer()
    rendered = render_prompt(tokenizer, prompt("hi", thinking=False, tools=({"name": "add"},)))
    assert rendered.token_ids == [104, 105] and not rendered.thinking
    assert tokenizer.options["tools"] == [{"name": "add"}]
    assert tokenizer.options["enable_thinking"] is tokenizer.options["thinking"] is False


@pytest.mark.parametrize(
    ("suffix", "thinking"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_template_may_open_the_think_block(suffix: str, thinking: bool) -> None:
    assert render_prompt(FakeTokenizer(suffix), prompt()).thinking == thinking


def test_empty_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt p"):
        render_prompt(FakeTokenizer(), prompt(messages=({"role": "user", "content": ""},)))


def test_raw_prompts_start_a_text() -> None:
    rendered = render_prompt(FakeTokenizer(), prompt("Q: <think>", raw=True))
    assert rendered.token_ids == [1, *map(ord, "Q: <think>")] and rendered.thinking
    assert not render_prompt(FakeTokenizer(), prompt("Q:", raw=True)).thinking


def test_prompts_leave_room_for_completions() -> None:
    check_fits(prompt(), 40, 60, 100)
    with pytest.raises(ValueError, match="prompt p"):
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
def test_text_is_split_into_reasoning_and_content(
    raw: str, opened: bool, content: str, reasoning: str | None
) -> None:
    message = split_message(raw, thinking=opened)
    assert message["content"] == content and message.get("reasoning_content") == reasoning
    assert message["raw"] == raw and message["role"] == "assistant"


def test_splitting_takes_linear_time() -> None:
    begin = time.thread_time()
    for raw in ("<think>" * 50_000, "<think>a</think>" + "<think>\nwait\n" * 50_000):
        assert split_message(raw, thinking=True)["content"] == ""
    assert time.thread_time() - begin < 5


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


def segment(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "logp": np.array([-1, -2], np.float32),
        "versions": np.array([4, 5], np.int32),
        "sampling_mask": SamplingMasks.from_lists([[7, 8], [9]]),
        "routes": np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2),
    }
    return build_segment("p", [1, 2, 3], [7, 9], **{**fields, **changes})


def test_segments_align_recordings() -> None:
    built = segment()
    assert built.token_ids_T.tolist() == [1, 2, 3, 7, 9]
    assert built.trainable_T.tolist() == [False, False, False, True, True]
    assert built.logp_old_T.tolist() == [0, 0, 0, -1, -2]
    assert built.version_T.tolist() == [-1, -1, -1, 4, 5]
    assert [built.sampling_mask[t].tolist() for t in range(5)] == [[], [], [], [7, 8], [9]]
    assert built.routes_TLK.shape == (5, 3, 2)
    assert built.routes_TLK[3].tolist() == [[18, 19], [20, 21], [22, 23]]
    assert (built.routes_TLK[4] == -1).all()
    empty = segment(sampling_mask=None, routes=None)
    assert empty.sampling_mask is None and empty.routes_TLK is None
    trajectory = build_trajectory(3, built, "4", thinking=False, finish_reason="stop")
    assert (trajectory.sibling, trajectory.sampled_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logp", np.zeros(3, np.float32)),
        ("versions", np.zeros(1, np.int32)),
        ("sampling_mask", SamplingMasks.empty(5)),
        ("routes", np.zeros((5, 3, 2), np.int16)),
    ],
)
def test_recordings_of_a_wrong_length_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        segment(**{name: value})


def test_seeds_differ_and_are_reproducible() -> None:
    seeds = {
        sibling_seed(seed, name, version, draw, sibling)
        for seed in (0, 1)
        for name in ("p1", "p11")
        for version in (0, 1)
        for draw in (0, 1)
        for sibling in range(8)
    }
    assert len(seeds) == 128 and all(0 <= seed < 2**63 for seed in seeds)
    assert sibling_seed(0, "p1", 1, 0, 2) == sibling_seed(0, "p1", 1, 0, 2)


def test_special_thinking_marks_are_decoded() -> None:
    tokenizer: Any = tokenizer_of("qwen3")
    ids = tokenizer.encode("<think>\nno, 4\n</think>\n\nIt is 4", add_special_tokens=False)
    ids.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    (plain,) = decode_all(tokenizer, [ids])
    marked = copy.deepcopy(tokenizer)
    marked.add_tokens([AddedToken(m, special=True) for m in ("<think>", "</think>")], True)
    assert "think" not in marked.decode(ids, skip_special_tokens=True)
    assert decode_all(marked, [ids]) == [plain]
    assert split_message(plain, thinking=False)["content"] == "It is 4"


def test_hidden_developer_messages_are_refused() -> None:
    messages = ({"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    request = prompt(messages=messages)
    assert render_prompt(tokenizer_of("chatml"), request).token_ids
    assert TemplateChat(tokenizer_of("chatml")).opening(messages, (), thinking=False)
    with pytest.raises(ValueError, match="developer"):
        render_prompt(tokenizer_of("qwen3"), request)
    with pytest.raises(ValueError, match="developer"):
        TemplateChat(tokenizer_of("qwen3")).opening(messages, (), thinking=False)
