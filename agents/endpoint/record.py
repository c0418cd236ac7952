"""What an agent program's requests become: turns that extend recorded ids, and segments.

A request is looked up by its messages up to the policy's last turn. Where they are what was handed
out, the recorded ids are extended by `Chat.extend`: nothing that was sampled is tokenised again.
Where the record has gone on from there meanwhile (another request came first), a new segment begins
with the same ids. In all other cases a new segment begins with a render of the messages.
Either way, each sampled token is trained in the segment that it was sampled in, and no other.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import count, islice, takewhile
from math import inf
from time import monotonic

import numpy as np

from keel.agents.budget import Budget, with_turn
from keel.agents.conversation import SegmentRecord
from keel.agents.endpoint.endings import Endings
from keel.agents.endpoint.errors import Refused, spent
from keel.agents.endpoint.lookup import Turn, Turns
from keel.agents.endpoint.matching import chain, key_of_tools, link
from keel.agents.endpoint.replies import Reply, handed_out
from keel.agents.endpoint.requests import Asked
from keel.agents.endpoint.types import Counts, Finished
from keel.agents.schemas import arguments_of
from keel.rl.turns import (
    Chat,
    Malformed,
    Message,
    Parsed,
    ToolSpec,
    TurnRequest,
    TurnResult,
)
from keel.rl.types import PROGRAM, FinishReason, Usage

Sample = Callable[[TurnRequest], Awaitable[TurnResult]]
TURN_S = 600.0
"""As long as OpenAI's own clients wait."""
ENDING_S = 10.0
"""Longest wait at the end for turns that are being sampled to be given up."""


