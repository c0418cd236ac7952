"""One episode opened and closed before a run, so that what is wrong with its environment is said
before any engine starts."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path

from keel.agents.env_process.client import Hosted, Program, fork_server_for
from keel.agents.env_process.fork_server import ForkServer
from keel.agents.mcp_client import McpEpisode, McpServer
from keel.agents.system_prompt import SystemPrompt, WithSystemPrompt
from keel.agents.types import EnvironmentLost, Fault, Opening, Transcript, Unscored
from keel.rl.turns import Chat, Message, ToolSpec
from keel.rl.types import ENVIRONMENT, Prompt

_CURES: dict[Fault, str] = {
    "raised": "Fix what its own code raised, or give it other arguments",
    "exit": "Nothing in it may end the process while it opens",
    "crash": "Nothing in it may end the process while it opens",
    "hang": "Make it open faster, or raise the deadline open_s",
    "memory": "Make it smaller, or raise memory_mib",
    "large": "Make what it shows at its opening shorter",
    "garbage": "Its interpreter must be a Python from 3.9 on",
}
"""Where what is said of a fault holds none."""
_MISSING = re.compile(r"No module named '([\w.]+)'")


VERDICT_S = 20.0
"""Longest wait for a verdict, which is asked for to see whether there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What an environment's opening was like."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    opening_tokens: int | None
    """Of the messages and tools as the policy is given them. None: without a chat format."""
    seconds: float
    """To start its process and open it."""
    forked_s: float | None
    """For one more that is forked. None: each is started by itself."""
    why_not: str
    """Why it is not forked, where that was wanted."""
    parts: tuple[str, ...] | None
    """Of a verdict right after the opening. None: there was none then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What came of opening it."""

    opening: Opening
    grades: bool
    """Whether it has a verdict."""
    seconds: float
    parts: tuple[str, ...] | None
    ungraded: str
    """Why it gave no verdict."""


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
    """Open `task` for real, look at it, ask for a verdict, and close it. An environment may have no
    verdict before the policy has done anything: where that fails, a warning is logged.

    window: tokens of a conversation at most; prompt: as in `WithSystemPrompt`.
    Raises:
        ValueError: it cannot be opened, its tools cannot be called or shown, or its opening does
            not fit. Names the environment, says what failed in its own words, and the cure.
    """
    name = program.target if isinstance(program, Program) else program.name
    parent = fork_server_for(program) if isinstance(program, Program) else None
    forked_s: float | None = None
    why_not = ""
    try:
        look = await _opened(program, parent, prompt, task, seed)
        if parent is not None and not parent.why_not:
            again = await _opened(program, parent, prompt, task, seed, judged=False)
            forked_s = again.seconds
    except EnvironmentLost as error:
        raise ValueError(_why(program, name, task, error)) from error
    finally:
        if parent is not None:
            why_not = parent.why_not
            await parent.close()
    opening = look.opening
    if [message["content"] for message in opening.messages] == [f"(task {task.prompt_id})"]:
        raise ValueError(
            f"environment {name}: nothing opens its tasks (source: environment), and the policy "
            f"would be told '(task {task.prompt_id})'. Give it a method `opening(self, task, "
            "seed)` that returns the user's message or a list of messages; or take the tasks from "
            "a file (source: jsonl)"
        )
    if not look.grades and task.reward.get("kind") == ENVIRONMENT:
        raise ValueError(
            f"environment {name} has no `verdict`, and nothing else grades its tasks. Give it a "
            "method `verdict` that returns a number from 0 to 1, or a dict of them with one named "
            "`correct`; or take the tasks from a file (source: jsonl) whose lines have answers"
        )
    if look.ungraded:
        logging.getLogger(__name__).warning(
            "environment %s: no verdict right after the opening of task %s: %s. A trajectory "
            "without a verdict is left out. Fix `verdict`, unless it needs a turn of the policy's",
            name,
            task.prompt_id,
            look.ungraded,
        )
    tokens = None if chat is None else _tokens(name, task, opening, chat, thinking)
    if tokens is not None and tokens >= window:
        raise ValueError(
            f"environment {name}: the opening of task {task.prompt_id} has {tokens} tokens, its "
            f"{len(opening.tools)} tools among them, and agents.window = {window}. Raise "
            "agents.window, offer fewer tools, or say less at the opening"
        )
    return Probe(
        name=name,
        messages=opening.messages,
        tools=opening.tools,
        opening_tokens=tokens,
        seconds=look.seconds,
        forked_s=forked_s,
        why_not=why_not,
        parts=look.parts,
    )


async def _opened(
    program: Program | McpServer,
    parent: ForkServer | None,
    prompt: SystemPrompt,
    task: Prompt,
    seed: int,
    *,
    judged: bool = True,
) -> _Look:
    inside = Hosted(program, parent=parent) if isinstance(program, Program) else McpEpisode(program)
    environment = WithSystemPrompt(inside, prompt)
    began = time.monotonic()
    try:
        opening = await environment.open(task, seed=seed)
        seconds, ungraded = time.monotonic() - began, ""
        parts: tuple[str, ...] | None = None
        if judged and inside.grades:
            said = Transcript(messages=opening.messages, finish_reason="stop")
            try:
                async with asyncio.timeout(VERDICT_S):
                    verdict = await environment.verdict(said)
            except TimeoutError:
                verdict = Unscored(reason=f"it took more than {VERDICT_S:g} s")
            if isinstance(verdict, Unscored):
                ungraded = verdict.reason
            else:
                parts = tuple(verdict.parts)
            if (
                parts is not None
                and task.reward.get("kind") == ENVIRONMENT
                and "correct" not in parts
            ):
                ungraded = f"it has no part `correct`, and has {', '.join(parts) or 'none'}"
        return _Look(
            opening=opening,
            grades=inside.grades,
            seconds=seconds,
            parts=parts,
            ungraded=ungraded,
        )
    finally:
        await environment.close()


def _why(program: Program | McpServer, name: str, task: Prompt, error: EnvironmentLost) -> str:
    what = error.detail.removeprefix(f"{name}: ")
    said = f". Its last words: {error.words}" if error.words else ""
    where = f"folder {program.folder or Path.cwd()}"
    if isinstance(program, Program):
        where = f"interpreter {program.python}, {where}"
    cure = _CURES.get(error.fault, "")
    missing = _MISSING.search(what)
    if missing and error.fault == "raised" and isinstance(program, Program):
        package = missing[1].partition(".")[0]
        cure = f"Install what it lacks: {program.python} -m pip install {package}"
    parts = (f"{what} ({where}){said}", cure)
    return f"environment {name} cannot be opened for task {task.prompt_id}: " + ". ".join(
        filter(None, parts)
    )


def _tokens(name: str, task: Prompt, opening: Opening, chat: Chat, thinking: bool) -> int:
    if opening.messages[-1]["role"] == "assistant":
        raise ValueError(
            f"environment {name}: the opening of task {task.prompt_id} ends with words of the "
            "assistant, and the policy has nothing to answer. End it with the user's"
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
            f"environment {name} has tools ({', '.join(tool.name for tool in opening.tools)}), and "
            "the tokenizer's chat template shows none. Save the tokenizer with a chat_template "
            "that lists the tools, or choose a model whose template does"
        )
    return len(ids)
