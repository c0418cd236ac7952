"""Records an agent program's requests as turns that extend recorded ids, and as segments.

A request is looked up by its messages up to the policy's last turn. If they match a recorded turn,
`Chat.extend` extends its ids, so nothing that was sampled is tokenized again. If another request
has extended that turn already, a new segment begins with the same ids. Otherwise a new segment
begins with a render of the messages. Either way, each sampled token is trained in the segment that
it was sampled in, and in no other.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from keel.agents.budget import CHARACTERS_PER_TOKEN, Budget, with_lost_turn, with_turn
from keel.agents.conversation import SegmentRecord, common_prefix
from keel.agents.endpoint.replies import Reply, client_message
from keel.agents.endpoint.requests import ApiError, ChatRequest, budget_spent
from keel.agents.endpoint.turn_index import MessageLog, Turn, TurnIndex, key_of_tools, prefix_keys
from keel.agents.schemas import arguments_of
from keel.rl.turns import Chat, Malformed, Message, Parsed, TurnRequest, TurnResult
from keel.rl.types import Dialogue, FinishReason, Segment, Usage

_TURN_S = 600.0
"""Seconds for a turn, the default timeout of OpenAI's clients."""
_CANCEL_S = 10.0
"""Seconds to wait at the end for cancelled turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Number of requests by outcome."""

    requests: int = 0
    """Well-formed requests for a turn."""
    extended: int = 0
    """Turns that extended the ids of a segment."""
    branched: int = 0
    """Turns in a new segment, from recorded ids that another turn had extended before."""
    rendered: int = 0
    """Turns in a new segment, from a render of the messages; includes the first turn."""
    repeated: int = 0
    """Answers sent again to a client that never received them."""
    refused: int = 0
    """Requests that got an error for a limit or an invalid field."""
    failed: int = 0
    """Requests that got an error because the engine or the endpoint failed or was too busy."""
    cancelled: int = 0
    """Turns whose client disconnected while they were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A recorded trajectory."""

    segments: tuple[Segment, ...]
    opening: tuple[Message, ...]
    """Messages of the first turn's request."""
    messages: tuple[Message, ...]
    """All later messages of all conversations, in the order of the turns."""
    dialogues: tuple[Dialogue, ...]
    """The same messages by conversation, with the tools they were sampled under."""
    usage: Usage
    finish_reason: FinishReason
    """`stop`, or the limit that cut or refused the last turn."""
    counts: RequestCounts
    failure: str = ""
    """Why an engine or the endpoint itself could not answer a request; "" if none failed."""
    refusal: str = ""
    """Why the last refused request was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Place where a turn will be recorded."""

    record: SegmentRecord
    extends: bool
    """False if the turn begins the record."""
    context_T: NDArray[np.int32]
    repeated: int
    """Number of leading ids that some record has already."""
    draws: set[int]
    """Numbers of the draws from this context that are in flight or answered."""
    draw: int
    """First free number."""
    seed: int


@dataclass(slots=True, eq=False)
class _Branch:
    """Requests with the same messages before the policy's first turn. Times are event numbers: each
    start and each end of a request takes the next one."""

    first: int
    """Time of its first request, or of the request that restarted it: a sub-agent may get the same
    task again."""
    concurrent: bool
    """Other requests were in flight when it was new."""
    latest: int = -1
    """Time when a request of it last started or ended."""
    ended: FinishReason = "stop"
    """Limit that cut its last turn or refused its last request, or `stop`."""
    ended_at: int = -1
    by_client: bool = False
    """The client's own `max_tokens` cut it."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request in flight. Its handler sets how it ended."""

    ended: FinishReason | None = None
    """None: the request got no turn, and changes nothing."""
    by_client: bool = False


