"""Authors with scripted replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keel.rl.turns import Message, ToolSpec
from keel.synthesis.author import AuthorReply

Writes = Callable[[Sequence[Message], Sequence[ToolSpec], str], AuthorReply | str]
"""Reply from messages, tools and purpose."""


@dataclass
class ScriptedAuthor:
    """Replies by a function, or by the entries of a list, in order."""

    script: Writes | list[AuthorReply | str]
    name: str = "scripted"
    asked: list[tuple[str, list[Message]]] = field(default_factory=list[Any])
    """(purpose, messages) of every call."""

    async def ask(
        self, messages: Sequence[Message], *, purpose: str, tools: Sequence[ToolSpec] = ()
    ) -> AuthorReply:
        self.asked.append((purpose, list(messages)))
        if isinstance(self.script, list):
            reply = self.script.pop(0)
        else:
            reply = self.script(messages, tools, purpose)
        return AuthorReply(content=reply) if isinstance(reply, str) else reply
