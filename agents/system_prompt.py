"""An environment whose conversation begins with a system message that Keel puts there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from keel.agents.types import Environment, Opening, ToolResult, Transcript, Unscored
from keel.configs.system_prompts import with_system
from keel.rl.turns import Message, ToolCall
from keel.rl.types import Prompt, Verdict

SystemPrompt = Callable[[Sequence[str]], str]
"""From the names of the tools on offer to the text; empty: none."""


class WithSystemPrompt:
    """Implements `keel.agents.types.Environment`: as the one inside, but for its opening."""

    def __init__(self, inside: Environment, prompt: SystemPrompt) -> None:
        self._inside, self._prompt = inside, prompt

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        opening = await self._inside.open(task, seed=seed)
        text = self._prompt([tool.name for tool in opening.tools])
        return replace(opening, messages=with_system(text, opening.messages))

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        return await self._inside.call(call, timeout_s=timeout_s)

    async def reply(self, said: Message) -> Message | None:
        return await self._inside.reply(said)

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored:
        return await self._inside.verdict(transcript)

    async def close(self) -> None:
        await self._inside.close()
