"""A conversation on its way from a file to the tokens to learn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.data.items import digest
from keel.rl.turns import Message
from keel.rl.types import Segment

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A conversation, as it was written, or a window of a text."""

    origin: str
    """For messages: `file:line`, or the task and the index."""
    messages: tuple[Message, ...] = ()
    trained: tuple[int, ...] = ()
    """Places of the messages to learn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """As chat templates have them."""
    thinking: bool = False
    segments: tuple[Segment, ...] = ()
    """The tokens that a policy sampled here, where they are those of the model that learns; the
    window of a text."""
    document: str = ""
    """Of text: digest of the whole of it, which stands in the place of a question."""
    window: int = 0
    """Which of the document's."""
    prompt_id: str = ""
    """`keel.rl.types.Prompt.prompt_id`, of what a policy sampled."""
    unread: frozenset[str] = field(default_factory=frozenset[str])
    """Keys of the line that mean nothing here."""

    @staticmethod
    def of_text(origin: str, document: str, window: int, segment: Segment) -> Example:
        return Example(origin=origin, segments=(segment,), document=document, window=window)

    @property
    def question(self) -> str:
        """Digest of what is asked first, as `keel.data.items.Item.question` has it: conversations
        with the same one are not split between training and evaluation."""
        if self.document:
            return self.document
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        first = (*self.trained, *answers, len(self.messages))[0]
        asked = [dict(m) for m in self.messages[:first] if m["role"] != "system"]
        for message in asked:
            message["content"] = " ".join(str(message.get("content") or "").split())
        return digest(json.dumps(asked, sort_keys=True, default=str))

    @property
    def content(self) -> str:
        """Digest of all of it: a repeated conversation counts once."""
        if self.document:
            return f"{self.document}/{self.window}"
        whole = [list(self.messages), self.tools, self.trained, self.thinking]
        return digest(json.dumps(whole, sort_keys=True, default=str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One source, read."""

    examples: tuple[Example, ...]
    skipped: tuple[str, ...] = ()
    """One reason for each malformed line that was left out."""
    unselected: Mapping[str, int] = field(default_factory=dict[str, int])
    """Why trajectories were left out → how many."""


Render = Callable[[Example], Sequence[Segment]]
"""The contexts of a conversation and what the policy says in them. Raises ValueError for one that
the model's template cannot show."""
