"""Records the requests of an agent program as segments for training.

The recorder compares the messages of each request with the turns that it has recorded. If the
request continues a recorded turn, the turn's token ids are extended with `Chat.extend`, so sampled
text is never tokenized again. If another request has already extended that turn, a new segment
begins with the same ids. If no recorded turn matches, a new segment begins with the rendered
messages. In all cases, each sampled token is trained only in the segment in which it was sampled.
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
"""Time limit for a turn in seconds, which is the default timeout of OpenAI's clients."""
_CANCEL_S = 10.0
"""Seconds to wait for cancelled turns when the trajectory is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """How many requests had each outcome."""

    requests: int = 0
    """Well-formed requests for a turn."""
    extended: int = 0
    """Turns that continued a segment."""
    branched: int = 0
    """Turns that began a new segment with recorded ids, because another turn had already extended
    them."""
    rendered: int = 0
    """Turns that began a new segment with rendered messages, including the first turn."""
    repeated: int = 0
    """Answers that were sent again because the client had not received them."""
    refused: int = 0
    """Requests that were refused because of a limit or an invalid field."""
    failed: int = 0
    """Requests that failed because the engine or the endpoint failed or was too busy."""
    cancelled: int = 0
    """Turns that were cancelled because their client disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A recorded trajectory."""

    segments: tuple[Segment, ...]
    opening: tuple[Message, ...]
    """The messages of the request for the first turn."""
    messages: tuple[Message, ...]
    """All later messages from all conversations, in the order of the turns."""
    dialogues: tuple[Dialogue, ...]
    """The same messages, grouped by conversation, with the tools that each conversation had."""
    usage: Usage
    finish_reason: FinishReason
    """`stop`, or the limit that cut or refused the last turn."""
    counts: RequestCounts
    failure: str = ""
    """Why an engine or the endpoint failed to answer a request, or "" if none failed."""
    refusal: str = ""
    """Why the last refused request was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where a turn will be recorded, and how it is sampled."""

    record: SegmentRecord
    extends: bool
    """True if the turn extends an existing record, False if it begins a new one."""
    context_T: NDArray[np.int32]
    repeated: int
    """How many of the context's first ids are already in some record."""
    draws: set[int]
    """Numbers of the samples from this context that are in flight or complete."""
    draw: int
    """The number of this sample, which is the first free one."""
    seed: int


@dataclass(slots=True, eq=False)
class _Branch:
    """All requests that have the same messages before the policy's first turn.

    Times are event numbers. Every start and every end of a request takes the next number.
    """

    first: int
    """When the branch began. It begins again with a new request without turns, such as when a
    sub-agent gets the same task twice."""
    concurrent: bool
    """True if other requests were in flight when the branch began."""
    latest: int = -1
    """When one of the branch's requests last started or ended."""
    ended: FinishReason = "stop"
    """The limit that cut its last turn or refused its last request, or `stop`."""
    ended_at: int = -1
    by_client: bool = False
    """True if the last turn was cut by the client's own `max_tokens`."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request in flight. The code that handles it records how it ended."""

    ended: FinishReason | None = None
    """How the request ended. None means that it got no turn and is ignored."""
    by_client: bool = False


class FinishReasons:
    """Decides how a trajectory ended, given that a program may run several conversations.

    The way a conversation ended holds until a later turn supersedes it. A turn of the same
    conversation does so. A turn of another conversation does so only if no other request was in
    flight when it started, and if its conversation is new or has been waiting for the one that
    ended, as for a sub-agent. Concurrent conversations never supersede each other.

    A turn that the client itself cut short, for example to get a title, counts less. It is ignored
    in a conversation that started concurrently with others. Otherwise it holds until the first
    conversation continues.
    """

    def __init__(self) -> None:
        self._branches: dict[str, _Branch] = {}
        self._time = 0
        self._in_flight = 0

    @property
    def last(self) -> FinishReason:
        """The most recent finish reason that still holds, or `stop` if there is none."""
        cut = [one for one in self._branches.values() if one.ended != "stop"]
        return max(cut, key=lambda one: one.ended_at).ended if cut else "stop"

    @contextmanager
    def request(self, opening: str, *, restarts: bool) -> Generator[_InFlight]:
        """Track a request from its start to its end.

        `opening` is the key of its conversation. `restarts` is True if the request contains no turn
        of the policy yet.
        """
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
    """Records one trajectory, which may have many requests in flight at once.

    It belongs to one event loop. `name` must be unique within the run, and `sample` samples one
    turn. `seed` is the trajectory's seed, from which the seed of each turn is derived. `turn_s`
    limits how long a turn may take, including the wait for an engine. When it is exceeded, the
    client gets a 503 error.
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
        """Numbers of the samples from each context. All differ, so each sample has its own seed."""
        self._unanswered: Counter[str] = Counter()
        """How many tries failed or were cancelled, by request key."""
        self._growing: set[SegmentRecord] = set()
        self._sampling: dict[asyncio.Future[TurnResult], int] = {}
        """The turns that are being sampled, and the tokens reserved for each."""
        self._changed = asyncio.Event()
        self._log = MessageLog()
        self._usage = Usage(turns=0)
        self._finish_reasons = FinishReasons()
        self._timed_out = False
        self.refusal = ""
        """Why the last refused request was refused."""
        self.over = False
        """True if the environment has ended the task, after which there are no more turns."""
        self.failure = ""
        """Why the endpoint or an engine last failed to answer a request."""
        self._closed = False
        self._idle_since: float | None = None
        """When the last turn ended. None before the first turn and while a turn is sampled."""
        self.begun = asyncio.Event()
        """Set when the first turn is sampled."""

    async def turn(self, request: ChatRequest) -> Reply:
        """Sample and record the turn that a request asks for, and return the reply.

        If the call is cancelled, nothing is recorded. Raises ApiError if the request is refused or
        the turn cannot be sampled.
        """
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
        """Count a request that was answered with an error, and keep the reason for the report."""
        if error.is_internal:
            self.failure = error.message
            self._count("failed")
        else:
            self.refusal = error.message
            self._count("refused")

    def mark_lost(self, reply: Reply) -> None:
        """Keep a reply whose client disconnected, so that it can be sent when the client asks
        again."""
        self._turns.mark_lost(reply)

    async def overdue(self, open_s: float) -> str:
        """Wait until the program's time is up, and return a description of what took too long.

        `open_s` is the time limit for the first request. After it, `Budget.timeout_s` limits the
        turns plus the program's own time between them.
        """
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
        """Cancel the turns that are being sampled, close the recorder and return the trajectory.

        It is safe to call this more than once.
        """
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
        """Choose where to record the turn.

        The turn extends the record of the turn before it, unless another turn has done so already.
        In that case it begins a new record.
        """
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
        """Sample the turn and append it to its record."""
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
        """Wait until the budget allows a turn after `context` tokens. Returns its token limit."""
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
        """Return the usage, including the time that the program has spent since the last turn."""
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
