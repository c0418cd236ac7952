"""Tests how a family's thinking marks are handled, from the tokenizer to the rewards."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from keel.rewards.rules.verifiers import keeps_format
from keel.rewards.text import answer_in, final_text, raw_text, thinking_text
from keel.rl.turns import THINK, ThinkingMarks
from keel.rollout.chat.thinking import marks_of
from keel.rollout.engine.conversion import decode_all, render_prompt, split_message
from tests.rl.rollouts import prompt
from tests.rollout.chat.families import chat_of, tokenizer_of

HARMONY = "<|channel|>{}<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
# Name: opening mark, closing mark, end of the turn.
MARKS = {
    "qwen3": ("<think>", "</think>", "<|im_end|>"),
    "seed": ("<seed:think>", "</seed:think>", "<seed:eos>"),
    # The prompt has opened the thinking.
    "command": ("", "<|END_THINKING|><|START_RESPONSE|>", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "harmony": (HARMONY.format("analysis"), FINAL, "<|return|>"),
}
LITERALS = {name: "</think>" for name in MARKS if name != "qwen3"}
"""Maps each family to a mark of other families, which must be treated as ordinary text."""


def completed(name: str, text: str) -> dict[str, Any]:
    """Return the message that the engine builds from a single-turn completion."""
    tokenizer = tokenizer_of(name)
    marks = marks_of(tokenizer)
    assert marks is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    (raw,) = decode_all(tokenizer, [ids], marks)
    return split_message(raw, thinking=render_prompt(tokenizer, prompt(), marks).thinking)


def in_a_conversation(name: str, text: str) -> dict[str, Any]:
    """Return the message that is built from the same ids when they are a turn of a conversation."""
    ids = tokenizer_of(name).encode(text, add_special_tokens=False)
    parsed = chat_of(name).parse(ids, (), thinking=True, turn=0)
    message = {"role": "assistant", "content": parsed.content}
    return message | ({"reasoning_content": parsed.reasoning} if parsed.reasoning else {})


@pytest.mark.parametrize("made", [completed, in_a_conversation])
@pytest.mark.parametrize("name", MARKS)
def test_boxes_in_thinking_never_count(name: str, made: Any) -> None:
    opens, closes, end = MARKS[name]
    message = made(name, f"{opens}Is it \\boxed{{7}}?{closes}It is 8.{end}")
    assert (final_text((message,)), thinking_text((message,))) == ("It is 8.", "Is it \\boxed{7}?")
    assert keeps_format(raw_text((message,)), thinking=True, finished=True)
    assert not keeps_format(raw_text((message,)), thinking=False, finished=True)


@pytest.mark.parametrize("made", [completed, in_a_conversation])
@pytest.mark.parametrize("name", MARKS)
def test_a_box_in_unfinished_thinking_never_scores(name: str, made: Any) -> None:
    opens, _, end = MARKS[name]
    for text in ("It is \\boxed{7}", f"It is {LITERALS.get(name, '')} \\boxed{{7}}"):
        message = made(name, f"{opens}{text}{end}")
        assert answer_in(final_text((message,))) == ""
        assert not keeps_format(raw_text((message,)), thinking=True, finished=True)


def test_order_of_mark_sources() -> None:
    assert marks_of(tokenizer_of("seed"), ("<a>", "</a>")) == ThinkingMarks("<a>", "</a>")
    tokenizer = copy.deepcopy(tokenizer_of("seed"))
    tokenizer.chat_template = tokenizer_of("chatml").chat_template
    assert marks_of(tokenizer) == ThinkingMarks("<seed:think>", "</seed:think>")
    tokenizer.chat_template = tokenizer_of("qwen3").chat_template
    assert marks_of(tokenizer) == THINK
    assert marks_of(tokenizer_of("chatml")) is None
