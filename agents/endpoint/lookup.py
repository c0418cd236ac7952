"""The recorded turns, and which of them a request continues.

Messages are compared by keys that are equal whatever a client does to a message that it sends back.
Clients leave the thinking out, order keys anew, write arguments' JSON in another way, put None for
an empty content or a list of parts for a text, add names, and add or strip white space around the
assistant's words. (Contents and arguments are normalised by `keel.agents.endpoint.requests`.)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from keel.agents.conversation import SegmentRecord
from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.replies import Reply
from keel.agents.endpoint.requests import ChatRequest
from keel.rl.turns import Chat, Message, ToolSpec


@dataclass(slots=True, eq=False)
class Turn:
    """A recorded turn of the policy."""

    record: SegmentRecord
    end: int
    """Number of ids of `record` up to this turn's last sampled one."""
    tools: tuple[ToolSpec, ...]
    tools_key: str
    request_key: str
    reply: Reply
    inside: bool = False
    """Whether it left its thinking open for the next turn."""
    lost: bool = False
    """Whether the client disconnected before it received the answer, as far as can be known."""
    given_again: bool = False
    extended: bool = False
    """Whether another turn continues it: then the client has received it."""

    @property
    def ids(self) -> list[int]:
        return list(self.record.ids[: self.end])


class Turns:
    """All recorded turns of a trajectory."""

    def __init__(self, chat: Chat, *, thinking: bool) -> None:
        self._chat, self._thinking = chat, thinking
        self._after: dict[str, list[Turn]] = {}
        """Turns by the key of the messages up to and including the turn."""
        self._answers: dict[str, list[Turn]] = {}
        """Turns by the key of the request."""
        self._by_id: dict[str, Turn] = {}

    def add(self, turn: Turn, messages_key: str) -> None:
        self._after.setdefault(link(messages_key, turn.reply.message), []).append(turn)
        self._answers.setdefault(turn.request_key, []).append(turn)
        self._by_id[turn.reply.reply_id] = turn

    def lose(self, reply: Reply) -> None:
        turn = self._by_id[reply.reply_id]
        turn.lost, turn.given_again = True, False

    def lost(self, request_key: str, asked: ChatRequest) -> Turn | None:
        """Return an answer to the same request that its client never received, as far as can be
        known. For a client that reports a retry, any answer that no turn continues will do. Else
        None: a request that is repeated after its answer was received asks for another sample."""
        free = [
            turn
            for turn in self._answers.get(request_key, ())
            if not (turn.extended or turn.given_again)
        ]
        lost = [turn for turn in free if turn.lost]
        return next(iter([*lost, *free] if asked.is_retry else lost), None)

    def context(
        self,
        asked: ChatRequest,
        keys: Sequence[str],
        tools_key: str,
        growing: Collection[SegmentRecord],
    ) -> tuple[Turn | None, list[int]]:
        """Return the recorded turn that the request continues, or None, and the ids of its
        whole context, which begin with the turn's own.

        keys: of the prefixes of its messages. growing: segments in which a turn is being sampled.
        Raises ApiError for messages that the template refuses.
        """
        messages = asked.messages
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        new = messages[said[-1] + 1 :] if said else ()
        try:
            if said and all(message["role"] in ("tool", "user") for message in new):
                turns = self._after.get(keys[said[-1] + 1], ())
                same = [turn for turn in turns if turn.tools_key == tools_key]
                last = messages[said[-1]]
                thought = last.get("reasoning_content")
                # Of turns that look the same, the one whose thinking the client sent back, then one
                # with the same white space, then one that no turn continues, then the last.
                same.sort(
                    key=lambda t: (
                        thought is not None and t.reply.message.get("reasoning_content") == thought,
                        t.reply.message["content"] == last["content"],
                        not t.extended and t.record not in growing,
                    )
                )
                for turn in reversed(same):
                    ids = self._chat.extend(turn.ids, new, thinking=self._thinking)
                    if ids is not None:
                        return turn, ids
            shown = self.as_recorded(messages, keys)
            ids = self._chat.opening(shown, asked.tools, thinking=self._thinking)
            self._check_shown(shown, asked.tools, ids)
        except StopIteration as error:  # the chat format marks texts with two of these
            message = "messages: hold all private-use characters of Unicode's last plane"
            raise ApiError(400, message, param="messages") from error
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        return self._beginning_of(ids), ids

    def _beginning_of(self, ids: list[int]) -> Turn | None:
        """Return the last turn of the longest record that a rendered context begins with. A turn
        that left its thinking open is none: where the rendered context stands is not known."""
        ends = [
            turn
            for turn in self._by_id.values()
            if turn.end == len(turn.record.ids) < len(ids) and not turn.inside
        ]
        return max(
            (turn for turn in ends if ids[: turn.end] == turn.ids),
            key=lambda turn: turn.end,
            default=None,
        )

    def as_recorded(self, messages: Sequence[Message], keys: Sequence[str]) -> list[Message]:
        """Return the messages with the policy's turns as they were recorded: a client may have
        dropped their thinking, which the format shows until the next user's message."""
        shown: list[Message] = []
        for i, message in enumerate(messages):
            turns = self._after.get(keys[i + 1], ()) if message["role"] == "assistant" else ()
            shown.append(turns[-1].reply.message if turns else message)
        return shown

    def _check_shown(
        self, messages: list[Message], tools: Sequence[ToolSpec], ids: list[int]
    ) -> None:
        """Raise ApiError for a system message that the chat template leaves out, as some do with
        any but the first. Checks the first and the last place between messages of the same two
        roles, since each check renders the whole conversation."""
        roles = [message["role"] for message in messages]
        first: dict[tuple[str, ...], int] = {}
        last: dict[tuple[str, ...], int] = {}
        for i, message in enumerate(messages):
            if i and message["role"] == "system" and message["content"]:
                between = (roles[i - 1], *roles[i + 1 : i + 2])
                first.setdefault(between, i)
                last[between] = i
        for i in sorted({*first.values(), *last.values()}):
            others = messages[:i] + messages[i + 1 :]
            if self._chat.opening(others, tools, thinking=self._thinking) == ids:
                raise ApiError(
                    400,
                    f"messages[{i}].role: the model's chat template does not show a system "
                    "message at this place; put it first",
                    param=f"messages[{i}].role",
                )


START = ""
"""The key of no messages at all."""


def chain(messages: Sequence[Message]) -> list[str]:
    """Return the keys of all prefixes: entry i is the key of the first i messages."""
    keys = [START]
    for message in messages:
        keys.append(link(keys[-1], message))
    return keys


def link(key: str, message: Message) -> str:
    """Return the key of the messages of `key` with one more after them."""
    is_policys = message["role"] == "assistant"
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    same = [
        message["role"],
        message["content"].strip() if is_policys else message["content"],
        [
            [call["id"], call["function"]["name"], _number_free(call["function"]["arguments"])]
            for call in calls
        ],
        message.get("tool_call_id"),
    ]
    return _hash(key + json.dumps(same, sort_keys=True))


def key_of_tools(tools: Sequence[ToolSpec]) -> str:
    return _hash(json.dumps([tool.as_json() for tool in tools], sort_keys=True))


def _number_free(value: Any) -> Any:
    """Return a value with whole floats as integers: to many clients 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {k: _number_free(item) for k, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_number_free(item) for item in cast(list[Any], value)]
    return value


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
