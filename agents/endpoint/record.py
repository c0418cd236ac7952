"""Records an agent program's requests as turns that extend recorded ids, and as segments.

A request is looked up by its messages up to the policy's last turn. If they match a recorded turn,
`Chat.extend` extends its ids: nothing that was sampled is tokenised again. If another request has
extended that turn already, a new segment begins with the same ids. In all other cases a new segment
begins with a render of the messages. Either way, each sampled token is trained in the segment that
it was sampled in, and in no other.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from keel.agents.budget import CHARACTERS_A_TOKEN, Budget, with_lost_turn, with_turn
from keel.agents.conversation import SegmentRecord, in_common
from keel.agents.endpoint.endings import Endings
from keel.agents.endpoint.errors import ApiError, spent
from keel.agents.endpoint.lookup import Turn, Turns, chain, key_of_tools
from keel.agents.endpoint.replies import Reply, handed_out
from keel.agents.endpoint.requests import ChatRequest
from keel.agents.endpoint.transcript import Transcript
from keel.agents.schemas import arguments_of
from keel.rl.turns import Chat, Malformed, Message, Parsed, TurnRequest, TurnResult
from keel.rl.types import Dialogue, FinishReason, Segment, Usage

Sample = Callable[[TurnRequest], Awaitable[TurnResult]]
TURN_S = 600.0
"""Seconds for a turn: as long as OpenAI's clients wait."""
ENDING_S = 10.0
"""Seconds to wait at the end for cancelled turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
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
    """Requests that got an error for a limit, or for a field that is wrong."""
    failed: int = 0
    """Requests that got an error because the engine or the endpoint failed or was too busy."""
    given_up: int = 0
    """Turns whose client disconnected while they were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A recorded trajectory."""

    segments: tuple[Segment, ...]
    opening: tuple[Message, ...]
    """The messages of the first turn's request."""
    messages: tuple[Message, ...]
    """All later messages of all conversations, in the order of the turns."""
    dialogues: tuple[Dialogue, ...]
    """The same messages by conversation, with the tools they were sampled under."""
    usage: Usage
    finish_reason: FinishReason
    """How the trajectory ended: `stop`, or the limit that cut or refused its last turn."""
    counts: Counts
    failure: str = ""
    """Why an engine or the endpoint itself could not answer a request. Empty: none failed so."""
    refusal: str = ""
    """Why the last refused request was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a turn will be recorded."""

    record: SegmentRecord
    extends: bool
    """Whether the turn extends the record, and does not begin it."""
    context_T: NDArray[np.int32]
    repeated: int
    """Number of leading ids that some record has already."""
    draws: set[int]
    """Numbers of the draws from this context that are being sampled or have been answered."""
    draw: int
    """The first free number."""
    seed: int