class Recording:
    """One trajectory. For one event loop; any number of requests at once.

    name: unique in the run. sample: one turn of the policy. seed: of the trajectory. turn_s: of a
    turn, with its wait for an engine; then the client gets 503.
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
        self._draws: dict[str, set[int]] = {}
        """Of each context, the numbers of those that are sampled or answered: all differ."""
        self._unanswered: Counter[str] = Counter()
        """By the key of the request: tries that failed or were given up."""
        self._growing: set[SegmentRecord] = set()
        self._sampling: dict[asyncio.Future[TurnResult], int] = {}
        """With the tokens that are set aside for each."""
        self._changed = asyncio.Event()
        self._opening: tuple[Message, ...] = ()
        self._transcript: list[Message] = []
        self._told: set[str] = set()
        """Keys of messages that stand in the transcript."""
        self._usage = Usage(turns=0)
        self._endings = Endings()
        self._late = False
        self.refusal = ""
        """Why the last request that was refused was."""
        self.over = False
        """The task is: there are no more turns."""
        self._failure = ""
        self._closed = False
        self._idle_since: float | None = None
        """Since when the program has had its own time. None: while turns are sampled, and before
        the first one."""
        self.begun = asyncio.Event()
        """Set with the first turn that is sampled."""

    async def turn(self, asked: Asked) -> Reply:
        """Answer a request. Raises Refused; cancelled, it leaves nothing behind."""
        self._count("requests")
        tools_key = key_of_tools(asked.tools)
        keys = chain(asked.messages)
        request_key = f"{keys[-1]} {tools_key} {asked.may_call} {asked.max_tokens}"
        roles = [message["role"] for message in asked.messages]
        opening = roles.index("assistant") if "assistant" in roles else len(roles)
        with self._endings.request(keys[opening], anew=opening == len(roles)) as under_way:
            try:
                reply = await self._turn(asked, keys, tools_key, request_key)
                under_way.ended = reply.ended
                most = asked.max_tokens or inf
                under_way.wanted = most <= reply.completion_tokens < self._budget.turn_tokens
                return reply
            except Refused as refused:
                under_way.ended = refused.limit
                failed = refused.status >= 500
                self._count("failed" if failed else "refused")
                self._unanswered[request_key] += failed
                self.refusal = self.refusal if failed else refused.message
                raise
            except asyncio.CancelledError:
                self._count("given_up")
                self._unanswered[request_key] += 1
                raise

    def lose(self, reply: Reply) -> None:
        """Its client went before it got it. It gets it when it asks again."""
        self._turns.lose(reply)

    async def overdue(self, open_s: float) -> str:
        """Returns when the program's time is up, and says what took too long: its first request
        (`open_s`), or all its turns and its own time between them (`Budget.deadline_s`)."""
        if self._budget.deadline_s == inf:
            raise ValueError("endpoint: deadline_s must be finite: every wait has a deadline")
        began = monotonic()
        while True:
            if self._idle_since is not None:
                left, what = self._budget.left_s(self._with_idle()), "end"
                most = self._budget.deadline_s
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
        """Give up what is being sampled, and close. Safe to call more than once."""
        self._usage = self._with_idle()
        self._idle_since = None
        self._closed = True
        self._changed.set()
        pending = list(self._sampling)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=ENDING_S)
        segments = (record.segment() for record in self._records)
        return Finished(
            segments=tuple(segment for segment in segments if segment is not None),
            opening=self._opening,
            messages=tuple(self._transcript[len(self._opening) :]),
            usage=self._usage,
            finish_reason="deadline" if self._late else self._endings.last,
            counts=self.counts,
            failure=self._failure,
            refusal=self.refusal,
        )

    async def _turn(
        self, asked: Asked, keys: Sequence[str], tools_key: str, request_key: str
    ) -> Reply:
        self._check_open()
        if asked.is_retry and self._unanswered[request_key] > 0:
            self._unanswered[request_key] -= 1  # of that try there is no answer to be given
        elif lost := self._turns.lost(request_key, asked):
            self._count("repeated")
            lost.given_again = True
            return lost.reply
        before, ids = self._turns.context(asked, keys, tools_key, self._growing)
        tools = asked.tools if before is None else before.tools
        limit = await self._admit(len(ids), asked.max_tokens)
        # From here to the sampling nothing waits: what is free now stays so.
        extends = (
            before is not None
            and before.end == len(before.record.ids)
            and before.record not in self._growing
        )
        record = (
            before.record if before is not None and extends else SegmentRecord(self._prompt_id, ids)
        )
        ids_T = np.array(ids, np.int32)
        context_key = blake2b(ids_T.tobytes(), digest_size=16).hexdigest()
        draws = self._draws.setdefault(context_key, set())
        draw = next(n for n in count() if n not in draws)
        request = replace(
            record.request(
                self.name,
                max_tokens=limit,
                seed=self._seed_of(context_key, draw),
                deadline_s=self._budget.left_s(self._with_idle()),
                stop_ids=self._chat.stop_ids,
            ),
            token_ids_T=ids_T,
        )
        repeated = before.end - 1 if before is not None else self._in_common(ids)
        self._growing.add(record)
        try:
            result = await self._sampled(request, draws, draw, limit)
            if not len(result.token_ids_N):
                raise spent(self._budget, "deadline")
            if extends:
                record.extend(ids)
            try:
                record.append(request, result)
            except ValueError as error:
                raise self._failed(str(error)) from error
            if not extends:
                self._records.append(record)
        finally:
            self._growing.discard(record)
        if before is not None:
            before.extended = True
        self._count("extended" if extends else "rendered" if before is None else "branched")
        parsed = self._chat.parse(
            result.token_ids_N.tolist(),
            tools,
            thinking=self._thinking,
            turn=self._usage.turns,
            inside=before is not None and before.inside,
        )
        full = result.finish_reason == "length" and len(record.ids) >= self._budget.window
        ended: FinishReason = "window" if full else result.finish_reason
        reply = Reply(
            reply_id=f"chatcmpl-{secrets.token_hex(12)}",
            message=handed_out(
                parsed, cut=ended != "stop", may_call=asked.may_call and parsed.closed
            ),
            ended=ended,
            prompt_tokens=len(ids),
            completion_tokens=len(result.token_ids_N),
            cached_tokens=result.cached_tokens,
        )
        turn = Turn(
            record=record,
            end=len(record.ids),
            tools=tools,
            tools_key=tools_key,
            request_key=request_key,
            reply=reply,
            inside=parsed.inside,
        )
        self._tell(asked.messages, keys, reply.message)
        self._turns.add(turn, keys[-1])
        self._use(parsed, reply, result, repeated, tools)
        return reply

    async def _admit(self, context: int, wanted: int | None) -> int:
        """Tokens that a turn after such a context may sample."""
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

    async def _sampled(
        self, request: TurnRequest, draws: set[int], draw: int, limit: int
    ) -> TurnResult:
        """One turn of the policy, within its time."""
        task = asyncio.ensure_future(self._sample(request))
        self._sampling[task] = limit
        draws.add(draw)
        self._usage = self._with_idle()
        self._idle_since = None
        self.begun.set()
        try:
            async with asyncio.timeout(self._turn_s):
                return await task
        except BaseException as error:
            draws.discard(draw)
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
        """The usage with the program's own time until now."""
        if self._idle_since is None:
            return self._usage
        spent_s = monotonic() - self._idle_since
        return replace(self._usage, tools_s=self._usage.tools_s + spent_s)

    def _seed_of(self, context_key: str, draw: int) -> int:
        """The same for a turn that failed and is asked for again, whatever came between."""
        key = f"{self._seed}/{context_key}/{draw}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1

    def _in_common(self, ids: Sequence[int]) -> int:
        """Ids at the beginning that some record begins with, too."""
        most = 0
        for record in self._records:
            other = record.ids
            if ids[:most] == other[:most]:
                more = zip(islice(ids, most, None), islice(other, most, None), strict=False)
                most += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], more))
        return most

    def _tell(self, messages: Sequence[Message], keys: Sequence[str], said: Message) -> None:
        """Put what is new into the transcript. What the program says for the policy, or makes of
        its words, nobody sampled."""
        if not self._opening:
            self._opening = tuple(messages)
        for message, key in zip(messages, keys[1:], strict=True):
            if key not in self._told:
                self._told.add(key)
                own = {"name": PROGRAM} if message["role"] == "assistant" else {}
                self._transcript.append({**message, **own})
        self._told.add(link(keys[-1], said))
        self._transcript.append(said)

    def _use(
        self,
        parsed: Parsed,
        reply: Reply,
        result: TurnResult,
        repeated: int,
        tools: tuple[ToolSpec, ...],
    ) -> None:
        calls = parsed.calls if reply.message.get("tool_calls") else ()
        malformed = sum(isinstance(call, Malformed) for call in calls)
        broken = sum(
            not isinstance(call, Malformed) and bool(arguments_of(tools).complaint(call))
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
            raise Refused(403, "the environment has ended the task", code="task_over")

    def _over(self) -> Refused:
        return Refused(404, "this trajectory is over", code="trajectory_over")

    def _failed(self, why: str) -> Refused:
        self._failure = why
        return Refused(503, f"the turn could not be sampled: {why}", code="engine_failed")

    def _count(self, name: str) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + 1})
