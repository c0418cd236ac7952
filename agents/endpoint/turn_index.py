"""Stores the recorded turns and messages, and finds the turn that a request continues.

Clients may change messages before they send them back. Some drop the thinking, reorder object keys,
reformat the arguments, add names, add or strip white space around the assistant's text, or send an
empty content as None and a text as a list of parts. Messages are therefore compared by keys that do
not depend on such changes. (`keel.agents.endpoint.requests` normalizes contents and arguments.)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from keel.agents.conversation import SegmentRecord
from keel.agents.endpoint.replies import Reply
from keel.agents.endpoint.requests import ApiError, ChatRequest
from keel.rl.turns import Chat, Message, ToolSpec
from keel.rl.types import PROGRAM, Dialogue


@dataclass(slots=True, eq=False)
class Turn:
    """A recorded turn of the policy."""

    record: SegmentRecord
    end: int
    """Number of ids in `record` up to the last one that this turn sampled."""
    tools: tuple[ToolSpec, ...]
    tools_key: str
    request_key: str
    reply: Reply
    in_thinking: bool = False
    """True if the turn ended inside its thinking, which the next turn continues."""
    lost: bool = False
    """True if the client seems to have disconnected before it received the answer."""
    resent: bool = False
    extended: bool = False
    """True if another turn continues this one, so the client must have received it."""

    @property
    def ids(self) -> list[int]:
        return list(self.record.ids[: self.end])


class TurnIndex:
    """All recorded turns in a trajectory."""

    def __init__(self, chat: Chat, *, thinking: bool) -> None:
        self._chat, self._thinking = chat, thinking
        self._by_messages: dict[str, list[Turn]] = {}
        """Turns by the key of all messages up to and including the turn."""
        self._by_request: dict[str, list[Turn]] = {}
        self._by_reply_id: dict[str, Turn] = {}

    def add(self, turn: Turn, messages_key: str) -> None:
        key = extend_key(messages_key, turn.reply.message)
        self._by_messages.setdefault(key, []).append(turn)
        self._by_request.setdefault(turn.request_key, []).append(turn)
        self._by_reply_id[turn.reply.reply_id] = turn

    def mark_lost(self, reply: Reply) -> None:
        turn = self._by_reply_id[reply.reply_id]
        turn.lost, turn.resent = True, False

    def find_lost(self, request_key: str, request: ChatRequest) -> Turn | None:
        """Return a turn that answered the same request but never reached its client, or None.

        If the client reports a retry, any turn that no later turn continues can be returned.
        Otherwise, a repeated request whose answer was received is taken to ask for another sample.
        """
        free = [
            turn
            for turn in self._by_request.get(request_key, ())
            if not (turn.extended or turn.resent)
        ]
        lost = [turn for turn in free if turn.lost]
        return next(iter([*lost, *free] if request.is_retry else lost), None)

    def find_context(
        self,
        request: ChatRequest,
        keys: Sequence[str],
        tools_key: str,
        growing: Collection[SegmentRecord],
    ) -> tuple[Turn | None, list[int]]:
        """Return the recorded turn that a request continues, or None, and the ids of the full
        context.

        The ids begin with those of the turn. `keys` are the prefix keys of the request's messages,
        and `growing` are the records in which a turn is being sampled. Raises ApiError if the chat
        template rejects the messages.
        """
        messages = request.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        new = messages[turns[-1] + 1 :] if turns else ()
        try:
            if turns and all(message["role"] in ("tool", "user") for message in new):
                candidates = [
                    turn
                    for turn in self._by_messages.get(keys[turns[-1] + 1], ())
                    if turn.tools_key == tools_key
                ]
                last = messages[turns[-1]]
                thought = last.get("reasoning_content")
                # Prefer the turn whose thinking the client sent back, then one with the same white
                # space, then one that no turn continues, then the latest.
                candidates.sort(
                    key=lambda t: (
                        thought is not None and t.reply.message.get("reasoning_content") == thought,
                        t.reply.message["content"] == last["content"],
                        not t.extended and t.record not in growing,
                    )
                )
                for turn in reversed(candidates):
                    ids = self._chat.extend(turn.ids, new, thinking=self._thinking)
                    if ids is not None:
                        return turn, ids
            recorded = self.as_recorded(messages, keys)
            ids = self._chat.opening(recorded, request.tools, thinking=self._thinking)
            self._check_system_messages(recorded, request.tools, ids)
        except StopIteration as error:  # the chat format marks texts with two of these
            message = "messages: hold all private-use characters of Unicode's last plane"
            raise ApiError(400, message, param="messages") from error
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        return self._longest_prefix(ids), ids

    def _longest_prefix(self, ids: list[int]) -> Turn | None:
        """Return the last turn of the longest record that is a prefix of `ids`.

        Turns that ended inside their thinking are skipped, because the rendered text does not show
        how far the thinking had come.
        """
        ends = [
            turn
            for turn in self._by_reply_id.values()
            if turn.end == len(turn.record.ids) < len(ids) and not turn.in_thinking
        ]
        return max(
            (turn for turn in ends if ids[: turn.end] == turn.ids),
            key=lambda turn: turn.end,
            default=None,
        )

    def as_recorded(self, messages: Sequence[Message], keys: Sequence[str]) -> list[Message]:
        """Return the messages with each assistant message replaced with the recorded one.

        This restores thinking that the client dropped but the chat format shows until the next user
        message.
        """
        recorded: list[Message] = []
        for i, message in enumerate(messages):
            is_turn = message["role"] == "assistant"
            turns = self._by_messages.get(keys[i + 1], ()) if is_turn else ()
            recorded.append(turns[-1].reply.message if turns else message)
        return recorded

    def _check_system_messages(
        self, messages: list[Message], tools: Sequence[ToolSpec], ids: list[int]
    ) -> None:
        """Check that the chat template shows every system message, since some templates drop all
        but the first.

        Each check renders the whole conversation. System messages between the same two roles are
        treated alike, so only the first and the last of them are checked. Raises ApiError if one is
        dropped.
        """
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


@dataclass(slots=True)
class _OpenDialogue:
    """A conversation that further turns may still extend."""

    messages: list[Message]
    sampled: list[int]
    tools: tuple[ToolSpec, ...]
    tools_key: str
    last_turn: str = ""
    """Key of all messages up to the policy's last turn."""


