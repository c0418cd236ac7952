"""An episode that an agent program drives: started, recorded and graded on what it did."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from keel.agents.endpoint.program import AgentProgram, ProgramResult, run_program
from keel.agents.endpoint.record import Finished, TrajectoryRecorder
from keel.agents.endpoint.server import Address, Endpoint
from keel.agents.endpoint.tools import Tools
from keel.agents.episode import Episode
from keel.agents.types import Unscored
from keel.rl.turns import Message, TurnRequest, TurnResult
from keel.rl.types import (
    ENVIRONMENT,
    PROGRAM,
    FinishReason,
    Prompt,
    Segment,
    Trajectory,
    Verdict,
)


@dataclass(slots=True, kw_only=True)
class DrivenEpisode(Episode):
    """An `Episode` that an agent program drives. The environment (or `NoEnvironment`) opens the
    task and has the verdict; context management is the program's.

    A program that fails after a turn counts as a failure of the policy (finish reason `crash`),
    unless a request of its got an error of 500 or more, which is the endpoint's fault.
    """

    program: AgentProgram
    endpoint: Endpoint
    starting: asyncio.Semaphore | None = None
    """Held until a program asks for its first turn, so that hundreds do not start at once."""
    ended: ProgramResult | None = None
    finished: Finished | None = None
    _broken: asyncio.Event = field(default_factory=asyncio.Event)
    _error: Exception | None = None
    """The engines' error, which they have retried already. It ends the episode."""

    async def _run(self) -> Trajectory | str:
        opening = await self.environment.open(self.task, seed=self.environment_seed)
        tools = tuple(tool.as_json() for tool in opening.tools)
        task = replace(self.task, messages=opening.messages, tools=tools or self.task.tools)
        recording = TrajectoryRecorder(
            name=self.name,
            prompt_id=self.task.prompt_id,
            chat=self.chat,
            sample=self._asked,
            thinking=self.task.thinking,
            seed=self.seed,
            budget=self.budget,
        )
        offered = Tools(self.environment, opening.tools, budget=self.budget)
        address = self.endpoint.add(recording, offered if opening.tools else None)
        begun_s = 0.0
        try:
            self.ended = ended = await self._driven(task, recording, address)
            begun_s = 0.0 if self._error is not None else self.budget.call_s
        finally:
            self.finished = finished = await self.endpoint.finish(self.name)
            await offered.finish(begun_s)
        if self._error is not None:
            raise self._error
        self.usage = finished.usage
        cut = finished.finish_reason != "stop" or offered.done
        if not finished.segments:
            return f"{ended.why(self.program)}; without a turn of the policy{_refusal(finished)}"
        if offered.lost is not None:
            raise offered.lost
        if ended.failed and not cut:  # what it did counts, however it took the refusal
            why = f"{ended.why(self.program)}{_refusal(finished)}"
            if finished.failure or self.program.drop_failures:
                return why
            return self._trajectory("crash", Verdict(parts={"correct": 0.0}, facts={"crash": why}))
        graded = await self._graded(finished.finish_reason)
        return graded if isinstance(graded, str) else self._with_its_own(graded, ended)

    def _so_far(self) -> tuple[tuple[Segment, ...], Sequence[Message], int]:
        assert self.ended is not None and self.finished is not None
        said = [*self.finished.opening, *self.finished.messages]
        if (answer := self.ended.answer) is not None and answer != said[-1]["content"]:
            said.append(answer_of(answer))
        return self.finished.segments, said, len(self.finished.opening)

    def _trajectory(self, reason: FinishReason, verdict: Verdict) -> Trajectory:
        trajectory = Episode._trajectory(self, reason, verdict)
        assert self.finished is not None
        dialogues = self.finished.dialogues
        return replace(trajectory, dialogues=dialogues, tools=dialogues[0].tools)

    async def _driven(
        self, task: Prompt, recording: TrajectoryRecorder, address: Address
    ) -> ProgramResult:
        if self.starting is not None:
            await self.starting.acquire()
        begun = asyncio.create_task(recording.begun.wait())
        if self.starting is not None:
            begun.add_done_callback(lambda _, free=self.starting.release: free())
        try:
            return await run_program(
                self.program,
                task,
                address,
                seed=self.environment_seed,
                until=self._late(recording),
            )
        finally:
            begun.cancel()

    async def _late(self, recording: TrajectoryRecorder) -> str:
        broken = asyncio.create_task(self._broken.wait())
        late = asyncio.create_task(recording.overdue(self.program.open_s))
        try:
            await asyncio.wait({broken, late}, return_when=asyncio.FIRST_COMPLETED)
            return "was ended with the engines" if self._broken.is_set() else late.result()
        finally:
            broken.cancel()
            late.cancel()

    async def _asked(self, request: TurnRequest) -> TurnResult:
        try:
            return await self._sampled(request)
        except Exception as error:
            self._error = self._error or error
            self._broken.set()
            raise

    def _with_its_own(self, trajectory: Trajectory, ended: ProgramResult) -> Trajectory | str:
        """Merge the program's verdict with the environment's, which takes precedence."""
        own, found = ended.verdict, trajectory.verdict or Verdict(parts={})
        if isinstance(own, Unscored):
            return f"agent program {self.program.name}: {own.reason}"
        if own is not None:
            parts, facts = {**own.parts, **found.parts}, {**own.facts, **found.facts}
            found = Verdict(parts=parts, facts=facts)
        if self.task.reward.get("kind") == ENVIRONMENT and "correct" not in found.parts:
            return (
                f"{ended.why(self.program)}; it gave no verdict with a part `correct` and nothing "
                "else grades the task"
            )
        return replace(trajectory, verdict=found)


def answer_of(text: str) -> Message:
    """Return a program's answer as the message that rewards look at."""
    return {"role": "assistant", "content": text, "name": PROGRAM}


def _refusal(finished: Finished) -> str:
    words = finished.failure or finished.refusal
    return f"; the endpoint had refused: {words}" if words else ""
