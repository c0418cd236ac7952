"""How the conversations of a program ended: it may hold several, one after the other or at once."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from keel.rl.types import FinishReason


@dataclass(slots=True, eq=False)
class _Conversation:
    """Requests with the same messages before the policy's first turn. Times are counted, not
    measured: each beginning and each end of a request is a later one."""

    first: int
    """When its first request began, or that with which it was begun anew: a sub-agent may be asked
    the same again."""
    aside: bool
    """Whether others were under way then, when it was new."""
    latest: int = -1
    """When a request of it last began or ended."""
    ended: FinishReason = "stop"
    """What cut its last turn, or refused its last request."""
    at: int = -1
    """When it did."""
    wanted: bool = False
    """Whether the client had wanted no more."""


@dataclass(slots=True, eq=False)
class UnderWay:
    """A request, which says how it ended."""

    ended: FinishReason | None = None
    """None: it never got so far, and all is as it was before."""
    wanted: bool = False
    """Whether what cut it is the client's own `max_tokens`."""


class Endings:
    """An ending stands until a turn comes after it: one of the same conversation; or one that began
    while no other was under way, of a conversation that had asked for nothing since the ended one
    began (it has waited for it, as for a sub-agent, or is new). Of conversations that go on at once
    none comes after another, whichever is over last.

    A turn that a client itself wanted short, for a title say, is less: in a conversation that began
    beside another it is no ending, and elsewhere it stands until the first of all conversations
    goes on."""

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
    def request(self, opening: str, *, anew: bool) -> Generator[UnderWay]:
        """One, from its beginning to its end. opening: what its conversation is known by. anew:
        nothing has been said in it yet."""
        began, known = self._now(), self._conversations
        fresh = _Conversation(first=began, aside=self._under_way > 0)
        own = known.setdefault(opening, fresh)
        if anew:
            own.first = began
        waited: Iterable[_Conversation] = () if self._under_way else known.values()
        before = [own, *(one for one in waited if one.first > own.latest)]
        if own is next(iter(known.values())):
            before += [one for one in known.values() if one.wanted]
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
                if request.ended != "stop" and not (request.wanted and own.aside):
                    own.ended, own.at, own.wanted = request.ended, now, request.wanted

    def _now(self) -> int:
        self._time += 1
        return self._time
