"""Tries an environment before a run, so that problems surface before the engines start."""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from keel.agents.env_process.client import Hosted, fork_server_for
from keel.agents.env_process.process import Program
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

_VERDICT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    opening_tokens: int | None
    """Number of tokens in the first messages and the tools, or None if there is no chat format."""
    seconds: float
    fork_disabled_reason: str
    parts: tuple[str, ...] | None
    """Names of the `parts` in a verdict requested right after the opening, or None if there is no
    verdict."""


async def probe(
    program: Program | McpServer,
    *,
    task: Prompt,
    seed: int,
    chat: Chat | None,
    window: int,
    thinking: bool,
    prompt: SystemPrompt = lambda _: "",
) -> _Probe:
    """Open an episode for `task`, request a verdict and close it again. A failed verdict is only
    logged, because the environment may need a turn first. Raises ValueError if the environment does
    not open, its tools are invalid, or its opening exceeds the context window."""
    fork_server, disabled_reason = None, ""
    if isinstance(program, Program):
        name, where = program.target, f"interpreter {program.python}, "
        fork_server = fork_server_for(program)
        inner = Hosted(program, fork_server=fork_server)
    else:
        name, where = program.name, ""
        inner = McpEpisode(program)
    environment = WithSystemPrompt(inner, prompt)
    verdict: Verdict | Unscored | None = None
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
        raise ValueError(
            f"environment {name} cannot be opened for task {task.prompt_id}: "
            f"{error.detail.removeprefix(f'{name}: ')} "
            f"({where}folder {program.folder or Path.cwd()}){output}"
        ) from error
    finally:
        await environment.close()
        if fork_server is not None:
            disabled_reason = fork_server.disabled_reason
            await fork_server.close()
    is_grader = task.reward.get("kind") == ENVIRONMENT
    problem = ""
    if [message["content"] for message in opening.messages] == [f"(task {task.prompt_id})"]:
        problem = (
            "it does not open its tasks, and they have no prompt (source: environment). Add a "
            "method `opening(self, task, seed)` that returns the user's message or a list of "
            "messages, or take the tasks from a file (source: jsonl)"
        )
    elif is_grader and not inner.grades:
        problem = (
            "it has no `verdict`, and nothing else grades its tasks. Add a method `verdict` that "
            "returns a number from 0 to 1, or a dict of them with one named `correct`, or take the "
            "tasks from a file (source: jsonl) whose lines have answers"
        )
    if problem:
        raise ValueError(f"environment {name}: {problem}")
    if isinstance(verdict, Unscored):
        problem = verdict.reason
    elif verdict is not None and is_grader and "correct" not in verdict.parts:
        problem = f"it has no part `correct`, and has {', '.join(verdict.parts) or 'none'}"
    if problem:
        logging.getLogger(__name__).warning(
            "environment %s: no verdict right after the opening of task %s: %s. Trajectories "
            "without a verdict are dropped. Fix `verdict`, unless it needs a turn first",
            *(name, task.prompt_id, problem),
        )
    tokens = None
    if chat is not None:
        try:
            tokens = _count_tokens(opening, chat, window, thinking)
        except ValueError as error:
            message = f"environment {name}: the opening of task {task.prompt_id} {error}"
            raise ValueError(message) from error
    return _Probe(
        messages=opening.messages,
        tools=opening.tools,
        opening_tokens=tokens,
        seconds=seconds,
        fork_disabled_reason=disabled_reason,
        parts=tuple(verdict.parts) if isinstance(verdict, Verdict) else None,
    )


def _count_tokens(opening: Opening, chat: Chat, window: int, thinking: bool) -> int:
    if opening.messages[-1]["role"] == "assistant":
        raise ValueError("ends with an assistant message. End it with a user message")
    try:
        ids = chat.opening(opening.messages, opening.tools, thinking=thinking)
        plain = chat.opening(opening.messages, (), thinking=thinking) if opening.tools else []
    except ValueError as error:
        raise ValueError(f"cannot be rendered: {error}") from error
    if ids == plain:
        raise ValueError("has tools, which the tokenizer's chat template does not show")
    if len(ids) >= window:
        raise ValueError(
            f"with {len(opening.tools)} tools has {len(ids)} tokens, and agents.window = {window}. "
            "Raise agents.window, offer fewer tools, or shorten the opening"
        )
    return len(ids)
