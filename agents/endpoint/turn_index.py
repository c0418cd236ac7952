"""Stores the recorded turns and messages, and finds the turn that a request continues. Clients may
drop the thinking, reorder keys, reformat arguments, add names or strip white space. Messages are
therefore compared by keys that do not depend on such changes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

from keel.agents.conversation import SegmentRecord
from keel.agents.endpoint.requests import ApiError, ChatRequest
from keel.rl.turns import USER_ROLES, Chat, Message, ToolSpec
from keel.rl.types import PROGRAM, Dialogue


@dataclass(slots=True, eq=False)
class Turn:
    """A recorded turn of the policy."""

    record: SegmentRecord
    end: int
    """Number of token ids in `record` up to and including the last token of this turn."""
    tools_key: str
    message: Message
    in_thinking: bool = False
    """True if the turn ended while thinking. The next turn then continues the thinking."""
    extended: bool = False

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


class TurnIndex:
    """All turns and messages of a trajectory, both in the order of the turns and by
    conversation."""

    def __init__(self, chat: Chat, *, thinking: bool) -> None:
        self._chat, self._thinking = chat, thinking
        self._turns: list[Turn] = []
        self._by_messages: dict[str, list[Turn]] = {}
        """The turns, keyed by all messages up to and including the turn."""
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

    def add(self, request: ChatRequest, keys: Sequence[str], turn: Turn, *, verbatim: bool) -> None:
        """Add the new messages of a request and the turn that answers it. `verbatim` is True if the
        turn's message contains everything that was sampled, so that the policy can be trained on
        it."""
        messages = self._as_recorded(request.messages, keys)
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
        if continued:
            dialogue = max(continued, key=lambda one: len(one.messages))
            dialogue.messages += messages[len(dialogue.messages) :]
        else:
            dialogue = _OpenDialogue(messages, request.tools, turn.tools_key)
            self._dialogues.append(dialogue)
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
    ) -> tuple[Turn | None, list[int]]:
        """Find the recorded turn that a request continues, if any, and return it with the token ids
        of the request's context. These begin with the ids of the turn. `growing` contains the
        records in which a turn is still being sampled."""
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
                        not t.extended and t.record not in growing,
                    ),
                )
                for turn in reversed(candidates):
                    ids = self._chat.extend(turn.ids, new, thinking=self._thinking)
                    if ids is not None:
                        return turn, ids
            messages = self._as_recorded(messages, keys)
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

    def _as_recorded(self, messages: Sequence[Message], keys: Sequence[str]) -> list[Message]:
        """Return the messages with the policy's messages replaced by the recorded ones, because the
        client may have dropped the thinking."""
        recorded: list[Message] = []
        for message, key in zip(messages, keys[1:], strict=True):
            turns = self._by_messages.get(key) if message["role"] == "assistant" else None
            recorded.append(turns[-1].message if turns else message)
        return recorded


def prefix_keys(messages: Sequence[Message]) -> list[str]:
    """Return a key for each prefix of the messages. Entry i is the key of the first i messages."""
    keys = [""]
    for message in messages:
        keys.append(_extend_key(keys[-1], message))
    return keys


def _extend_key(key: str, message: Message) -> str:
    """Given the key of a list of messages, return its key after `message` is appended."""
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
    """Convert whole floats such as 1.0 to integers, because many clients do the same."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {k: _whole_floats(item) for k, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_whole_floats(item) for item in cast(list[Any], value)]
    return value


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
