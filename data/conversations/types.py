"""Data types for conversations, from the file format to the training tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.data.items import digest, question_of
from keel.rl.turns import Message
from keel.rl.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One training example: a conversation as it was read, or one window of a text."""

    origin: str
    """Origin of the conversation for messages: `file:line`, or the task and index."""
    messages: tuple[Message, ...] = ()
    trained: tuple[int, ...] = ()
    """Indices of the messages to train on."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools in the format that chat templates expect."""
    thinking: bool = False
    segments: tuple[Segment, ...] = ()
    """Known tokens: those sampled by a policy with the same tokenizer, or the window of a text."""
    document: str = ""
    """A digest of the whole document. It serves as the example's question."""
    window: int = 0
    """Index of the window in its document."""
    prompt_id: str = ""
    """The `keel.rl.types.Prompt.prompt_id` of the prompt that a sampled conversation answers."""
    unread: frozenset[str] = field(default_factory=frozenset[str])
    """Keys in the line that Keel does not use."""

    @property
    def question(self) -> str:
        """Return a digest of the first question, like `keel.data.items.Item.question`.
        Conversations with the same question all go to training or all to evaluation."""
        if self.document:
            return self.document
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        first = (*self.trained, *answers, len(self.messages))[0]
        return question_of(self.messages[:first])

    @property
    def content(self) -> str:
        """Return a digest of the whole conversation, which finds duplicates."""
        if self.document:
            return f"{self.document}/{self.window}"
        whole = [list(self.messages), self.tools, self.trained, self.thinking]
        return digest(json.dumps(whole, sort_keys=True, default=str))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSource:
    """The conversations read from one source."""

    examples: tuple[Example, ...]
    skipped: tuple[str, ...] = ()
    """For each malformed line, the reason it was skipped."""
    unselected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of trajectories dropped for each reason."""


Render = Callable[[Example], Sequence[Segment]]
"""Renders a conversation as contexts and marks the tokens to train on.

Raises ValueError if the model's chat template cannot express the conversation.
"""