class MessageLog:
    """All messages of a trajectory, both in the order of the turns and grouped by conversation.

    Forks and sub-agents have conversations of their own.
    """

    def __init__(self) -> None:
        self.opening: tuple[Message, ...] = ()
        """The messages of the request for the first turn."""
        self._all: list[Message] = []
        self._keys: set[str] = set()
        """Prefix keys of the messages in `_all`."""
        self._dialogues: list[_OpenDialogue] = []

    @property
    def after_opening(self) -> tuple[Message, ...]:
        return tuple(self._all[len(self.opening) :])

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
        self,
        messages: Sequence[Message],
        keys: Sequence[str],
        reply: Message,
        *,
        tools: tuple[ToolSpec, ...],
        tools_key: str,
        verbatim: bool,
    ) -> None:
        """Add the new messages of a request and the turn that answers it.

        `messages` contain the policy's turns as recorded, and `keys` are the prefix keys of the
        messages. `verbatim` says that `reply` contains everything that was sampled, so the policy
        can learn from it.
        """
        if not self.opening:
            self.opening = tuple(messages)
        for message, key in zip(messages, keys[1:], strict=True):
            if key not in self._keys:
                self._keys.add(key)
                author = {"name": PROGRAM} if message["role"] == "assistant" else {}
                self._all.append({**message, **author})
        self._all.append(reply)
        last_turn = extend_key(keys[-1], reply)
        self._keys.add(last_turn)

        prefixes = set(keys)
        continued = [
            one
            for one in self._dialogues
            if one.tools_key == tools_key and one.last_turn in prefixes
        ]
        if continued:
            dialogue = max(continued, key=lambda one: len(one.messages))
            dialogue.messages += messages[len(dialogue.messages) :]
        else:
            dialogue = _OpenDialogue(list(messages), [], tools, tools_key)
            self._dialogues.append(dialogue)
        if verbatim:
            dialogue.sampled.append(len(dialogue.messages))
        dialogue.messages.append(reply)
        dialogue.last_turn = last_turn


def prefix_keys(messages: Sequence[Message]) -> list[str]:
    """Return a key for each prefix of the messages. Entry i is the key for the first i messages."""
    keys = [""]
    for message in messages:
        keys.append(extend_key(keys[-1], message))
    return keys


def extend_key(key: str, message: Message) -> str:
    """Return the key for a message list that has `message` appended, given the key for the list."""
    is_turn = message["role"] == "assistant"
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    identity = [
        message["role"],
        message["content"].strip() if is_turn else message["content"],
        [
            [call["id"], call["function"]["name"], _whole_floats(call["function"]["arguments"])]
            for call in calls
        ],
        message.get("tool_call_id"),
    ]
    return _hash(key + json.dumps(identity, sort_keys=True))


def key_of_tools(tools: Sequence[ToolSpec]) -> str:
    return _hash(json.dumps([tool.as_json() for tool in tools], sort_keys=True))


def _whole_floats(value: Any) -> Any:
    """Replace whole floats with integers, because many clients turn 1.0 into 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {k: _whole_floats(item) for k, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_whole_floats(item) for item in cast(list[Any], value)]
    return value


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
