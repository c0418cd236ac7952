"""Adds a system prompt to the first messages of an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from keel.agents.types import Environment, Opening, ToolResult, Transcript, Unscored
from keel.configs.system_prompts import with_system
from keel.rl.turns import Message, ToolCall
from keel.rl.types import Prompt, Verdict

SystemPrompt = Callable[[Sequence[str]], str]
"""Returns the system prompt, given the names of the available tools. "" means no prompt."""


class WithSystemPrompt:
    """Wraps an environment and adds a system prompt to its first messages."""

    def __init__(self, environment: Environment, prompt: SystemPrompt) -> None:
        self._environment, self._prompt = environment, prompt

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        opening = await self._environment.open(task, seed=seed)
        text = self._prompt([tool.name for tool in opening.tools])
        return replace(opening, messages=with_system(text, opening.messages))

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        return await self._environment.call(call, timeout_s=timeout_s)

    async def reply(self, turn: Message) -> Message | None:
        return await self._environment.reply(turn)

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored:
        return await self._environment.verdict(transcript)

    async def close(self) -> None:
        await self._environment.close()