class FinishReasons:
    """Decides how a trajectory ended, given that a program may hold several conversations.

    An ending holds until a later turn supersedes it: a turn of the same conversation; or one that
    started while no other was in flight, of a conversation without a request since the ended one
    started (it waited for it, as for a sub-agent, or is new). Concurrent conversations never
    supersede each other.

    A turn that a client itself cut short, for a title say, counts less: in a conversation that
    started concurrently it is no ending, and elsewhere it holds until the first of all
    conversations continues.
    """

    def __init__(self) -> None:
        self._branches: dict[str, _Branch] = {}
        self._time = 0
        self._in_flight = 0

    @property
    def last(self) -> FinishReason:
        """The last ending that holds; `stop` without any."""
        cut = [one for one in self._branches.values() if one.ended != "stop"]
        return max(cut, key=lambda one: one.ended_at).ended if cut else "stop"

    @contextmanager
    def request(self, opening: str, *, restarts: bool) -> Generator[_InFlight]:
        """Track a request from its start to its end. opening: key of its conversation. restarts: it
        has no turn of the policy yet."""
        started, branches = self._tick(), self._branches
        branch = branches.setdefault(
            opening, _Branch(first=started, concurrent=self._in_flight > 0)
        )
        if restarts:
            branch.first = started
        waited: Iterable[_Branch] = () if self._in_flight else branches.values()
        superseded = [branch, *(one for one in waited if one.first > branch.latest)]
        if branch is next(iter(branches.values())):
            superseded += [one for one in branches.values() if one.by_client]
        branch.latest = started
        self._in_flight += 1
        request = _InFlight()
        try:
            yield request
        finally:
            self._in_flight -= 1
            branch.latest = now = self._tick()
            if request.ended is not None:
                for one in superseded:
                    if one.ended_at < started:
                        one.ended = "stop"
                if request.ended != "stop" and not (request.by_client and branch.concurrent):
                    branch.ended, branch.ended_at = request.ended, now
                    branch.by_client = request.by_client

    def _tick(self) -> int:
        self._time += 1
        return self._time