class TrajectoryRecorder:
    """Records one trajectory, on one event loop, with any number of requests at once.

    name: unique in the run. sample: samples one turn of the policy. seed: the trajectory's, from
    which each turn's is drawn. turn_s: seconds for a turn and its wait for an engine; after that
    the client gets 503.
    """

    def __init__(
        self,
        *,
        name: str,
        prompt_id: str,
        chat: Chat,
        sample: Sample,
        thinking: bool,
        seed: int,
        budget: Budget,
        turn_s: float = TURN_S,
    ) -> None:
        if not 0 < turn_s < inf:
            raise ValueError(f"endpoint: turn_s = {turn_s} must be positive and finite")
        self.name = name
        self.counts = Counts()
        self._prompt_id, self._chat, self._sample = prompt_id, chat, sample
        self._thinking, self._seed = thinking, seed
        self._budget, self._turn_s = budget, turn_s
        self._records: list[SegmentRecord] = []
        self._turns = Turns(chat, thinking=thinking)
        self._known_tools = {key_of_tools(())}
        self._draws: dict[str, set[int]] = {}
        """Numbers of the draws from each context: all differ, and so do their seeds."""
        self._unanswered: Counter[str] = Counter()
        """Tries that failed or were given up, by the key of the request."""
        self._growing: set[SegmentRecord] = set()
        self._sampling: dict[asyncio.Future[TurnResult], int] = {}
        """Turns being sampled, and the tokens reserved for each."""
        self._changed = asyncio.Event()
        self._transcript = Transcript()
        self._usage = Usage(turns=0)
        self._endings = Endings()
        self._late = False
        self.refusal = ""
        """Why the last refused request was refused."""
        self.over = False
        """Whether the environment has ended the task: there are no more turns."""
        self.failure = ""
        """Why the endpoint or an engine could not answer a request, the last one that failed so."""
        self._closed = False
        self._idle_since: float | None = None
        """When the program's own time began. None while turns are sampled and before the first."""
        self.begun = asyncio.Event()
        """Set when the first turn is sampled."""

    async def turn(self, request: ChatRequest) -> Reply:
        """Answer a request. Raises ApiError; cancelled, it leaves nothing behind."""
        self._count("requests")
        tools_key = key_of_tools(request.tools)
        keys = chain(request.messages)
        request_key = f"{keys[-1]} {tools_key} {request.may_call} {request.max_tokens}"
        roles = [message["role"] for message in request.messages]
        opening = roles.index("assistant") if "assistant" in roles else len(roles)
        with self._endings.request(keys[opening], restarts=opening == len(roles)) as in_flight:
            try:
                reply = await self._turn(request, keys, tools_key, request_key)
                in_flight.ended = reply.ended
                most = request.max_tokens or inf
                in_flight.by_client = most <= reply.completion_tokens < self._budget.turn_tokens
                return reply
            except ApiError as refused:
                in_flight.ended = refused.limit
                self._unanswered[request_key] += refused.status >= 500
                self.refused(refused)
                raise
            except asyncio.CancelledError:
                self._count("given_up")
                self._unanswered[request_key] += 1
                raise

    def refused(self, error: ApiError) -> None:
        """Count a request that got an error, and keep the reason for the trajectory's report."""
        if error.of_the_endpoint:
            self.failure = error.message
            self._count("failed")
        else:
            self.refusal = error.message
            self._count("refused")

    def lose(self, reply: Reply) -> None:
        """Keep a reply whose client disconnected, for when it asks again."""
        self._turns.lose(reply)

    async def overdue(self, open_s: float) -> str:
        """Wait until the program's time is up, and return what took too long: its first request
        (`open_s`), or all its turns and its own time between them (`Budget.timeout_s`)."""
        if self._budget.timeout_s == inf:
            raise ValueError("endpoint: timeout_s must be finite: every wait has a deadline")
        began = monotonic()
        while True:
            if self._idle_since is not None:
                left, what = self._budget.left_s(self._with_idle()), "end"
                most = self._budget.timeout_s
            else:
                left, what, most = began + open_s - monotonic(), "ask for a turn", open_s
            if self._sampling:  # which has a deadline of its own
                left = inf
            if left <= 0:
                if self._idle_since is not None:
                    self._late = True
                return f"did not {what} within {most:g} s"
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left if left < inf else None):
                    await self._changed.wait()

    async def finish(self) -> Finished:
        """Cancel the turns being sampled, and close. Safe to call more than once."""
        self._usage, self._idle_since = self._with_idle(), None
        self._closed = True
        self._changed.set()
        for task in (pending := list(self._sampling)):
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=ENDING_S)
        segments = (record.segment() for record in self._records)
        return Finished(
            segments=tuple(segment for segment in segments if segment is not None),
            opening=self._transcript.opening,
            messages=self._transcript.after_opening,
            dialogues=self._transcript.dialogues,
            usage=replace(
                self._usage,
                contexts_extended=self.counts.extended,
                contexts_branched=self.counts.branched,
                contexts_rendered=self.counts.rendered,
                contexts_refused=self.counts.refused,
            ),
            finish_reason="deadline" if self._late else self._endings.last,
            counts=self.counts,
            failure=self.failure,
            refusal=self.refusal,
        )

    async def _turn(
        self, request: ChatRequest, keys: Sequence[str], tools_key: str, request_key: str
    ) -> Reply:
        self._check_open()
        if request.is_retry and self._unanswered[request_key] > 0:
            self._unanswered[request_key] -= 1  # of that try there is no answer to be given
        elif lost := self._turns.lost(request_key, request):
            self._count("repeated")
            lost.given_again = True
            return lost.reply
        if (characters := request.characters) > self._budget.characters:
            least = max(characters // CHARACTERS_A_TOKEN, self._budget.window)
            raise spent(self._budget, "window", least)
        if tools_key not in self._known_tools:
            await request.check_tools()
            self._known_tools.add(tools_key)
        before, ids = self._turns.context(request, keys, tools_key, self._growing)
        limit = await self._admit(len(ids), request.max_tokens)
        # From here to the sampling nothing waits: what is free now stays so.
        place = self._place(before, ids)
        result = await self._grow(place, limit)
        if before is not None:
            before.extended = True
        self._count("extended" if place.extends else "branched" if before else "rendered")
        parsed = self._chat.parse(
            result.token_ids_N.tolist(),
            request.tools,
            thinking=self._thinking,
            turn=self._usage.turns,
            inside=before is not None and before.inside,
        )
        reply = self._reply(request, place, result, parsed)
        turn = Turn(
            record=place.record,
            end=len(place.record.ids),
            tools=request.tools,
            tools_key=tools_key,
            request_key=request_key,
            reply=reply,
            inside=parsed.inside,
        )
        handed_out_whole = len(reply.message.get("tool_calls", ())) == len(parsed.calls)
        self._transcript.add(
            self._turns.as_recorded(request.messages, keys),
            keys,
            reply.message,
            tools=request.tools,
            tools_key=tools_key,
            verbatim=handed_out_whole,
        )
        self._turns.add(turn, keys[-1])
        self._use(turn, parsed, result, place.repeated)
        return reply

    def _place(self, before: Turn | None, ids: list[int]) -> _Place:
        """Choose the end of a record, or a new record if another turn is there."""
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
        return _Place(
            record=record,
            extends=extends,
            context_T=context_T,
            repeated=in_common(ids, self._records) if before is None else before.end - 1,
            draws=draws,
            draw=draw,
            seed=self._seed_of(context_key, draw),
        )

    async def _grow(self, place: _Place, limit: int) -> TurnResult:
        """Sample the turn, and append it to the record."""
        record = place.record
        request = replace(
            record.request(
                self.name,
                max_tokens=limit,
                seed=place.seed,
                timeout_s=self._budget.left_s(self._with_idle()),
                stop_ids=self._chat.stop_ids,
            ),
            token_ids_T=place.context_T,
        )
        self._growing.add(record)
        try:
            result = await self._sampled(request, place, limit)
            if not len(result.token_ids_N):
                raise spent(self._budget, "deadline")
            if place.extends:
                record.extend(place.context_T.tolist())
            try:
                record.append(request, result)
            except ValueError as error:
                raise self._failed(str(error)) from error
            if not place.extends:
                self._records.append(record)
        finally:
            self._growing.discard(record)
        return result

    def _reply(
        self, request: ChatRequest, place: _Place, result: TurnResult, parsed: Parsed
    ) -> Reply:
        full = result.finish_reason == "length" and len(place.record.ids) >= self._budget.window
        ended: FinishReason = "window" if full else result.finish_reason
        return Reply(
            reply_id=f"chatcmpl-{secrets.token_hex(12)}",
            message=handed_out(
                parsed, cut=ended != "stop", may_call=request.may_call and parsed.closed
            ),
            ended=ended,
            prompt_tokens=len(place.context_T),
            completion_tokens=len(result.token_ids_N),
            cached_tokens=result.cached_tokens,
        )

    async def _admit(self, context: int, wanted: int | None) -> int:
        """Return how many tokens a turn after `context` tokens may sample, once it may."""
        try:
            async with asyncio.timeout(self._turn_s):
                while True:
                    self._check_open()
                    usage = self._with_idle()
                    limit, room = self._budget.room(
                        replace(usage, turns=usage.turns + len(self._sampling)),
                        context=context,
                        sampled=self._sampled_tokens + sum(self._sampling.values()),
                    )
                    if room > 0:
                        return min(room, wanted or room)
                    if not self._sampling or limit in ("window", "deadline"):
                        raise spent(self._budget, limit, context)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise self._failed(
                f"turns at once had the whole budget for {self._turn_s:g} s"
            ) from error

    async def _sampled(self, request: TurnRequest, place: _Place, limit: int) -> TurnResult:
        """Sample one turn of the policy within its time."""
        task = asyncio.ensure_future(self._sample(request))
        self._sampling[task] = limit
        place.draws.add(place.draw)
        self._usage, began = self._with_idle(), monotonic()
        self._idle_since = None
        self.begun.set()
        try:
            async with asyncio.timeout(self._turn_s):
                return await task
        except BaseException as error:
            place.draws.discard(place.draw)
            if isinstance(error, TimeoutError | asyncio.CancelledError):  # not the engine's failure
                self._usage = with_lost_turn(self._usage, monotonic() - began)
            if isinstance(error, asyncio.CancelledError) and self._closed:
                raise self._over() from error
            if isinstance(error, TimeoutError):
                raise self._failed(f"a turn did not end within {self._turn_s:g} s") from error
            if isinstance(error, Exception):
                raise self._failed(f"{type(error).__name__}: {error}") from error
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

    def _seed_of(self, context_key: str, draw: int) -> int:
        """Return a turn's seed, which is the same when a failed turn is asked for again."""
        key = f"{self._seed}/{context_key}/{draw}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1

    def _use(self, turn: Turn, parsed: Parsed, result: TurnResult, repeated: int) -> None:
        calls = parsed.calls if turn.reply.message.get("tool_calls") else ()
        malformed = sum(isinstance(call, Malformed) for call in calls)
        broken = sum(
            not isinstance(call, Malformed) and bool(arguments_of(turn.tools).complaint(call))
            for call in calls
        )
        usage = with_turn(self._usage, result, repeated=repeated)
        self._usage = replace(
            usage,
            calls=usage.calls + len(calls),
            failed_calls=usage.failed_calls + broken + malformed,
            malformed_calls=usage.malformed_calls + malformed,
        )

    @property
    def _sampled_tokens(self) -> int:
        return sum(record.sampled_tokens for record in self._records)

    def _check_open(self) -> None:
        if self._closed:
            raise self._over()
        if self.over:
            raise ApiError(403, "the environment has ended the task", code="task_over")

    def _over(self) -> ApiError:
        return ApiError(404, "this trajectory is over", code="trajectory_over")

    def _failed(self, why: str) -> ApiError:
        return ApiError(503, f"the turn could not be sampled: {why}", code="engine_failed")

    def _count(self, name: str) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + 1})
