"""Tries an environment or an agent program before a run, so that problems surface before the
engines start."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from keel.agents.endpoint.program import ProgramEpisode
from keel.agents.endpoint.server import Endpoint
from keel.agents.env_process.client import ForkServerClient, ProcessEnvironment
from keel.agents.env_process.launch import AgentProgram, EnvironmentProgram
from keel.agents.episode import Budget, EpisodeSettings
from keel.agents.mcp_client import McpEnvironment
from keel.agents.types import Environment, EnvironmentLost, Opening
from keel.configs.system_prompts import with_system
from keel.rl.turns import Chat, TurnRequest, TurnResult
from keel.rl.types import ENVIRONMENT, Prompt, Verdict

_SHOWN_TOOLS = 8


async def try_environment(
    program: EnvironmentProgram,
    *,
    task: Prompt,
    seed: int,
    chat: Chat,
    window: int,
    thinking: bool,
    prompt: Callable[[Sequence[str]], str] = lambda _: "",
) -> tuple[str, Collection[str] | None]:
    """Open an episode for `task`, request a verdict and close it again. Returns a description of
    the episode and the names of the verdict's parts. If there is no verdict, which the environment
    may give only after a turn, the description has a warning and the names are None. Raises
    ValueError if the environment can't be opened, its tools are invalid, or its opening messages
    don't fit in the context window."""
    name = program.name
    if program.target:
        fork_server = ForkServerClient(program)
        environment = ProcessEnvironment(program, fork_server=fork_server)
    else:
        fork_server, environment = None, McpEnvironment(program)
    began = time.monotonic()
    try:
        opening = await environment.open(task, seed=seed)
        seconds = time.monotonic() - began
        reason = fork_server.disabled_reason if fork_server is not None else ""
        try:
            verdict = await environment.verdict(opening.messages, "stop")
        except EnvironmentLost as error:
            verdict = str(error)
    except EnvironmentLost as error:
        python = f"interpreter {program.python}, " if program.target else ""
        output = f". Its output ends with: {error.output}" if error.output else ""
        raise ValueError(
            f"environment {name} cannot be opened for task {task.prompt_id}: "
            f"{error.detail.removeprefix(f'{name}: ')} "
            f"({python}folder {program.folder or Path.cwd()}){output}"
        ) from error
    finally:
        await environment.close()
        if fork_server is not None:
            await fork_server.close()
    is_grader = task.reward.get("kind") == ENVIRONMENT
    problem = ""
    if [message["content"] for message in opening.messages] == [f"(task {task.prompt_id})"]:
        problem = (
            "it does not open its tasks, and they have no prompt (source: environment). Add a "
            "method `opening(self, task, seed)` that returns the user's message or a list of "
            "messages, or take the tasks from a file (source: jsonl)"
        )
    elif is_grader and not environment.grades:
        problem = (
            "it has no `verdict`, and nothing else grades its tasks. Add a method `verdict` that "
            "returns a number from 0 to 1, or a dict of them with one named `correct`, or take the "
            "tasks from a file (source: jsonl) whose lines have answers"
        )
    if problem:
        raise ValueError(f"environment {name}: {problem}")
    try:
        system = prompt([tool.name for tool in opening.tools])
        tokens = _count_tokens(opening, chat, window, thinking, system)
    except ValueError as error:
        message = f"environment {name}: the opening of task {task.prompt_id} {error}"
        raise ValueError(message) from error
    tools = [tool.name for tool in opening.tools]
    listed = ", ".join(tools[:_SHOWN_TOOLS]) or "none"
    if len(tools) > _SHOWN_TOOLS:
        listed += f" and {len(tools) - _SHOWN_TOOLS} more"
    later = f", without forking: {reason}" if reason else ""
    note = f"opens in {seconds:.1f} s{later}, with {tokens} tokens; tools: {listed}"
    if isinstance(verdict, str):
        note += f". WARNING: no verdict right after the opening: {verdict}"
    elif is_grader and "correct" not in verdict.parts:
        note += f". WARNING: its verdict has no part `correct`, only {list(verdict.parts)}"
    if isinstance(verdict, Verdict) and environment.grades:
        return note, verdict.parts.keys()
    return note, None


def _count_tokens(opening: Opening, chat: Chat, window: int, thinking: bool, system: str) -> int:
    messages = with_system(system, opening.messages)
    if opening.messages[-1]["role"] == "assistant":
        raise ValueError("ends with an assistant message. End it with a user message")
    try:
        ids = chat.opening(messages, opening.tools, thinking=thinking)
        plain = chat.opening(messages, (), thinking=thinking) if opening.tools else []
    except ValueError as error:
        raise ValueError(f"cannot be rendered: {error}") from error
    if ids == plain:
        raise ValueError("has tools, which the tokenizer's chat template does not show")
    if len(ids) >= window:
        tools = f"with {len(opening.tools)} tools has {len(ids)} tokens"
        raise ValueError(f"{tools}, and agents.window = {window}. Raise it or shorten the opening")
    return len(ids)


_SCRIPTED_TEXT = "\\boxed{0}"
_TRIAL_TURNS = 3
_TRIAL_S = 60.0


async def try_program(
    program: AgentProgram,
    environment: Callable[[], Environment],
    *,
    task: Prompt,
    seed: int,
    chat: Chat,
    turn_ids: Callable[[str], Sequence[int]],
    budget: Budget,
    prompt: Callable[[Sequence[str]], str],
) -> str:
    """Run a program for one episode, with a scripted model standing in for the policy, and return a
    description of what happened. Raises ValueError if the program fails to start or never requests
    a turn, or if the task has no grader."""
    contexts: list[int] = []

    async def sample(request: TurnRequest) -> TurnResult:
        contexts.append(len(request.token_ids_T))
        ids = np.array(turn_ids(_SCRIPTED_TEXT), np.int32)
        is_cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return TurnResult(
            token_ids_R=ids,
            logp_old_R=np.zeros(len(ids), np.float32),
            version_R=np.zeros(len(ids), np.int32),
            finish_reason="length" if is_cut else "stop",
        )

    turns, timeout_s = min(budget.turns, _TRIAL_TURNS), min(budget.timeout_s, _TRIAL_S)
    began = time.monotonic()
    async with Endpoint() as endpoint:
        episode = ProgramEpisode(
            settings=EpisodeSettings(
                environment=lambda _: environment(),
                chat=chat,
                budget=replace(budget, turns=turns, timeout_s=timeout_s),
                system_prompt=prompt,
                program=program,
            ),
            endpoint=endpoint,
            task=task,
            sample=sample,
            name="keel check",
            sibling=0,
            seed=seed,
            environment_seed=seed,
        )
        outcome = await episode.run()
    ended = episode.ended
    if not contexts:
        limits = f"open_s = {program.open_s:g} s and agents.window = {budget.window} tokens"
        cure = f"It must ask the policy at OPENAI_BASE_URL within {limits}"
        raise ValueError(f"task {task.prompt_id}: {outcome}. {cure}")
    if isinstance(outcome, str) and not (ended is not None and ended.failed):
        raise ValueError(f"task {task.prompt_id}: {outcome}")
    note = (
        f"asked a model that answers {_SCRIPTED_TEXT!r} for {len(contexts)} turns, the first after "
        f"{contexts[0]} tokens ({time.monotonic() - began:.1f} s)"
    )
    if ended is not None and (isinstance(outcome, str) or outcome.finish_reason == "crash"):
        note += f". WARNING: {ended.describe(program)}"
    return note
