"""How the conversations of a program ended: it may hold several, one after the other or at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from keel.rl.types import FinishReason


@dataclass(slots=True, eq=False)
class _Conversation:
    """Requests with the same messages before the policy's first turn. Times are counted, not
    measured: each beginning and each end of a request is a later one."""

    first: int
    """When its first request began."""
    latest: int = -1
    """When a request of it last began or ended."""
    ended: FinishReason = "stop"
    """What cut its last turn, or refused its last request."""
    at: int = -1
    """When it did."""


@dataclass(slots=True, eq=False)
class UnderWay:
    """A request, which says how it ended."""

    ended: FinishReason | None = None
    """None: it never got so far, and all is as it was before."""


class Endings:
    """An ending stands until a turn comes after it: one of the same conversation; or one that began
    while no other was under way, of a conversation that had asked for nothing since the ended one
    began (it has waited for it, as for a sub-agent, or is new). Of conversations that go on at once
    none comes after another, whichever is over last."""

    def __init__(self) -> None:
        self._conversations: dict[str, _Conversation] = {}
        self._time = 0
        self._under_way = 0

    @property
    def last(self) -> FinishReason:
        """Of the endings that stand, the last; `stop` where there is none."""
        cut = [one for one in self._conversations.values() if one.ended != "stop"]
        return max(cut, key=lambda one: one.at).ended if cut else "stop"

    @contextmanager
    def request(self, opening: str) -> Iterator[UnderWay]:
        """One, from its beginning to its end. opening: what its conversation is known by."""
        began = self._now()
        own = self._conversations.setdefault(opening, _Conversation(first=began))
        waited = [] if self._under_way else self._conversations.values()
        before = [own, *(one for one in waited if one.first > own.latest)]
        own.latest = began
        self._under_way += 1
        request = UnderWay()
        try:
            yield request
        finally:
            self._under_way -= 1
            own.latest = now = self._now()
            if request.ended is not None:
                for one in before:
                    if one.at < began:
                        one.ended = "stop"
                if request.ended != "stop":
                    own.ended, own.at = request.ended, now

    def _now(self) -> int:
        self._time += 1
        return self._time
