"""Runs episodes that are driven by an agent program, and tests a program before a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from keel.agents.budget import Budget
from keel.agents.context import ContextManager
from keel.agents.endpoint.mcp_tools import McpTools
from keel.agents.endpoint.program import AgentProgram, ProgramResult, run_program
from keel.agents.endpoint.recorder import TrajectoryRecorder
from keel.agents.endpoint.server import Endpoint
from keel.agents.episode import Episode
from keel.agents.types import Environment, Unscored
from keel.rl.turns import Chat, Message, TurnRequest, TurnResult
from keel.rl.types import ENVIRONMENT, PROGRAM, FinishReason, Prompt, Segment, Trajectory, Verdict


@dataclass(slots=True, kw_only=True)
class DrivenEpisode(Episode):
    """An episode that is driven by an agent program. If the program fails after a turn, the episode
    ends with `crash`. If the endpoint failed first, the trajectory is dropped instead."""

    program: AgentProgram
    endpoint: Endpoint
    starting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Limits the number of programs that have started but not yet requested a turn."""
    ended: ProgramResult | None = None
    recorder: TrajectoryRecorder | None = None

    async def _run(self) -> Trajectory | str:
        opening = await self.environment.open(self.task, seed=self.environment_seed)
        specs = tuple(tool.as_json() for tool in opening.tools)
        task = replace(self.task, messages=opening.messages, tools=specs or self.task.tools)
        self.recorder = recorder = TrajectoryRecorder(
            name=self.name,
            prompt_id=self.task.prompt_id,
            chat=self.chat,
            sample=self._sampled,
            thinking=self.task.thinking,
            seed=self.seed,
            budget=self.budget,
        )
        tools = McpTools(self.environment, opening.tools, budget=self.budget)
        address = self.endpoint.add(recorder, tools if opening.tools else None)
        await self.starting.acquire()
        begun = asyncio.create_task(recorder.begun.wait())
        begun.add_done_callback(lambda _: self.starting.release())
        late, seed = recorder.overdue(self.program.open_s), self.environment_seed
        grace_s = 0.0
        try:
            ended = await run_program(self.program, task, address, seed=seed, until=late)
            self.ended = ended
            grace_s = 0.0 if recorder.error is not None else self.budget.call_s
        finally:
            begun.cancel()
            await self.endpoint.finish(self.name)
            await tools.finish(grace_s)
        if recorder.error is not None:
            raise recorder.error
        self.usage = recorder.usage
        was_cut = recorder.finish_reason != "stop" or tools.done
        refusal = recorder.failure or recorder.refusal
        refusal = f"; the endpoint had refused: {refusal}" if refusal else ""
        if not recorder.segments:
            return f"{ended.describe(self.program)}; without a turn of the policy{refusal}"
        if tools.lost is not None:
            raise tools.lost
        if ended.failed and not was_cut:  # after a cut, its work counts however it took the error
            reason = f"{ended.describe(self.program)}{refusal}"
            if recorder.failure or self.program.drop_failures:
                return reason
            verdict = Verdict(parts={"correct": 0.0}, facts={"crash": reason})
            return self._trajectory("crash", verdict)
        graded = await self._graded(recorder.finish_reason)
        return graded if isinstance(graded, str) else self._with_program_verdict(graded, ended)

    def _record(self) -> tuple[tuple[Segment, ...], Sequence[Message], int]:
        assert self.ended is not None and self.recorder is not None
        index = self.recorder.index
        messages = [*index.opening, *index.messages]
        answer = self.ended.answer
        if answer is not None and answer != messages[-1]["content"]:
            # The message that rewards grade.
            messages.append({"role": "assistant", "content": answer, "name": PROGRAM})
        return self.recorder.segments, messages, len(index.opening)

    def _trajectory(self, reason: FinishReason, verdict: Verdict) -> Trajectory:
        trajectory = Episode._trajectory(self, reason, verdict)
        assert self.recorder is not None
        dialogues = self.recorder.index.dialogues
        return replace(trajectory, dialogues=dialogues, tools=dialogues[0].tools)

    def _with_program_verdict(
        self, trajectory: Trajectory, ended: ProgramResult
    ) -> Trajectory | str:
        verdict = trajectory.verdict or Verdict(parts={})
        if isinstance(ended.verdict, Unscored):
            return f"agent program {self.program.name}: {ended.verdict.reason}"
        if ended.verdict is not None:
            parts = {**ended.verdict.parts, **verdict.parts}
            verdict = Verdict(parts=parts, facts={**ended.verdict.facts, **verdict.facts})
        if self.task.reward.get("kind") == ENVIRONMENT and "correct" not in verdict.parts:
            return (
                f"{ended.describe(self.program)}; it gave no verdict with a part `correct`, and "
                "nothing else grades the task. Have it write {'parts': {'correct': …}} as JSON to "
                "the file KEEL_VERDICT, or give the prompts an answer, tests or criteria"
            )
        return replace(trajectory, verdict=verdict)


_SCRIPTED_TEXT = "\\boxed{0}"
_TRIAL_TURNS = 3
_TRIAL_S = 60.0
_MAX_OUTPUT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTrial:
    """The result of testing a program."""

    turns: int
    opening_tokens: int
    """Number of tokens in the program's first request, including the tools."""
    seconds: float
    ended: str


async def try_program(
    program: AgentProgram,
    environment: Environment,
    *,
    task: Prompt,
    seed: int,
    chat: Chat,
    speak: Callable[[str], Sequence[int]],
    budget: Budget,
) -> ProgramTrial:
    """Run a program for one episode, with a scripted model in place of the policy. Raises
    ValueError if the program fails to start or never requests a turn, or if the task has no grader.
    """
    contexts: list[int] = []

    async def sample(request: TurnRequest) -> TurnResult:
        contexts.append(len(request.token_ids_T))
        ids = np.array(speak(_SCRIPTED_TEXT), np.int32)
        is_cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return TurnResult(
            token_ids_N=ids,
            logp_old_N=np.zeros(len(ids), np.float32),
            version_N=np.zeros(len(ids), np.int32),
            finish_reason="length" if is_cut else "stop",
        )

    turns, timeout_s = min(budget.turns, _TRIAL_TURNS), min(budget.timeout_s, _TRIAL_S)
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
    ended, recorder = episode.ended, episode.recorder
    failed = ended.failed if ended is not None else ""
    limit = "stop" if isinstance(outcome, str) else outcome.finish_reason
    if not contexts:
        raise ValueError(
            f"task {task.prompt_id}: {outcome}. It must ask the policy at OPENAI_BASE_URL, with "
            f"OPENAI_API_KEY, within open_s = {program.open_s:g} s and agents.window = "
            f"{budget.window} tokens"
        )
    if isinstance(outcome, str) and not failed:
        raise ValueError(f"task {task.prompt_id}: {outcome}")
    if not failed:
        summary = "ended well"
    elif limit not in ("stop", "crash"):
        summary = f"was stopped there ({limit})"
    else:
        assert ended is not None
        effect = "is dropped" if program.drop_failures else "counts as a failure, reward 0"
        summary = (
            f"WARNING: it {failed} after the model had answered {_SCRIPTED_TEXT!r}. In training, a "
            f"failure {effect} (on_failure). Its last words: {ended.output[-_MAX_OUTPUT:]}"
        )
        if recorder is not None and recorder.refusal:
            summary += f". The endpoint refused a request: {recorder.refusal}"
    return ProgramTrial(
        turns=len(contexts),
        opening_tokens=contexts[0],
        seconds=time.monotonic() - began,
        ended=summary,
    )