class TrajectoryRecorder:
    """Records one trajectory, on one event loop, with any number of requests at once.

    name: unique in the run. sample: samples one turn of the policy. seed: the trajectory's, from
    which each turn's is derived. turn_s: seconds for a turn and its wait for an engine; after that
    the client gets 503.
    """

    def __init__(
        self,
        *,
        name: str,
        prompt_id: str,
        chat: Chat,
        sample: Callable[[TurnRequest], Awaitable[TurnResult]],
        thinking: bool,
        seed: int,
        budget: Budget,
        turn_s: float = _TURN_S,
    ) -> None:
        if not 0 < turn_s < inf:
            raise ValueError(f"endpoint: turn_s = {turn_s} must be positive and finite")
        self.name = name
        self.counts = RequestCounts()
        self._prompt_id, self._chat, self._sample = prompt_id, chat, sample
        self._thinking, self._seed = thinking, seed
        self._budget, self._turn_s = budget, turn_s
        self._records: list[SegmentRecord] = []
        self._turns = TurnIndex(chat, thinking=thinking)
        self._checked_tools = {key_of_tools(())}
        self._draws: dict[str, set[int]] = {}
        """Numbers of the draws from each context: all differ, and so do their seeds."""
        self._unanswered: Counter[str] = Counter()
        """Tries that failed or were cancelled, by the key of the request."""
        self._growing: set[SegmentRecord] = set()
        self._sampling: dict[asyncio.Future[TurnResult], int] = {}
        """Turns being sampled, and the tokens reserved for each."""
        self._changed = asyncio.Event()
        self._log = MessageLog()
        self._usage = Usage(turns=0)
        self._finish_reasons = FinishReasons()
        self._timed_out = False
        self.refusal = ""
        """Why the last refused request was refused."""
        self.over = False
        """The environment has ended the task, so there are no more turns."""
        self.failure = ""
        """Why the endpoint or an engine could not answer the last request that failed so."""
        self._closed = False
        self._idle_since: float | None = None
        """When the program's own time began. None while turns are sampled and before the first."""
        self.begun = asyncio.Event()
        """Set when the first turn is sampled."""

    async def turn(self, request: ChatRequest) -> Reply:
        """Answer a request. Raises ApiError. Cancellation leaves no trace."""
        self._count("requests")
        tools_key = key_of_tools(request.tools)
        keys = prefix_keys(request.messages)
        request_key = f"{keys[-1]} {tools_key} {request.may_call} {request.max_tokens}"
        roles = [message["role"] for message in request.messages]
        opening = roles.index("assistant") if "assistant" in roles else len(roles)
        restarts = opening == len(roles)
        with self._finish_reasons.request(keys[opening], restarts=restarts) as in_flight:
            try:
                reply = await self._turn(request, keys, tools_key, request_key)
                in_flight.ended = reply.ended
                limit = request.max_tokens or inf
                in_flight.by_client = limit <= reply.completion_tokens < self._budget.turn_tokens
                return reply
            except ApiError as error:
                in_flight.ended = error.limit
                self._unanswered[request_key] += error.status >= 500
                self.record_error(error)
                raise
            except asyncio.CancelledError:
                self._count("cancelled")
                self._unanswered[request_key] += 1
                raise

    def record_error(self, error: ApiError) -> None:
        """Count a request that got an error, and keep the reason for the trajectory's report."""
        if error.is_internal:
            self.failure = error.message
            self._count("failed")
        else:
            self.refusal = error.message
            self._count("refused")

    def mark_lost(self, reply: Reply) -> None:
        """Keep a reply whose client disconnected, for its next request."""
        self._turns.mark_lost(reply)

    async def overdue(self, open_s: float) -> str:
        """Wait until the program's time is up, and return what took too long: its first request
        (`open_s`), or all its turns and its own time between them (`Budget.timeout_s`)."""
        if self._budget.timeout_s == inf:
            raise ValueError("endpoint: timeout_s must be finite: every wait has a deadline")
        began = monotonic()
        while True:
            if self._idle_since is not None:
                limit_s, action = self._budget.timeout_s, "end"
                remaining_s = self._budget.remaining_s(self._with_idle())
            else:
                limit_s, action = open_s, "ask for a turn"
                remaining_s = began + open_s - monotonic()
            if self._sampling:  # turns have their own deadline
                remaining_s = inf
            if remaining_s <= 0:
                self._timed_out = self._timed_out or self._idle_since is not None
                return f"did not {action} within {limit_s:g} s"
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining_s if remaining_s < inf else None):
                    await self._changed.wait()

    async def finish(self) -> Finished:
        """Cancel the turns being sampled, and close. Safe to call more than once."""
        self._usage, self._idle_since = self._with_idle(), None
        self._closed = True
        self._changed.set()
        for task in (pending := list(self._sampling)):
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_CANCEL_S)
        segments = (record.segment() for record in self._records)
        return Finished(
            segments=tuple(segment for segment in segments if segment is not None),
            opening=self._log.opening,
            messages=self._log.after_opening,
            dialogues=self._log.dialogues,
            usage=replace(
                self._usage,
                contexts_extended=self.counts.extended,
                contexts_branched=self.counts.branched,
                contexts_rendered=self.counts.rendered,
                contexts_refused=self.counts.refused,
            ),
            finish_reason="deadline" if self._timed_out else self._finish_reasons.last,
            counts=self.counts,
            failure=self.failure,
            refusal=self.refusal,
        )

    async def _turn(
        self, request: ChatRequest, keys: Sequence[str], tools_key: str, request_key: str
    ) -> Reply:
        self._check_open()
        if request.is_retry and self._unanswered[request_key] > 0:
            self._unanswered[request_key] -= 1  # the retried request never got an answer
        elif lost := self._turns.find_lost(request_key, request):
            self._count("repeated")
            lost.resent = True
            return lost.reply
        if (characters := request.characters) > self._budget.characters:
            tokens = max(characters // CHARACTERS_PER_TOKEN, self._budget.window)
            raise budget_spent(self._budget, "window", tokens)
        if tools_key not in self._checked_tools:
            await request.check_tools()
            self._checked_tools.add(tools_key)
        before, ids = self._turns.find_context(request, keys, tools_key, self._growing)
        limit = await self._admit(len(ids), request.max_tokens)
        # No await between here and the sampling, so a free slot stays free.
        slot = self._slot(before, ids)
        result = await self._grow(slot, limit)
        if before is not None:
            before.extended = True
        self._count("extended" if slot.extends else "branched" if before else "rendered")
        parsed = self._chat.parse(
            result.token_ids_N.tolist(),
            request.tools,
            thinking=self._thinking,
            turn=self._usage.turns,
            inside=before is not None and before.in_thinking,
        )
        full = result.finish_reason == "length" and len(slot.record.ids) >= self._budget.window
        ended: FinishReason = "window" if full else result.finish_reason
        may_call = request.may_call and parsed.closed
        reply = Reply(
            reply_id=f"chatcmpl-{secrets.token_hex(12)}",
            message=client_message(parsed, cut=ended != "stop", may_call=may_call),
            ended=ended,
            prompt_tokens=len(slot.context_T),
            completion_tokens=len(result.token_ids_N),
            cached_tokens=result.cached_tokens,
        )
        turn = Turn(
            record=slot.record,
            end=len(slot.record.ids),
            tools=request.tools,
            tools_key=tools_key,
            request_key=request_key,
            reply=reply,
            in_thinking=parsed.inside,
        )
        self._log.add(
            self._turns.as_recorded(request.messages, keys),
            keys,
            reply.message,
            tools=request.tools,
            tools_key=tools_key,
            verbatim=len(reply.message.get("tool_calls", ())) == len(parsed.calls),
        )
        self._turns.add(turn, keys[-1])
        self._add_usage(turn, parsed, result, slot.repeated)
        return reply

    def _slot(self, before: Turn | None, ids: list[int]) -> _Slot:
        """Choose the end of a record, or a new record if another turn has taken it."""
        record, extends = SegmentRecord(self._prompt_id, ids), False
        if (
            before is not None
            and before.end == len(before.record.ids)
            and before.record not in self._growing
        ):
            record, extends = before.record, True
        context_T = np.array(ids, np.int32)
        context_key = blake2b(context_T.tobytes(), digest_size=16).hexdigest()
        draws = self._draws.setdefault(context_key, set())
        draw = next(n for n in count() if n not in draws)
        # A failed turn frees its draw, so the same seed is used when it is requested again.
        key = f"{self._seed}/{context_key}/{draw}".encode()
        return _Slot(
            record=record,
            extends=extends,
            context_T=context_T,
            repeated=common_prefix(ids, self._records) if before is None else before.end - 1,
            draws=draws,
            draw=draw,
            seed=int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1,
        )

    async def _grow(self, slot: _Slot, limit: int) -> TurnResult:
        """Sample the turn, and append it to the record."""
        record = slot.record
        request = replace(
            record.request(
                self.name,
                max_tokens=limit,
                seed=slot.seed,
                timeout_s=self._budget.remaining_s(self._with_idle()),
                stop_ids=self._chat.stop_ids,
            ),
            token_ids_T=slot.context_T,
        )
        self._growing.add(record)
        try:
            result = await self._sampled(request, slot, limit)
            if not len(result.token_ids_N):
                raise budget_spent(self._budget, "deadline")
            if slot.extends:
                record.extend(slot.context_T.tolist())
            try:
                record.append(request, result)
            except ValueError as error:
                raise _engine_failed(str(error)) from error
            if not slot.extends:
                self._records.append(record)
        finally:
            self._growing.discard(record)
        return result

    async def _admit(self, context: int, max_tokens: int | None) -> int:
        """Wait until a turn after `context` tokens fits the budget, and return its token limit."""
        try:
            async with asyncio.timeout(self._turn_s):
                while True:
                    self._check_open()
                    usage = self._with_idle()
                    sampled = sum(record.sampled_tokens for record in self._records)
                    limit, room = self._budget.room(
                        replace(usage, turns=usage.turns + len(self._sampling)),
                        context=context,
                        sampled=sampled + sum(self._sampling.values()),
                    )
                    if room > 0:
                        return min(room, max_tokens or room)
                    if not self._sampling or limit in ("window", "deadline"):
                        raise budget_spent(self._budget, limit, context)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            message = f"concurrent turns held the whole budget for {self._turn_s:g} s"
            raise _engine_failed(message) from error

    async def _sampled(self, request: TurnRequest, slot: _Slot, limit: int) -> TurnResult:
        """Sample one turn within its time."""
        task = asyncio.ensure_future(self._sample(request))
        self._sampling[task] = limit
        slot.draws.add(slot.draw)
        self._usage, began = self._with_idle(), monotonic()
        self._idle_since = None
        self.begun.set()
        try:
            async with asyncio.timeout(self._turn_s):
                return await task
        except BaseException as error:
            slot.draws.discard(slot.draw)
            if isinstance(error, TimeoutError | asyncio.CancelledError):  # not the engine's failure
                self._usage = with_lost_turn(self._usage, monotonic() - began)
            if isinstance(error, asyncio.CancelledError) and self._closed:
                raise _trajectory_over() from error
            if isinstance(error, TimeoutError):
                message = f"a turn did not end within {self._turn_s:g} s"
                raise _engine_failed(message) from error
            if isinstance(error, Exception):
                raise _engine_failed(f"{type(error).__name__}: {error}") from error
            raise
        finally:
            task.cancel()
            del self._sampling[task]
            self._changed.set()
            if not self._sampling:
                self._idle_since = monotonic()

    def _with_idle(self) -> Usage:
        """Return the usage with the program's own time until now."""
        if self._idle_since is None:
            return self._usage
        spent_s = monotonic() - self._idle_since
        return replace(self._usage, tools_s=self._usage.tools_s + spent_s)

    def _add_usage(self, turn: Turn, parsed: Parsed, result: TurnResult, repeated: int) -> None:
        calls = parsed.calls if turn.reply.message.get("tool_calls") else ()
        malformed = sum(isinstance(call, Malformed) for call in calls)
        invalid = sum(
            not isinstance(call, Malformed) and bool(arguments_of(turn.tools).complaint(call))
            for call in calls
        )
        usage = with_turn(self._usage, result, repeated=repeated)
        self._usage = replace(
            usage,
            calls=usage.calls + len(calls),
            failed_calls=usage.failed_calls + invalid + malformed,
            malformed_calls=usage.malformed_calls + malformed,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise _trajectory_over()
        if self.over:
            raise ApiError(403, "the environment has ended the task", code="task_over")

    def _count(self, name: str) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + 1})


def _trajectory_over() -> ApiError:
    return ApiError(404, "this trajectory is over", code="trajectory_over")


def _engine_failed(reason: str) -> ApiError:
    return ApiError(503, f"the turn could not be sampled: {reason}", code="engine_failed")
