"""Conversations between their file and the tokens to learn."""

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
    """A conversation as written, or a window of a text."""

    origin: str
    """`file:line`, or task and index, for messages."""
    messages: tuple[Message, ...] = ()
    trained: tuple[int, ...] = ()
    """Indices of the messages to learn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the form of chat templates."""
    thinking: bool = False
    segments: tuple[Segment, ...] = ()
    """Tokens that a policy with the same tokenizer sampled, or the window of a text."""
    document: str = ""
    """Digest of the whole text, which serves as the question."""
    window: int = 0
    """Index of the window in its document."""
    prompt_id: str = ""
    """`keel.rl.types.Prompt.prompt_id` of a sampled conversation."""
    unread: frozenset[str] = field(default_factory=frozenset[str])
    """Unused keys of the line."""

    @staticmethod
    def of_text(origin: str, document: str, window: int, segment: Segment) -> Example:
        return Example(origin=origin, segments=(segment,), document=document, window=window)

    @property
    def question(self) -> str:
        """Digest of the first question, as in `keel.data.items.Item.question`. Conversations with
        equal questions are not split between training and evaluation."""
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
        """Digest of the whole conversation, for deduplication."""
        if self.document:
            return f"{self.document}/{self.window}"
        whole = [list(self.messages), self.tools, self.trained, self.thinking]
        return digest(json.dumps(whole, sort_keys=True, default=str))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSource:
    """The conversations of one source."""

    examples: tuple[Example, ...]
    skipped: tuple[str, ...] = ()
    """One reason for each malformed line."""
    unselected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Reason for dropping trajectories → their number."""


Render = Callable[[Example], Sequence[Segment]]
"""Renders a conversation as contexts with marked tokens to learn. Raises ValueError if the model's
template cannot express it."""
