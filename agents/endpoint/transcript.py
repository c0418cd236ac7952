"""The messages of a trajectory: all of them in the order of the turns, and each conversation's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keel.agents.endpoint.lookup import link
from keel.rl.turns import Message, ToolSpec
from keel.rl.types import PROGRAM, Dialogue


@dataclass(slots=True)
class _Growing:
    """A conversation whose next turn is yet to come."""

    messages: list[Message]
    sampled: list[int]
    tools: tuple[ToolSpec, ...]
    tools_key: str
    last_turn: str = ""
    """Key of the messages up to the policy's last turn."""


class Transcript:
    """The messages of a trajectory, forks and sub-agents included."""

    def __init__(self) -> None:
        self.opening: tuple[Message, ...] = ()
        """The messages of the first turn's request."""
        self._all: list[Message] = []
        self._keys: set[str] = set()
        """Keys of the messages in `_all`."""
        self._conversations: list[_Growing] = []

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
            for one in self._conversations
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
        """Add a request's new messages and the turn that answers it.

        messages: with the policy's turns as they were recorded. keys: of the messages' prefixes.
        verbatim: whether `reply` holds all that was sampled, so that it can be learned from.
        """
        if not self.opening:
            self.opening = tuple(messages)
        for message, key in zip(messages, keys[1:], strict=True):
            if key not in self._keys:
                self._keys.add(key)
                own = {"name": PROGRAM} if message["role"] == "assistant" else {}
                self._all.append({**message, **own})
        self._all.append(reply)
        last_turn = link(keys[-1], reply)
        self._keys.add(last_turn)

        prefixes = set(keys)
        before = [
            one
            for one in self._conversations
            if one.tools_key == tools_key and one.last_turn in prefixes
        ]
        if before:
            conversation = max(before, key=lambda one: len(one.messages))
            conversation.messages += messages[len(conversation.messages) :]
        else:
            conversation = _Growing(list(messages), [], tools, tools_key)
            self._conversations.append(conversation)
        if verbatim:
            conversation.sampled.append(len(conversation.messages))
        conversation.messages.append(reply)
        conversation.last_turn = last_turn
