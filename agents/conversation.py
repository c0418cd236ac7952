"""A conversation that only grows: what was sampled, what stands between, and the segments of both.

One segment is one context that the engine continued turn by turn. Where the context changes, a new
one begins, and what was said before stands in it as context only. So every sampled token is trained
in one segment, under exactly the ids it was sampled after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.rl.seeds import seed_of
from keel.rl.turns import (
    MALFORMED,
    Chat,
    Malformed,
    Message,
    Parsed,
    ToolSpec,
    TurnRequest,
    TurnResult,
)
from keel.rl.types import NO_ROUTE, SamplingMasks, Segment


class SegmentRecord:
    """One context and what was sampled in it.

    Row t of the routes comes from the turn that first had token t as input: the last token that a
    turn sampled, and whatever tools put after it, are inputs of the next turn only.
    """

    def __init__(self, prompt_id: str, context: Sequence[int]) -> None:
        if not context:
            raise ValueError(f"conversation of {prompt_id}: a segment begins with some context")
        self._prompt_id = prompt_id
        self._ids = list(context)
        self._turns: list[tuple[int, TurnResult]] = []
        """(first sampled position, result) of each turn."""
        self._rows = 0
        """Positions whose routes, if there are any, have come."""

    @property
    def ids(self) -> Sequence[int]:
        return self._ids

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(result.token_ids_N) for _, result in self._turns)

    def request(
        self,
        conversation: str,
        *,
        max_tokens: int,
        seed: int,
        timeout_s: float = inf,
        stop_ids: tuple[int, ...] = (),
    ) -> TurnRequest:
        """The next turn."""
        return TurnRequest(
            conversation=conversation,
            token_ids_T=np.array(self._ids, np.int32),
            max_tokens=max_tokens,
            seed=seed,
            timeout_s=timeout_s,
            routes_from=self._rows,
            stop_ids=stop_ids,
        )

    def append(self, request: TurnRequest, result: TurnResult) -> None:
        """Record a turn. Raises `ValueError` if it is of another request or incomplete."""
        context, sampled = len(self._ids), len(result.token_ids_N)
        if len(request.token_ids_T) != context or request.routes_from != self._rows:
            raise ValueError(f"conversation {request.conversation}: a turn of an older context")
        routes = result.routes_RLK
        rows = max(context + sampled - 1, self._rows)
        for name, have, want in (
            ("logp_old_N", len(result.logp_old_N), sampled),
            ("version_N", len(result.version_N), sampled),
            (
                "sampling_mask",
                sampled if result.sampling_mask is None else len(result.sampling_mask),
                sampled,
            ),
            ("routes_RLK", 0 if routes is None else len(routes), rows - self._rows),
        ):
            if have != want and not (name == "routes_RLK" and routes is None):
                raise ValueError(
                    f"conversation {request.conversation}: {name} of a turn has {have} entries, "
                    f"expected {want}"
                )
        if self._turns and (routes is None) != (self._turns[0][1].routes_RLK is None):
            raise ValueError(
                f"conversation {request.conversation}: some of its turns have routes, some have not"
            )
        self._turns.append((context, result))
        self._ids += result.token_ids_N.tolist()
        self._rows = rows

    def take_back(self) -> None:
        """Of the context, what came after the last turn: the next one is to begin in another."""
        start, result = self._turns[-1]
        del self._ids[start + len(result.token_ids_N) :]

    def extend(self, ids: Sequence[int]) -> None:
        """Context after what was sampled. `ids`: the whole, which begins with what there is."""
        if list(ids[: len(self._ids)]) != self._ids:
            raise ValueError(
                f"conversation of {self._prompt_id}: an extension changes ids that were there"
            )
        self._ids += ids[len(self._ids) :]

    def segment(self) -> Segment | None:
        """Up to the last sampled token. None if nothing was sampled."""
        spans = [(start, result) for start, result in self._turns if len(result.token_ids_N) > 0]
        if not spans:
            return None
        tokens = spans[-1][0] + len(spans[-1][1].token_ids_N)
        trainable, logp = np.zeros(tokens, np.bool_), np.zeros(tokens, np.float32)
        versions = np.full(tokens, -1, np.int32)
        for start, result in spans:
            part = slice(start, start + len(result.token_ids_N))
            trainable[part], logp[part] = True, result.logp_old_N
            versions[part] = result.version_N
        return Segment(
            prompt_id=self._prompt_id,
            token_ids_T=np.array(self._ids[:tokens], np.int32),
            trainable_T=trainable,
            logp_old_T=logp,
            version_T=versions,
            routes_TLK=self._routes(tokens),
            sampling_mask=_kept(spans),
        )

    def _routes(self, tokens: int) -> NDArray[np.int16] | None:
        parts = [r.routes_RLK for _, r in self._turns if r.routes_RLK is not None]
        if not parts:
            return None
        rows = np.concatenate(parts)[: tokens - 1].astype(np.int16)
        return np.concatenate([rows, np.full((1, *rows.shape[1:]), NO_ROUTE, np.int16)])


def in_common(ids: Sequence[int], records: Iterable[SegmentRecord]) -> int:
    """Ids at the beginning that some record begins with, too."""
    most = 0
    for record in records:
        other = record.ids
        if ids[:most] == other[:most]:
            more = zip(islice(ids, most, None), islice(other, most, None), strict=False)
            most += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], more))
    return most


def _kept(spans: Sequence[tuple[int, TurnResult]]) -> SamplingMasks | None:
    """Of all turns, empty where nothing was sampled. None if no turn was truncated."""
    if all(result.sampling_mask is None for _, result in spans):
        return None
    parts: list[SamplingMasks] = []
    end = 0
    for start, result in spans:
        sampled = len(result.token_ids_N)
        parts += [
            SamplingMasks.empty(start - end),
            result.sampling_mask or SamplingMasks.empty(sampled),
        ]
        end = start + sampled
    return SamplingMasks.concat(parts)


class Conversation:
    """Messages on one side, segments on the other, and a chat format between them.

    Lives with who runs the episode: an engine that dies costs a turn, which is asked for again.
    """

    def __init__(
        self,
        *,
        name: str,
        prompt_id: str,
        chat: Chat,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        thinking: bool,
    ) -> None:
        self.name = name
        self.tools = tuple(tools)
        self.thinking = thinking
        self.opening = tuple(messages)
        """What it began with; never left out of a context."""
        self.view: list[Message] = list(messages)
        """What the present context shows."""
        self.transcript: list[Message] = list(messages)
        """All that was ever said."""
        self._chat = chat
        self._prompt_id = prompt_id
        self._records: list[SegmentRecord] = []
        self._asked: TurnRequest | None = None
        self._inside = False
        """The last turn has left its thinking open for the next."""
        self._begin()

    @property
    def ids(self) -> Sequence[int]:
        """The present context."""
        return self._records[-1].ids

    @property
    def turns(self) -> int:
        return sum(record.turns for record in self._records)

    @property
    def forks(self) -> int:
        """How often a new segment had to begin."""
        return len(self._records) - 1

    @property
    def sampled_tokens(self) -> int:
        return sum(record.sampled_tokens for record in self._records)

    def request(self, *, max_tokens: int, seed: int, timeout_s: float = inf) -> TurnRequest:
        """The next turn. `seed`: of the trajectory; the turn's own is drawn from it. Asking again
        for a turn whose engine died gives the same request."""
        if self.view[-1]["role"] == "assistant":
            raise ValueError(
                f"conversation {self.name}: the policy has spoken, and waits for words"
            )
        own = seed_of(seed, self.forks, self._records[-1].turns)
        self._asked = self._records[-1].request(
            self.name,
            max_tokens=max_tokens,
            seed=own,
            timeout_s=timeout_s,
            stop_ids=self._chat.stop_ids,
        )
        return self._asked

    def append(self, result: TurnResult) -> Parsed:
        """Record the turn that was asked for, and read it."""
        if self._asked is None:
            raise ValueError(f"conversation {self.name}: a turn that nobody asked for")
        turn = self.turns
        self._records[-1].append(self._asked, result)
        self._asked = None
        parsed = self._chat.parse(
            result.token_ids_N.tolist(),
            self.tools,
            thinking=self.thinking,
            turn=turn,
            inside=self._inside,
        )
        self._inside = parsed.inside
        self._say([spoken(parsed)])
        return parsed

    def answer(self, messages: Sequence[Message]) -> None:
        """Messages of tools or the user after a turn. After others, before the policy has spoken:
        as if all had come at once, for a turn of no words is none that it took."""
        record, extended = self._records[-1], None
        others = takewhile(lambda message: message["role"] != "assistant", reversed(self.view))
        if record.turns:
            new = [*reversed([*others]), *messages]
            record.take_back()
            extended = self._chat.extend(record.ids, new, thinking=self.thinking)
        self._say(messages)
        if extended is None:
            self._begin()
        else:
            record.extend(extended)

    def last_words(self, messages: Sequence[Message]) -> None:
        """Messages that no turn follows."""
        self._say(messages)

    def rewrite(self, messages: Sequence[Message], *, added: Sequence[Message] = ()) -> None:
        """Go on from a context that shows `messages` alone, in a new segment. `added`: those of
        them that nobody has said yet."""
        if list(messages[: len(self.opening)]) != list(self.opening):
            raise ValueError(f"conversation {self.name}: a rewrite left the opening out")
        self.transcript += added
        self.view = list(messages)
        self._begin()

    def segments(self) -> tuple[Segment, ...]:
        """What the trainer gets; contexts in which nothing was sampled are left out."""
        parts = (record.segment() for record in self._records)
        return tuple(part for part in parts if part is not None)

    def _say(self, messages: Sequence[Message]) -> None:
        self.view += messages
        self.transcript += messages

    def _begin(self) -> None:
        self._asked = None
        self._inside = False
        if self._records and not self._records[-1].turns:
            self._records.pop()
        ids = self._chat.opening(self.view, self.tools, thinking=self.thinking)
        self._records.append(SegmentRecord(self._prompt_id, ids))


def spoken(parsed: Parsed) -> dict[str, Any]:
    """A turn as a message. What was no call is one of the tool `MALFORMED`, so that its answer has
    something to answer."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            _call(call.call_id, MALFORMED, {"text": call.text})
            if isinstance(call, Malformed)
            else _call(call.call_id, call.name, call.arguments)
            for call in parsed.calls
        ]
    return message


def _call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": call_id, "type": "function", "function": function}
