"""Records the requests of an agent program as training segments. A request that continues a
recorded turn reuses the token ids of that turn (`Chat.extend`), so sampled text is never tokenized
again. If another request has already extended the turn, a new segment begins with the same ids. If
no recorded turn matches, a new segment begins with the rendered messages. Clients may drop
thinking, reorder keys, reformat arguments, add names or strip whitespace. Messages are therefore
compared by keys that ignore such differences."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, count, islice, takewhile
from time import monotonic
from typing import Any, cast

import numpy as np

from keel.agents.conversation import SegmentRecord, message_of, segments_of
from keel.agents.endpoint.requests import (
    ApiError,
    ChatRequest,
    Reply,
    budget_error,
    invalid_field,
)
from keel.agents.episode import CHARACTERS_PER_TOKEN, Budget, add_turn
from keel.agents.types import ArgumentValidator
from keel.rl import strict_json
from keel.rl.supervisor import JOIN_S
from keel.rl.turns import (
    USER_ROLES,
    Chat,
    Malformed,
    Message,
    ToolSpec,
    TurnRequest,
    TurnResult,
    seed_of,
)
from keel.rl.types import PROGRAM, Dialogue, FinishReason, Segment, Usage

_TURN_S = 600.0
"""Time limit for a turn in seconds. It equals the default timeout of OpenAI's clients."""
_MAX_TOOLS_KIB = 256
"""Maximum size of a request's tools. Validating schemas of this size takes seconds."""


