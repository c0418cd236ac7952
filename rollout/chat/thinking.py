"""A turn's thinking, told apart from the rest of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

THINK_START = "<think>"
THINK_END = "</think>"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a family's calls. Within one, thinking marks are words like any others."""

    start: str = ""
    """A pattern. Empty: the family has no calls."""
    end: str = ""
    """Empty: a call goes to the turn's end."""
    whole: re.Pattern[str] | None = None
    """How a turn, or what comes after its thinking, begins that is nothing but calls."""


NO_CALLS = Bounds()


def split_thinking(
    text: str, bounds: Bounds = NO_CALLS, *, opened: bool, inside: bool = False
) -> tuple[str, str, bool]:
    """(reasoning, content, whether the turn ends thinking). Thinking that is never closed leaves no
    content; text before a `</think>` that nothing opened is thinking, too. opened: by the prompt or
    an earlier turn. inside: there are calls in the thinking."""
    walk = _Walk(text, bounds, inside=inside)
    thinks = opened and not text.lstrip().startswith(THINK_START)
    thinks = thinks or walk.begins_thinking()
    place, thoughts, said = 0, list[str](), list[str]()
    while True:
        mark = walk.next_end(place) if thinks else walk.next_begin(place, said)
        part = text[place : mark.start() if mark else None]
        (thoughts if thinks else said).append(part)
        if mark is None:
            break
        place, thinks = mark.end(), not thinks
    if thinks:
        return "\n".join([*said, *thoughts]).strip(), "", True
    return "\n".join(part.strip() for part in thoughts), "".join(said), False


def thinking_open(text: str) -> bool:
    """Whether a rendered conversation, or a part of one, ends inside a turn's thinking."""
    return text.rfind(THINK_START) > text.rfind(THINK_END)


class _Walk:
    """Over the marks of a turn, none of them twice."""

    def __init__(self, text: str, bounds: Bounds, *, inside: bool) -> None:
        self._text, self._bounds = text, bounds
        start = f"|{bounds.start}" if bounds.start else ""
        self._begin = re.compile(THINK_START + start, re.MULTILINE)
        self._end = re.compile(THINK_END + start * inside, re.MULTILINE)
        self._any = re.compile(f"{THINK_START}|{THINK_END}{start}", re.MULTILINE)
        either = f"{bounds.start}|{re.escape(bounds.end)}" if bounds.end else ""
        self._either = re.compile(either, re.MULTILINE) if either else None

    def begins_thinking(self) -> bool:
        """Whether there is an end before any beginning."""
        place = 0
        if self._all_calls(0):
            return False
        while mark := self._any.search(self._text, place):
            if mark[0] in (THINK_START, THINK_END):
                return mark[0] == THINK_END
            if not self._bounds.end:
                return False
            place = self._behind_closed(mark)
        return False

    def next_begin(self, place: int, said: Sequence[str]) -> re.Match[str] | None:
        """Of thinking, outside of all calls; said: what stands before, outside of thinking."""
        if not any(map(str.strip, said[-1:])) and self._all_calls(place):
            return None
        while mark := self._begin.search(self._text, place):
            if mark[0] == THINK_START:
                return mark
            place = self._behind(mark)
        return None

    def next_end(self, place: int) -> re.Match[str] | None:
        """Of thinking, outside of all calls that are closed."""
        while mark := self._end.search(self._text, place):
            if mark[0] == THINK_END:
                return mark
            place = self._behind_closed(mark)
        return None

    def _behind_closed(self, call: re.Match[str]) -> int:
        """One that is not closed, before the next begins, is a mere mention."""
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
