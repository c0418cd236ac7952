"""Tracks how a program's conversations ended: it may hold several, in turn or at once."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from keel.rl.types import FinishReason


@dataclass(slots=True, eq=False)
class _Conversation:
    """Requests with the same messages before the policy's first turn. Times are event numbers:
    each start and each end of a request has the next one."""

    first: int
    """Time of its first request, or of the request that restarted it: a sub-agent may get the same
    task again."""
    concurrent: bool
    """Whether other requests were in flight when it was new."""
    latest: int = -1
    """Time when a request of it last started or ended."""
    ended: FinishReason = "stop"
    """The limit that cut its last turn or refused its last request, or `stop`."""
    at: int = -1
    """Time when it ended."""
    by_client: bool = False
    """Whether the client's own `max_tokens` cut it."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A request in flight. Its handler sets how it ended."""

    ended: FinishReason | None = None
    """None: the request got no turn, and changes nothing."""
    by_client: bool = False
    """Whether the client's own `max_tokens` cut the turn."""


class Endings:
    """Decides how a trajectory ended.

    An ending stands until a later turn supersedes it: a turn of the same conversation; or one that
    started while no other was in flight, of a conversation without a request since the ended one
    started (it waited for it, as for a sub-agent, or is new). Of concurrent conversations none
    supersedes another, whichever is over last.

    A turn that a client itself cut short, for a title say, counts less: in a conversation that
    started concurrently it is no ending, and elsewhere it stands until the first of all
    conversations continues.
    """

    def __init__(self) -> None:
        self._conversations: dict[str, _Conversation] = {}
        self._time = 0
        self._in_flight = 0

    @property
    def last(self) -> FinishReason:
        """The last ending that stands; `stop` without any."""
        cut = [one for one in self._conversations.values() if one.ended != "stop"]
        return max(cut, key=lambda one: one.at).ended if cut else "stop"

    @contextmanager
    def request(self, opening: str, *, restarts: bool) -> Generator[InFlight]:
        """Track a request from its start to its end. opening: key of its conversation. restarts:
        whether it has no turn of the policy yet."""
        started, known = self._next_time(), self._conversations
        fresh = _Conversation(first=started, concurrent=self._in_flight > 0)
        own = known.setdefault(opening, fresh)
        if restarts:
            own.first = started
        waited: Iterable[_Conversation] = () if self._in_flight else known.values()
        before = [own, *(one for one in waited if one.first > own.latest)]
        if own is next(iter(known.values())):
            before += [one for one in known.values() if one.by_client]
        own.latest = started
        self._in_flight += 1
        request = InFlight()
        try:
            yield request
        finally:
            self._in_flight -= 1
            own.latest = now = self._next_time()
            if request.ended is not None:
                for one in before:
                    if one.at < started:
                        one.ended = "stop"
                if request.ended != "stop" and not (request.by_client and own.concurrent):
                    own.ended, own.at, own.by_client = request.ended, now, request.by_client

    def _next_time(self) -> int:
        self._time += 1
        return self._time