class TrajectoryRecorder:
    """Records one trajectory. Accepts concurrent requests on a single event loop. A turn that takes
    longer than `_TURN_S`, including time in the queue, fails with status 503."""

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
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a recorder. `is_over` returns True once the environment has ended the task. No
        more turns are sampled after that."""
        self.name = name
        self._prompt_id, self._chat, self._sample = prompt_id, chat, sample
        self._thinking, self._seed, self._budget = thinking, seed, budget
        self._is_over = is_over
        self._records: list[SegmentRecord] = []
        self.index = _TurnIndex(chat, thinking=thinking)
        self._draws: dict[str, set[int]] = {}
        """Sample numbers in use for each context. Samples from the same context get different
        numbers and therefore different seeds."""
        self._growing: set[SegmentRecord] = set()
        self._validator: tuple[str, ArgumentValidator] | None = None
        """The validator of the latest request's tools, and their key."""
        self._sampling: dict[asyncio.Future[TurnResult], int] = {}
        """Turns being sampled, with the number of tokens reserved for each."""
        self._changed = asyncio.Event()
        self._usage = Usage(turns=0)
        self._ended: FinishReason = "stop"
        self._timed_out = False
        self.last_refusal = ""
        """Why a request was last rejected, which is the program's fault."""
        self.last_failure = ""
        """Why the endpoint or an engine last failed to serve a request."""
        self.engine_error: BaseException | None = None
        """The first engine error that persisted after the engine's own retries."""
        self._closed = False
        self._idle_since: float | None = None
        """When the last turn ended. None before the first turn and while a turn is being
        sampled."""
        self.begun = asyncio.Event()

    async def turn(self, request: ChatRequest) -> Reply:
        try:
            async with asyncio.timeout(_TURN_S):
                reply = await self._turn(request)
            self._ended = reply.ended
            return reply
        except TimeoutError:
            failure = _engine_failed(f"it did not end within {_TURN_S:g} s")
        except ApiError as error:
            failure = error
        self._ended = failure.limit or self._ended
        self.record_error(failure)
        raise failure

    def record_error(self, error: ApiError) -> None:
        if error.status >= 500:
            self.last_failure = error.message
        else:
            self.last_refusal = error.message
            self._usage = self._usage.plus(contexts_refused=1)

    async def overdue(self, open_s: float) -> str:
        """Wait until the program misses a deadline, and return a description of what took too long.
        The deadline is `open_s` for the first request and `Budget.timeout_s` after that."""
        began = monotonic()
        while True:
            limit_s, action = open_s, "ask for a turn"
            remaining_s = began + open_s - monotonic()
            if self._idle_since is not None:
                limit_s, action = self._budget.timeout_s, "end"
                remaining_s = self._budget.remaining_s(self.usage)
            if self.engine_error is not None:
                return "was ended with the engines"
            if remaining_s <= 0 and not self._sampling:  # turns have their own deadline
                self._timed_out = self._timed_out or self._idle_since is not None
                return f"did not {action} within {limit_s:g} s"
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._sampling else remaining_s):
                    await self._changed.wait()

    async def finish(self) -> None:
        self._usage, self._idle_since = self.usage, None
        self._closed = True
        self._changed.set()
        for task in (pending := list(self._sampling)):
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=JOIN_S)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return segments_of(self._records)

    @property
    def usage(self) -> Usage:
        idle_s = 0.0 if self._idle_since is None else monotonic() - self._idle_since
        return self._usage.plus(tools_s=idle_s)

    @property
    def finish_reason(self) -> FinishReason:
        """`stop`, or the limit that truncated or rejected the latest turn."""
        return "deadline" if self._timed_out else self._ended

    async def _turn(self, request: ChatRequest) -> Reply:
        self._check_open()
        keys = _prefix_keys(request.messages)
        if (characters := request.characters) > self._budget.characters:
            tokens = max(characters // CHARACTERS_PER_TOKEN, self._budget.window)
            raise budget_error(self._budget, "window", tokens)
        specs = [tool.as_json() for tool in request.tools]
        tools = json.dumps(specs, ensure_ascii=False, sort_keys=True)
        if len(tools.encode()) > _MAX_TOOLS_KIB << 10:
            raise invalid_field("tools", f"must have at most {_MAX_TOOLS_KIB} KiB")
        tools_key = _hash(tools)
        validator = await self._validator_of(request.tools, tools_key)
        before, ids = self.index.find_context(request, keys, tools_key, self._growing)
        limit = await self._admit(len(ids), request.limit)
        # No await between here and the sampling, so no other turn extends the same record.
        if before is None:
            record, how = SegmentRecord(self._prompt_id, ids), "contexts_rendered"
            repeated = _common_prefix(ids, self._records)
        else:
            record, how, repeated = before.record, "contexts_extended", before.end - 1
            if before.end < len(record.ids) or record in self._growing:
                record, how = SegmentRecord(self._prompt_id, ids), "contexts_branched"
        self._growing.add(record)
        try:
            result = await self._sample_into(record, ids, limit)
        finally:
            self._growing.discard(record)
        if how != "contexts_extended":
            self._records.append(record)
        parsed = self._chat.parse(
            result.token_ids_R.tolist(),
            request.tools,
            thinking=self._thinking,
            turn=self._usage.turns,
            in_thinking=before is not None and before.in_thinking,
        )
        full = result.finish_reason == "length" and len(record.ids) >= self._budget.window
        ended: FinishReason = "window" if full else result.finish_reason
        message = strict_json.replace_surrogates(message_of(parsed))
        if ended != "stop" or request.tool_choice == "none" or not parsed.closed:
            message.pop("tool_calls", None)  # clients run calls whatever the finish reason
        turn = _Turn(record, len(record.ids), tools_key, message, in_thinking=parsed.in_thinking)
        verbatim = len(message.get("tool_calls", ())) == len(parsed.calls)
        self.index.add(request, keys, turn, verbatim=verbatim)
        self._usage = add_turn(self._usage, result, repeated=repeated).plus(**{how: 1})
        if message.get("tool_calls"):
            valid = [call for call in parsed.calls if not isinstance(call, Malformed)]
            malformed = len(parsed.calls) - len(valid)
            failed = malformed + sum(bool(validator.explain_error(call)) for call in valid)
            self._usage = self._usage.plus(
                calls=len(parsed.calls), failed_calls=failed, malformed_calls=malformed
            )
        return Reply(
            reply_id=f"chatcmpl-{secrets.token_hex(12)}",
            message=message,
            ended=ended,
            prompt_tokens=len(ids),
            completion_tokens=len(result.token_ids_R),
            cached_tokens=result.cached_tokens,
        )

    async def _validator_of(self, tools: Sequence[ToolSpec], tools_key: str) -> ArgumentValidator:
        if self._validator is None or self._validator[0] != tools_key:
            try:  # in a thread, because large schemas take seconds the first time
                validator = await asyncio.to_thread(ArgumentValidator, tools)
            except ValueError as error:
                raise invalid_field("tools", str(error)) from error
            self._validator = (tools_key, validator)
        return self._validator[1]

    async def _admit(self, context: int, max_tokens: int | None) -> int:
        """Return the number of tokens that the next turn may sample. Waits while concurrent turns
        have reserved the rest of the budget."""
        while True:
            self._check_open()
            sampled = sum(record.sampled_tokens for record in self._records)
            limit, room = self._budget.turn_limit(
                self.usage.plus(turns=len(self._sampling)),
                context=context,
                sampled=sampled + sum(self._sampling.values()),
            )
            if room > 0:
                return min(room, max_tokens or room)
            if not self._sampling or limit in ("window", "deadline"):
                raise budget_error(self._budget, limit, context)
            self._changed.clear()
            await self._changed.wait()

    async def _sample_into(self, record: SegmentRecord, ids: list[int], limit: int) -> TurnResult:
        context_T = np.array(ids, np.int32)
        context_key = blake2b(context_T.tobytes(), digest_size=16).hexdigest()
        draws = self._draws.setdefault(context_key, set())
        draw = next(n for n in count() if n not in draws)
        request = TurnRequest(
            conversation=self.name,
            token_ids_T=context_T,
            max_tokens=limit,
            seed=seed_of(self._seed, context_key, draw),
            timeout_s=self._budget.remaining_s(self.usage),
            routes_from=record.routed_tokens,
            stop_ids=self._chat.stop_ids,
        )
        task = asyncio.ensure_future(self._sample(request))
        self._sampling[task] = limit
        draws.add(draw)
        self._usage, began = self.usage, monotonic()
        self._idle_since = None
        self.begun.set()
        try:
            result = await task
        except asyncio.CancelledError as error:
            # A client that cancels every turn must time out all the same.
            self._usage = self._usage.plus(sampling_s=monotonic() - began)
            if self._closed:
                raise _trajectory_over() from error
            raise
        except Exception as error:
            raise _engine_failed(f"{type(error).__name__}: {error}") from error
        finally:
            if not task.done() or task.cancelled() or task.exception():
                draws.discard(draw)  # the same seed is used when the turn is requested again
            task.cancel()
            if task.done() and not task.cancelled():
                self.engine_error = self.engine_error or task.exception()
            del self._sampling[task]
            self._changed.set()
            if not self._sampling:
                self._idle_since = monotonic()
        if not len(result.token_ids_R):
            raise budget_error(self._budget, "deadline")
        record.extend(ids)
        record.append_turn(request, result)
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise _trajectory_over()
        if self._is_over():
            raise ApiError(403, "the environment has ended the task", code="task_over")


def _common_prefix(ids: Sequence[int], records: Sequence[SegmentRecord]) -> int:
    longest = 0
    for record in records:
        other = record.ids
        if ids[:longest] == other[:longest]:
            pairs = zip(islice(ids, longest, None), islice(other, longest, None), strict=False)
            longest += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return longest


def _trajectory_over() -> ApiError:
    return ApiError(404, "this trajectory is over", code="trajectory_over")


def _engine_failed(reason: str) -> ApiError:
    return ApiError(503, f"the turn could not be sampled: {reason}", code="engine_failed")


@dataclass(slots=True, eq=False)
class _Turn:
    record: SegmentRecord
    end: int
    """Length of `record` after this turn, in tokens."""
    tools_key: str
    message: Message
    in_thinking: bool = False
    """True if the turn ended inside the thinking, which the next turn continues."""

    @property
    def ids(self) -> list[int]:
        return list(self.record.ids[: self.end])


@dataclass(slots=True)
class _OpenDialogue:
    messages: list[Message]
    tools: tuple[ToolSpec, ...]
    tools_key: str
    sampled: list[int] = field(default_factory=list[int])
    last_turn: str = ""
    """Key of all messages up to and including the policy's last turn."""


class _TurnIndex:
    """All turns and messages in a trajectory, in order and grouped by conversation."""

    def __init__(self, chat: Chat, *, thinking: bool) -> None:
        self._chat, self._thinking = chat, thinking
        self._turns: list[_Turn] = []
        self._by_messages: dict[str, list[_Turn]] = {}
        self.opening: tuple[Message, ...] = ()
        """The messages of the first request that led to a turn."""
        self._recorded: list[Message] = []
        self._keys: set[str] = set()
        self._dialogues: list[_OpenDialogue] = []

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._recorded[len(self.opening) :])

    @property
    def dialogues(self) -> tuple[Dialogue, ...]:
        return tuple(
            Dialogue(
                messages=tuple(one.messages),
                sampled=frozenset(one.sampled),
                tools=tuple(tool.as_json() for tool in one.tools),
            )
            for one in self._dialogues
        )

    def add(
        self, request: ChatRequest, keys: Sequence[str], turn: _Turn, *, verbatim: bool
    ) -> None:
        """Add a turn along with its request's new messages. Set `verbatim` if the turn's message
        contains everything that was sampled, which makes the turn trainable."""
        messages = self._restore_recorded(request.messages, keys)
        self.opening = self.opening or tuple(messages)
        for message, key in zip(messages, keys[1:], strict=True):
            if key not in self._keys:
                self._keys.add(key)
                author = {"name": PROGRAM} if message["role"] == "assistant" else {}
                self._recorded.append({**message, **author})
        self._recorded.append(turn.message)
        key = _extend_key(keys[-1], turn.message)
        self._keys.add(key)
        self._turns.append(turn)
        self._by_messages.setdefault(key, []).append(turn)

        continued = [
            one
            for one in self._dialogues
            if one.tools_key == turn.tools_key and one.last_turn in keys
        ]
        if not continued:
            continued = [_OpenDialogue(messages, request.tools, turn.tools_key)]
            self._dialogues += continued
        dialogue = max(continued, key=lambda one: len(one.messages))
        dialogue.messages += messages[len(dialogue.messages) :]
        if verbatim:
            dialogue.sampled.append(len(dialogue.messages))
        dialogue.messages.append(turn.message)
        dialogue.last_turn = key

    def find_context(
        self,
        request: ChatRequest,
        keys: Sequence[str],
        tools_key: str,
        growing: Collection[SegmentRecord],
    ) -> tuple[_Turn | None, list[int]]:
        messages = request.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        new = messages[turns[-1] + 1 :] if turns else ()
        try:
            if turns and all(message["role"] in ("tool", *USER_ROLES) for message in new):
                last = messages[turns[-1]]
                thought = last.get("reasoning_content")
                recorded = self._by_messages.get(keys[turns[-1] + 1], ())
                # Prefer the turn whose thinking the client sent back, then one with the same white
                # space, then one that no turn continues, then the latest.
                candidates = sorted(
                    (turn for turn in recorded if turn.tools_key == tools_key),
                    key=lambda t: (
                        thought is not None and t.message.get("reasoning_content") == thought,
                        t.message["content"] == last["content"],
                        t.end == len(t.record.ids) and t.record not in growing,
                    ),
                )
                for turn in reversed(candidates):
                    ids = self._chat.extend(turn.ids, new, thinking=self._thinking)
                    if ids is not None:
                        return turn, ids
            messages = self._restore_recorded(messages, keys)
            ids = self._chat.opening(messages, request.tools, thinking=self._thinking)
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        # A turn that ended inside its thinking may have more thinking than the render shows.
        prefixes = (
            turn
            for turn in self._turns
            if turn.end == len(turn.record.ids) < len(ids)
            and not turn.in_thinking
            and ids[: turn.end] == turn.ids
        )
        return max(prefixes, key=lambda turn: turn.end, default=None), ids

    def _restore_recorded(self, messages: Sequence[Message], keys: Sequence[str]) -> list[Message]:
        """Replace the policy's messages with the recorded ones, because clients may drop the
        thinking."""
        recorded: list[Message] = []
        for message, key in zip(messages, keys[1:], strict=True):
            turns = self._by_messages.get(key) if message["role"] == "assistant" else None
            recorded.append(turns[-1].message if turns else message)
        return recorded


def _prefix_keys(messages: Sequence[Message]) -> list[str]:
    """Return a key for each prefix of the messages. Entry i covers the first i messages."""
    return list(accumulate(messages, _extend_key, initial=""))


def _extend_key(key: str, message: Message) -> str:
    is_turn = message["role"] == "assistant"
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    identity = [
        message["role"],
        message["content"].strip() if is_turn else message["content"],
        [
            [call["id"], function["name"], _floats_to_integers(function["arguments"])]
            for call in calls
            for function in [call["function"]]
        ],
        message.get("tool_call_id"),
    ]
    return _hash(key + json.dumps(identity, sort_keys=True))


def _floats_to_integers(value: Any) -> Any:
    """Convert floats with integer values, such as 1.0, to integers, as many clients do."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {k: _floats_to_integers(item) for k, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_floats_to_integers(item) for item in cast(list[Any], value)]
    return value


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
