"""Finds the thinking marks of a model family and splits turns into thinking and answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keel.rl.turns import THINK, ThinkingMarks

HARMONY = ThinkingMarks("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
"""Thinking marks of gpt-oss, whose turns consist of several messages
(`keel.rollout.chat.parsing.read_harmony`)."""
HARMONY_CONTROLS = "<|start|> <|channel|> <|constrain|> <|message|> <|end|> <|call|> <|return|>"
_FAMILIES = (
    HARMONY,
    ThinkingMarks("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThinkingMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A, Command R7B
    ThinkingMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    THINK,  # last, because templates with other marks mention these too
)


def marks_of(tokenizer: Any, named: Sequence[str] = ()) -> ThinkingMarks | None:
    """Return the strings that open and close a tokenizer's thinking, or None if they are unknown.
    `named` is the setting `model.thinking_marks` and takes precedence. If it is not set, the marks
    are looked up first in the chat template and then among the added tokens."""
    if named:
        return ThinkingMarks(*named)
    template, added = str(tokenizer.chat_template or ""), tokenizer.get_added_vocab()
    if "<|channel|>" in added and "<|message|>" in added:
        return HARMONY
    for marks in _FAMILIES:
        if marks.close in template:
            return marks
    return next((m for m in _FAMILIES if m.open in added and m.close in added), None)


@dataclass(frozen=True, slots=True)
class CallBounds:
    """Patterns that match the start and end of a model family's tool calls. Thinking marks inside a
    call are ordinary text."""

    start: str = ""
    """Pattern that matches the start of a call. Empty if the family has no calls."""
    end: str = ""
    """Text that ends a call. Empty if a call extends to the end of the turn."""
    whole: re.Pattern[str] | None = None
    """Pattern that matches the start of a text consisting only of calls. The text is either a whole
    turn or what follows the thinking."""


_NO_CALLS = CallBounds()


def split_thinking(
    text: str,
    bounds: CallBounds = _NO_CALLS,
    *,
    opened: bool,
    inside: bool = False,
    marks: ThinkingMarks = THINK,
) -> tuple[str, str, bool]:
    """Split a turn into its reasoning and its content. Returns (reasoning, content, whether the
    turn ends while thinking). If the thinking is never closed, there is no content. If the first
    mark closes thinking, the text before it is reasoning. Set `opened` if the prompt or an earlier
    turn has already opened the thinking, and `inside` if the thinking may contain calls."""
    opening, closing = re.escape(marks.open), re.escape(marks.close)
    call, end = bounds.start or r"(?!)", re.escape(bounds.end)
    # A call that ends before the next one starts, or else only the start of a call.
    closed = rf"{call}(?:(?:(?!{call}|{end}).)*+{end})?" if end else call
    to_end = rf"{call}(?:.*?{end}|.*)" if end else f"{call}.*"

    def first(pattern: str, position: int) -> re.Match[str] | None:
        matches = re.compile(pattern, re.MULTILINE | re.DOTALL).finditer(text, position)
        return next((m for m in matches if m[0] in (marks.open, marks.close)), None)

    def only_calls(position: int) -> bool:
        return bounds.whole is not None and bounds.whole.match(text, position) is not None

    thinks = opened and not text.lstrip().startswith(marks.open)
    if not thinks and not only_calls(0):
        mark = first(f"{opening}|{closing}|{closed if end else to_end}", 0)
        thinks = mark is not None and mark[0] == marks.close
    position, thoughts, answer = 0, list[str](), list[str]()
    while True:
        if thinks:
            mark = first(f"{closing}|{closed}" if inside else closing, position)
        elif only_calls(position) and not any(map(str.strip, answer[-1:])):
            mark = None
        else:
            mark = first(f"{opening}|{to_end}", position)
        part = text[position : mark.start() if mark else None]
        (thoughts if thinks else answer).append(part)
        if mark is None:
            break
        position, thinks = mark.end(), not thinks
    if thinks:
        return "\n".join([*answer, *thoughts]).strip(), "", True
    return "\n".join(part.strip() for part in thoughts), "".join(answer), False
