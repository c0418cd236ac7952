"""Authors with scripted replies, and runs of pipelines with them."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.commands.synthesize import _make_all, _Pipeline
from keel.rl.turns import Malformed, Message, Parsed, ToolCall, ToolSpec
from keel.synthesis.ledger import Ledger
from tests.rewards.judge.judge_server import Reply
from tests.waiting import PATIENCE_S

Writes = Callable[[Sequence[Message], Sequence[ToolSpec], str], Parsed | str]
"""Reply from messages, tools and purpose."""


def replied(
    content: str = "", *, calls: Sequence[ToolCall | Malformed] = (), cut: bool = False
) -> Parsed:
    return Parsed(content=content, reasoning="", closed=not cut, calls=tuple(calls))


@dataclass
class ScriptedAuthor:
    """Replies by a function, or by the entries of a list, in order."""

    script: Writes | list[Parsed | str]
    name: str = "scripted"
    asked: list[tuple[str, list[Message]]] = field(default_factory=list[Any])
    """(purpose, messages) of every call."""

    async def ask(
        self, messages: Sequence[Message], *, purpose: str, tools: Sequence[ToolSpec] = ()
    ) -> Parsed:
        self.asked.append((purpose, list(messages)))
        if isinstance(self.script, list):
            reply = self.script.pop(0)
        else:
            reply = self.script(messages, tools, purpose)
        return replied(reply) if isinstance(reply, str) else reply


def completion(message: dict[str, Any], finish: str = "stop", **usage: int) -> Reply:
    """Return a chat completion of an endpoint."""
    body = {
        **{"id": "1", "object": "chat.completion", "created": 0, "model": "m"},
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"total_tokens": sum(usage.values()), **usage} if usage else None,
    }
    return Reply(json.dumps(body))


def run_pipeline(
    pipeline: _Pipeline, folder: Path, say: Callable[[str], object] = print
) -> tuple[str, dict[str, Any]]:
    """Make all tasks, and return the reason for an early end and the report."""

    async def made() -> tuple[str, dict[str, Any]]:
        with Ledger(folder, {}) as ledger:
            async with pipeline:
                how: dict[str, Any] = {"at_once": 2, "say": say, "stop": asyncio.Event()}
                why = await _make_all(pipeline.keys, pipeline.make, ledger, **how)
            return why, ledger.report()

    return asyncio.run(asyncio.wait_for(made(), 2 * PATIENCE_S))
