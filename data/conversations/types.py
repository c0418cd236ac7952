"""Data types for conversations, from their file to the tokens to learn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.data.items import digest
from keel.rl.turns import Message
from keel.rl.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A conversation in its original form, or one window of a text."""

    origin: str
    """The source of the conversation, for messages: `file:line`, or the task and index."""
    messages: tuple[Message, ...] = ()
    trained: tuple[int, ...] = ()
    """The indices of the messages to learn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools, in the form that chat templates expect."""
    thinking: bool = False
    segments: tuple[Segment, ...] = ()
    """Tokens sampled by a policy with the same tokenizer, or the window of a text."""
    document: str = ""
    """A digest of the whole text, which is used as the question."""
    window: int = 0
    """The window's index within its document."""
    prompt_id: str = ""
    """The `keel.rl.types.Prompt.prompt_id` that a sampled conversation answers."""
    unread: frozenset[str] = field(default_factory=frozenset[str])
    """The keys in the line that are not used."""

    @property
    def question(self) -> str:
        """A digest of the first question, computed like `keel.data.items.Item.question`.

        Conversations with the same question are never split between training and evaluation.
        """
        if self.document:
            return self.document
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        first = (*self.trained, *answers, len(self.messages))[0]
        question = [dict(m) for m in self.messages[:first] if m["role"] != "system"]
        for message in question:
            message["content"] = " ".join(str(message.get("content") or "").split())
        return digest(json.dumps(question, sort_keys=True, default=str))

    @property
    def content(self) -> str:
        """A digest of the whole conversation, used to find duplicates."""
        if self.document:
            return f"{self.document}/{self.window}"
        whole = [list(self.messages), self.tools, self.trained, self.thinking]
        return digest(json.dumps(whole, sort_keys=True, default=str))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSource:
    """The conversations that were read from one source."""

    examples: tuple[Example, ...]
    skipped: tuple[str, ...] = ()
    """The reason for each malformed line."""
    unselected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Maps each reason to the number of trajectories dropped because of it."""


Render = Callable[[Example], Sequence[Segment]]
"""Renders a conversation as contexts in which the tokens to learn are marked.

Raises ValueError if the model's template cannot express the conversation.
"""
