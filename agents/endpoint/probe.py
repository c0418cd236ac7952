"""Tries an agent program against a scripted model before a run, so that faults show before any
engine starts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from keel.agents.budget import Budget
from keel.agents.context import ContextManager
from keel.agents.endpoint.driven import DrivenEpisode
from keel.agents.endpoint.program import AgentProgram
from keel.agents.endpoint.server import Endpoint
from keel.agents.types import Environment
from keel.rl.turns import Chat, TurnRequest, TurnResult
from keel.rl.types import Prompt

SAID = "\\boxed{0}"
"""The scripted model's words in every turn."""
TURNS = 3
"""Most turns that the model gives."""
MOST_S = 60.0
"""Seconds of the program's own time."""
MOST_SAID = 500
"""Characters of its output in a warning."""
_MISSING = re.compile(r"No module named '([\w.]+)'")
_UNREACHED = re.compile(r"connect|api[_ ]?key|authentic|unauthorized|resol", re.IGNORECASE)
"""Matches the output of a program that looked for the policy elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of trying a program."""

    turns: int
    opening_tokens: int
    """Tokens of its first request, tools included."""
    seconds: float
    ended: str
    """How it ended, for people."""


async def try_program(
    program: AgentProgram,
    environment: Environment,
    *,
    task: Prompt,
    seed: int,
    chat: Chat,
    speak: Callable[[str], Sequence[int]],
    budget: Budget,
) -> Trial:
    """Let the program drive one episode of `task`. speak: returns the ids that a policy samples to
    say a text, with the end of its turn.

    Raises:
        ValueError: the program cannot be started, asks for no turn, lacks a package, fails before
            its first turn, or nothing grades the task. Quotes its output and names the cure.
    """
    contexts: list[int] = []

    async def sample(request: TurnRequest) -> TurnResult:
        contexts.append(len(request.token_ids_T))
        ids = np.array(speak(SAID), np.int32)
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return TurnResult(
            token_ids_N=ids,
            logp_old_N=np.zeros(len(ids), np.float32),
            version_N=np.zeros(len(ids), np.int32),
            finish_reason="length" if cut else "stop",
        )

    turns, timeout_s = min(budget.turns, TURNS), min(budget.timeout_s, MOST_S)
    began = time.monotonic()
    async with Endpoint() as endpoint:
        episode = DrivenEpisode(
            program=program,
            endpoint=endpoint,
            environment=environment,
            task=task,
            chat=chat,
            sample=sample,
            budget=replace(budget, turns=turns, timeout_s=timeout_s),
            context=ContextManager(method="none", window=budget.window, most=0),
            name="keel check",
            sibling=0,
            seed=seed,
            environment_seed=seed,
        )
        outcome = await episode.run()
    ended, finished = episode.ended, episode.finished
    failed = ended is not None and bool(ended.failed)
    missing = _MISSING.search(ended.words) if ended is not None and failed else None
    limit = "" if isinstance(outcome, str) else outcome.finish_reason
    cut = limit not in ("", "stop", "crash")
    if not cut and (missing or not contexts or (isinstance(outcome, str) and not failed)):
        why = outcome
        if not isinstance(why, str):
            assert ended is not None
            why = ended.why(program)
        raise ValueError(f"task {task.prompt_id}: {why}{_cure(program, missing, episode)}")
    if ended is None or not failed:
        how = "ended well"
    elif cut:
        how = f"was stopped there ({limit})"
    else:
        becomes = "is left out" if program.drop_failures else "counts as a failure, reward 0"
        how = (
            f"WARNING: it {ended.failed} after the model had said {SAID!r}. What ends so in "
            f"training {becomes} (on_failure). Its last words: {ended.words[-MOST_SAID:]}"
        )
    if finished is not None and finished.counts.refused and finished.refusal and not cut:
        how += f". WARNING: the endpoint refused a request: {finished.refusal}"
    return Trial(
        turns=len(contexts),
        opening_tokens=contexts[0],
        seconds=time.monotonic() - began,
        ended=how,
    )


def _cure(program: AgentProgram, missing: re.Match[str] | None, episode: DrivenEpisode) -> str:
    if missing is not None:
        package = missing[1].partition(".")[0]
        return (
            f". Install what it lacks: {_interpreter(program.command)} -m pip install {package} "
            "(or name a file of your own by its folder: folder, readable)"
        )
    finished = episode.finished
    if finished is not None and finished.finish_reason == "window":
        return ". Raise agents.window, or have it say less at first"
    if episode.ended is not None and episode.ended.timed_out:
        return ". Make it ask sooner, or raise open_s"
    if finished is not None and not finished.segments and finished.refusal:
        return ""  # the refusal says what to do
    if finished is not None and finished.segments:
        return (
            ". Have it write {'parts': {'correct': …}} as JSON to the file KEEL_VERDICT, or give "
            "the prompts an answer, tests or criteria"
        )
    if episode.ended is not None and episode.ended.failed:
        said = f"{episode.ended.failed} {episode.ended.words}"
        if not _UNREACHED.search(said):
            return ""  # its own words say what to mend
    return ". It must ask the policy at OPENAI_BASE_URL, with OPENAI_API_KEY"


def _interpreter(command: Sequence[str]) -> str:
    """Return the Python that a command runs: itself, or the one in its script's first line."""
    path = Path(command[0])
    if path.name.startswith("python"):
        return str(path)
    with path.open("rb") as file:
        first = file.readline(512)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return words[-1] if words else "python"
