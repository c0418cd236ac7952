"""Thinking marks of a model family, and a turn's thinking split from its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keel.rl.turns import THINK, ThinkingMarks

HARMONY = ThinkingMarks("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
"""gpt-oss. Its turns are several messages, which `keel.rollout.chat.parsing.read_harmony` reads."""
HARMONY_CONTROLS = "<|start|> <|channel|> <|constrain|> <|message|> <|end|> <|call|> <|return|>"
FAMILIES = (
    HARMONY,
    ThinkingMarks("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThinkingMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A, Command R7B
    ThinkingMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    THINK,  # last: templates with marks of their own mention these too
)


def marks_of(tokenizer: Any, named: Sequence[str] = ()) -> ThinkingMarks | None:
    """Return the thinking marks of a tokenizer's family.

    They are those that the recipe names (`model.thinking_marks`: open, close), else the pair that
    the chat template writes, else the pair among the added tokens. None: the family is unknown, and
    `THINK` is as good as any.
    """
    if named:
        return ThinkingMarks(*named)
    template, added = str(tokenizer.chat_template or ""), tokenizer.get_added_vocab()
    if "<|channel|>" in added and "<|message|>" in added:
        return HARMONY
    for marks in FAMILIES:
        if marks.close in template:
            return marks
    return next((m for m in FAMILIES if m.open in added and m.close in added), None)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How a family's calls begin and end. Thinking marks inside a call are ordinary text."""

    start: str = ""
    """A pattern. Empty: the family has no calls."""
    end: str = ""
    """Empty: a call extends to the turn's end."""
    whole: re.Pattern[str] | None = None
    """The beginning of a turn, or of what follows its thinking, that consists of calls alone."""


NO_CALLS = Bounds()


def split_thinking(
    text: str,
    bounds: Bounds = NO_CALLS,
    *,
    opened: bool,
    inside: bool = False,
    marks: ThinkingMarks = THINK,
) -> tuple[str, str, bool]:
    """Split a turn into (reasoning, content, whether it ends inside its thinking).

    A turn whose thinking is never closed has no content; text before a closing mark that nothing
    opened is reasoning. opened: the prompt or an earlier turn has opened the thinking. inside: the
    thinking may contain calls.
    """
    walk = _Walk(text, bounds, marks, inside=inside)
    thinks = opened and not text.lstrip().startswith(marks.open)
    thinks = thinks or walk.begins_thinking()
    place, thoughts, answer = 0, list[str](), list[str]()
    while True:
        mark = walk.next_end(place) if thinks else walk.next_begin(place, answer)
        part = text[place : mark.start() if mark else None]
        (thoughts if thinks else answer).append(part)
        if mark is None:
            break
        place, thinks = mark.end(), not thinks
    if thinks:
        return "\n".join([*answer, *thoughts]).strip(), "", True
    return "\n".join(part.strip() for part in thoughts), "".join(answer), False


class _Walk:
    """Finds a turn's thinking marks one after the other, each of them once."""

    def __init__(self, text: str, bounds: Bounds, marks: ThinkingMarks, *, inside: bool) -> None:
        self._text, self._bounds, self._marks = text, bounds, marks
        begin, end = re.escape(marks.open), re.escape(marks.close)
        start = f"|{bounds.start}" if bounds.start else ""
        self._begin = re.compile(begin + start, re.MULTILINE)
        self._end = re.compile(end + start * inside, re.MULTILINE)
        self._any = re.compile(f"{begin}|{end}{start}", re.MULTILINE)
        either = f"{bounds.start}|{re.escape(bounds.end)}" if bounds.end else ""
        self._either = re.compile(either, re.MULTILINE) if either else None

    def begins_thinking(self) -> bool:
        """Return whether a closing mark comes before any opening one."""
        place = 0
        if self._all_calls(0):
            return False
        while mark := self._any.search(self._text, place):
            if mark[0] in (self._marks.open, self._marks.close):
                return mark[0] == self._marks.close
            if not self._bounds.end:
                return False
            place = self._behind_closed(mark)
        return False

    def next_begin(self, place: int, answer: Sequence[str]) -> re.Match[str] | None:
        """Find the next opening mark outside all calls. answer: the parts before `place` that are
        not thinking."""
        if not any(map(str.strip, answer[-1:])) and self._all_calls(place):
            return None
        while mark := self._begin.search(self._text, place):
            if mark[0] == self._marks.open:
                return mark
            place = self._behind(mark)
        return None

    def next_end(self, place: int) -> re.Match[str] | None:
        """Find the next closing mark outside all closed calls."""
        while mark := self._end.search(self._text, place):
            if mark[0] == self._marks.close:
                return mark
            place = self._behind_closed(mark)
        return None

    def _behind_closed(self, call: re.Match[str]) -> int:
        """Return the end of a call. One that is not closed before the next begins is a mere
        mention, and ends with its start mark."""
        following = self._either.search(self._text, call.end()) if self._either else None
        closed = following is not None and following[0] == self._bounds.end
        return following.end() if following is not None and closed else call.end()

    def _behind(self, call: re.Match[str]) -> int:
        end = self._bounds.end
        stop = self._text.find(end, call.end()) if end else -1
        return len(self._text) if stop < 0 else stop + len(end)

    def _all_calls(self, place: int) -> bool:
        whole = self._bounds.whole
        return whole is not None and whole.match(self._text, place) is not None
