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
    are looked up first in the chat template and then among the added tokens.
    """
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
    """Patterns that match the start and end of a model family's tool calls.

    Thinking marks inside a call are ordinary text.
    """

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
    """Split a turn into its reasoning and its content.

    Returns (reasoning, content, whether the turn ends while thinking). If the thinking is never
    closed, there is no content. If the first mark closes thinking, the text before it is reasoning.
    Set `opened` if the prompt or an earlier turn has already opened the thinking, and `inside` if
    the thinking may contain calls.
    """
    scanner = _Scanner(text, bounds, marks, inside=inside)
    thinks = opened and not text.lstrip().startswith(marks.open)
    thinks = thinks or scanner.starts_in_thinking()
    position, thoughts, answer = 0, list[str](), list[str]()
    while True:
        mark = scanner.next_close(position) if thinks else scanner.next_open(position, answer)
        part = text[position : mark.start() if mark else None]
        (thoughts if thinks else answer).append(part)
        if mark is None:
            break
        position, thinks = mark.end(), not thinks
    if thinks:
        return "\n".join([*answer, *thoughts]).strip(), "", True
    return "\n".join(part.strip() for part in thoughts), "".join(answer), False


class _Scanner:
    """Finds the thinking marks of a turn in one pass, skipping marks inside calls."""

    def __init__(
        self, text: str, bounds: CallBounds, marks: ThinkingMarks, *, inside: bool
    ) -> None:
        self._text, self._bounds, self._marks = text, bounds, marks
        opening, closing = re.escape(marks.open), re.escape(marks.close)
        start = f"|{bounds.start}" if bounds.start else ""
        self._open = re.compile(opening + start, re.MULTILINE)
        self._close = re.compile(closing + start * inside, re.MULTILINE)
        self._any = re.compile(f"{opening}|{closing}{start}", re.MULTILINE)
        either = f"{bounds.start}|{re.escape(bounds.end)}" if bounds.end else ""
        self._call_edge = re.compile(either, re.MULTILINE) if either else None

    def starts_in_thinking(self) -> bool:
        position = 0
        if self._all_calls(0):
            return False
        while mark := self._any.search(self._text, position):
            if mark[0] in (self._marks.open, self._marks.close):
                return mark[0] == self._marks.close
            if not self._bounds.end:
                return False
            position = self._after_closed(mark)
        return False

    def next_open(self, position: int, answer: Sequence[str]) -> re.Match[str] | None:
        if not any(map(str.strip, answer[-1:])) and self._all_calls(position):
            return None
        while mark := self._open.search(self._text, position):
            if mark[0] == self._marks.open:
                return mark
            end = self._bounds.end
            stop = self._text.find(end, mark.end()) if end else -1
            position = len(self._text) if stop < 0 else stop + len(end)
        return None

    def next_close(self, position: int) -> re.Match[str] | None:
        while mark := self._close.search(self._text, position):
            if mark[0] == self._marks.close:
                return mark
            position = self._after_closed(mark)
        return None

    def _after_closed(self, call: re.Match[str]) -> int:
        """Return the position after a call. If the next call starts before this one is closed, only
        its opening is skipped."""
        following = self._call_edge.search(self._text, call.end()) if self._call_edge else None
        if following is not None and following[0] == self._bounds.end:
            return following.end()
        return call.end()

    def _all_calls(self, position: int) -> bool:
        whole = self._bounds.whole
        return whole is not None and whole.match(self._text, position) is not None
