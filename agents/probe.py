"""Opens one episode before a run, so that problems are reported before the engines start."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from keel.agents.env_process.client import Hosted
from keel.agents.env_process.fork_server import fork_server_for
from keel.agents.env_process.program import Program
from keel.agents.mcp_client import McpEpisode, McpServer
from keel.agents.types import (
    EnvironmentLost,
    Opening,
    SystemPrompt,
    Transcript,
    Unscored,
    WithSystemPrompt,
)
from keel.rl.turns import Chat, Message, ToolSpec
from keel.rl.types import ENVIRONMENT, Prompt, Verdict

_CURES = {
    "hang": ". Make it open faster, or raise the deadline open_s",
    "memory": ". Make it smaller, or raise memory_mib",
}
_VERDICT_S = 20.0
"""Time limit for the verdict in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of opening an environment."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    opening_tokens: int | None
    """Number of tokens in the opening messages and tools, or None if there is no chat format."""
    seconds: float
    """Seconds that it took to start and open the first episode."""
    fork_disabled_reason: str
    """Why episodes are not forked even though `preload` is set."""
    parts: tuple[str, ...] | None
    """The `parts` of a verdict requested right after the opening, or None without a verdict."""


async def probe(
    program: Program | McpServer,
    *,
    task: Prompt,
    seed: int,
    chat: Chat | None,
    window: int,
    thinking: bool,
    prompt: SystemPrompt = lambda _: "",
) -> Probe:
    """Open an episode for `task`, ask for a verdict and close the episode. A failed verdict is only
    logged, since it may need a turn first. Raises ValueError if the environment cannot be opened,
    its tools are invalid, or its opening does not fit the window."""
    name = program.target if isinstance(program, Program) else program.name
    fork_server = fork_server_for(program) if isinstance(program, Program) else None
    inner = (
        Hosted(program, fork_server=fork_server)
        if isinstance(program, Program)
        else McpEpisode(program)
    )
    environment = WithSystemPrompt(inner, prompt)
    verdict: Verdict | Unscored | None = None
    disabled_reason = ""
    began = time.monotonic()
    try:
        opening = await environment.open(task, seed=seed)
        seconds = time.monotonic() - began
        if inner.grades:
            transcript = Transcript(messages=opening.messages, finish_reason="stop")
            try:
                async with asyncio.timeout(_VERDICT_S):
                    verdict = await environment.verdict(transcript)
            except TimeoutError:
                verdict = Unscored(reason=f"it took more than {_VERDICT_S:g} s")
    except EnvironmentLost as error:
        output = f". Its last words: {error.output}" if error.output else ""
        where = f"folder {program.folder or Path.cwd()}"
        if isinstance(program, Program):
            where = f"interpreter {program.python}, {where}"
        raise ValueError(
            f"environment {name} cannot be opened for task {task.prompt_id}: "
            f"{error.detail.removeprefix(f'{name}: ')} ({where}){output}"
            f"{_CURES.get(error.fault, '')}"
        ) from error
    finally:
        await environment.close()
        if fork_server is not None:
            disabled_reason = fork_server.disabled_reason
            await fork_server.close()
    if [message["content"] for message in opening.messages] == [f"(task {task.prompt_id})"]:
        raise ValueError(
            f"environment {name} does not open its tasks, and they have no prompt (source: "
            "environment). Add a method `opening(self, task, seed)` that returns the user's "
            "message or a list of messages, or take the tasks from a file (source: jsonl)"
        )
    is_grader = task.reward.get("kind") == ENVIRONMENT
    if not inner.grades and is_grader:
        raise ValueError(
            f"environment {name} has no `verdict`, and nothing else grades its tasks. Add a method "
            "`verdict` that returns a number from 0 to 1, or a dict of them with one named "
            "`correct`, or take the tasks from a file (source: jsonl) whose lines have answers"
        )
    problem = verdict.reason if isinstance(verdict, Unscored) else ""
    if isinstance(verdict, Verdict) and is_grader and "correct" not in verdict.parts:
        problem = f"it has no part `correct`, and has {', '.join(verdict.parts) or 'none'}"
    if problem:
        logging.getLogger(__name__).warning(
            "environment %s: no verdict right after the opening of task %s: %s. Trajectories "
            "without a verdict are dropped. Fix `verdict`, unless it needs a turn first",
            name,
            task.prompt_id,
            problem,
        )
    tokens = None if chat is None else _count_tokens(name, task, opening, chat, thinking)
    if tokens is not None and tokens >= window:
        raise ValueError(
            f"environment {name}: the opening of task {task.prompt_id} with {len(opening.tools)} "
            f"tools has {tokens} tokens, and agents.window = {window}. Raise agents.window, offer "
            "fewer tools, or shorten the opening"
        )
    return Probe(
        messages=opening.messages,
        tools=opening.tools,
        opening_tokens=tokens,
        seconds=seconds,
        fork_disabled_reason=disabled_reason,
        parts=tuple(verdict.parts) if isinstance(verdict, Verdict) else None,
    )


def _count_tokens(name: str, task: Prompt, opening: Opening, chat: Chat, thinking: bool) -> int:
    if opening.messages[-1]["role"] == "assistant":
        raise ValueError(
            f"environment {name}: the opening of task {task.prompt_id} ends with an assistant "
            "message. End it with a user message for the policy to answer"
        )
    try:
        ids = chat.opening(opening.messages, opening.tools, thinking=thinking)
        plain = chat.opening(opening.messages, (), thinking=thinking) if opening.tools else []
    except ValueError as error:
        raise ValueError(
            f"environment {name}: the opening of task {task.prompt_id} cannot be rendered: {error}"
        ) from error
    if ids == plain:
        raise ValueError(
            f"environment {name} has tools, and the tokenizer's chat template shows none of them. "
            "Use a tokenizer whose chat_template lists tools"
        )
    return len(ids)
