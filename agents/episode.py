"""One episode: a policy in an environment, turn by turn, until one of them or a budget ends it.

What was sampled is in the conversation's segments whatever happens, and is graded on what it did.
An environment that is lost, or cannot grade, leaves its trajectory out with a reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from keel.agents.budget import Budget, with_turn
from keel.agents.context import AskFirst, ContextManager
from keel.agents.conversation import Conversation
from keel.agents.types import Environment, EnvironmentLost, Transcript, Unscored
from keel.rl.turns import (
    MALFORMED,
    Chat,
    Malformed,
    Message,
    ToolCall,
    TurnRequest,
    TurnResult,
)
from keel.rl.types import LOST, FinishReason, Prompt, Segment, Trajectory, Usage, Verdict

Sample = Callable[[TurnRequest], Awaitable[TurnResult]]
"""An engine, some engine."""
BROKE = "the conversation broke: "
NOTHING_SAID = "late: its time was up before it had sampled a token (rollout.timeout_s)"


POLICY_PHASES = ("call", "reply")
"""During these an environment is lost over what the policy did: a call, or its words."""


def lost_to_the_policy(reason: str, during: Collection[str] = POLICY_PHASES) -> bool:
    """Whether a trajectory is missing because its environment was lost during one of these."""
    return reason.startswith(tuple(f"{LOST}{method}:" for method in during))


class EngineRefused(RuntimeError):
    """An engine refused a turn, as it would any other of that length: a fault of the run's, where
    every other ValueError here is one conversation's."""

    def __init__(self, error: ValueError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True, kw_only=True)
class Episode:
    """Single use: `run` it."""

    environment: Environment
    task: Prompt
    chat: Chat
    sample: Sample
    budget: Budget
    context: ContextManager
    name: str
    """Of the conversation, unique in the run."""
    sibling: int
    seed: int
    """Of what is sampled."""
    environment_seed: int
    """The same for all siblings: they meet the same task."""
    crash_is_failure: Collection[str] = ()
    """An environment that is lost during one of these (call, reply, verdict) leaves a trajectory
    that has failed, and not none."""
    usage: Usage = field(default_factory=lambda: Usage(turns=0))
    _run_calls: int = 0
    _conversation: Conversation | None = None

    async def run(self) -> Trajectory | str:
        """The trajectory, or why there is none. Raises what `sample` raises. The environment is
        closed in any case."""
        try:
            return await self._run()
        except EngineRefused as refused:
            raise refused.error from refused
        except EnvironmentLost as error:
            return self._crashed(str(error)) or str(error)
        except (ValueError, OSError) as error:  # one conversation is none that can go on
            return f"{BROKE}{error}"
        finally:
            # It has a deadline of its own, and is to end even where this is cancelled.
            await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        try:
            await self.environment.close()
        except Exception as error:  # what was sampled is whole all the same
            logging.getLogger(__name__).warning(
                "the environment of %s could not be closed: %r", self.name, error
            )

    async def _run(self) -> Trajectory | str:
        opening = await self.environment.open(self.task, seed=self.environment_seed)
        self._conversation = conversation = Conversation(
            name=self.name,
            prompt_id=self.task.prompt_id,
            chat=self.chat,
            messages=opening.messages,
            tools=opening.tools,
            thinking=self.task.thinking,
        )
        room = self.budget.window - len(conversation.ids)
        if room < 1:
            return (
                f"the opening has {len(conversation.ids)} tokens and fills the window of "
                f"{self.budget.window} (agents.window)"
            )
        reason: FinishReason | None = None
        while reason is None:
            reason = await self._turn(conversation)
        if not conversation.sampled_tokens:
            return NOTHING_SAID
        return await self._graded(reason)

    def _so_far(self) -> tuple[tuple[Segment, ...], Sequence[Message], int]:
        """Its segments, its messages, and how many of these are the opening."""
        said = self._conversation
        assert said is not None, "an environment is lost over what the policy did before it spoke"
        return said.segments(), said.transcript, len(said.opening)

    async def _graded(self, reason: FinishReason) -> Trajectory | str:
        _, said, _ = self._so_far()
        transcript = Transcript(messages=tuple(said), finish_reason=reason)
        verdict = await self.environment.verdict(transcript)
        if isinstance(verdict, Unscored):
            if verdict.fault not in (None, "raised") and (lost := self._crashed(verdict.reason)):
                return lost
            return f"the environment has no verdict: {verdict.reason}"
        return self._trajectory(reason, verdict)

    def _crashed(self, why: str) -> Trajectory | None:
        """A trajectory that has failed, where losing the environment so counts as that."""
        if not lost_to_the_policy(why, self.crash_is_failure):
            return None
        return self._trajectory("crash", Verdict(parts={"correct": 0.0}, facts={"crash": why}))

    def _trajectory(self, reason: FinishReason, verdict: Verdict) -> Trajectory:
        segments, said, opening = self._so_far()
        tools = self._conversation.tools if self._conversation else ()
        return Trajectory(
            prompt_id=self.task.prompt_id,
            sibling=self.sibling,
            segments=segments,
            finish_reason=reason,
            messages=tuple(said),
            opening=opening,
            tools=tuple(tool.as_json() for tool in tools),
            verdict=verdict,
            usage=self.usage,
        )

    async def _turn(self, conversation: Conversation) -> FinishReason | None:
        """The policy speaks, and is answered. Why the episode is over, if it is."""
        if (over := await self._make_room(conversation)) is not None:
            return over
        said = await self._speak(conversation)
        if isinstance(said, str):
            return said
        calls, message = said
        if calls:
            answers, over = await self._call_all(calls)
        else:
            reply = await self.environment.reply(message)
            if reply is not None:
                reply = {**reply, "content": self.budget.cut(reply["content"])}
            answers, over = ([reply], None) if reply is not None else ([], "stop")
        if over is not None:
            conversation.last_words(answers)
        else:
            conversation.answer(answers)
        return over

    async def _make_room(self, conversation: Conversation) -> FinishReason | None:
        """Rewrite a context that fills its window."""
        rewrite = self.context.rewrite(
            conversation.opening,
            conversation.view,
            tokens=len(conversation.ids),
            rewrites=self.usage.rewrites,
        )
        if rewrite is None:
            return None
        self.usage = replace(self.usage, rewrites=self.usage.rewrites + 1)
        if isinstance(rewrite, AskFirst):
            if rewrite.before is not None:
                conversation.rewrite(rewrite.before.messages, added=rewrite.before.added)
            conversation.answer(rewrite.messages)
            said = await self._speak(conversation, self.context.summary_tokens)
            if isinstance(said, str):
                return said
            rewrite = rewrite.rewritten_by(conversation.opening, str(said[1]["content"]))
        conversation.rewrite(rewrite.messages, added=rewrite.added)
        return None

    async def _speak(
        self, conversation: Conversation, at_most: int | None = None
    ) -> tuple[Sequence[ToolCall | Malformed], Message] | FinishReason:
        """One turn: its calls and its message, or why the episode ends with it."""
        nearest, room = self.budget.room(
            self.usage, context=len(conversation.ids), sampled=conversation.sampled_tokens
        )
        if room < 1:
            return nearest
        request = conversation.request(
            max_tokens=min(room, at_most or room),
            seed=self.seed,
            timeout_s=self.budget.left_s(self.usage),
        )
        result = await self._sampled(request)
        self.usage = with_turn(self.usage, result, repeated=request.routes_from)
        if not len(result.token_ids_N):
            return "deadline"
        parsed = conversation.append(result)
        if result.finish_reason == "deadline":
            return "deadline"
        if not parsed.closed and at_most is None:
            # An end that the chat format does not know, or a limit.
            return "stop" if result.finish_reason == "stop" else nearest
        return parsed.calls, conversation.view[-1]

    async def _sampled(self, request: TurnRequest) -> TurnResult:
        try:
            return await self.sample(request)
        except ValueError as error:
            raise EngineRefused(error) from error

    async def _call_all(
        self, calls: Sequence[ToolCall | Malformed]
    ) -> tuple[list[Message], FinishReason | None]:
        """The results, in order, and why the episode is over with the last of them, if it is. A
        call that was begun has its own time: what is left of the episode's is looked at before."""
        answers: list[Message] = []
        for call in calls:
            if isinstance(call, Malformed):
                failed, done, name = True, False, MALFORMED
                text = f"This is not a tool call: {call.why}. Nothing was run."
                self.usage = replace(self.usage, malformed_calls=self.usage.malformed_calls + 1)
            elif text := self.budget.refusal(self._run_calls):
                failed, done, name = True, False, call.name
            else:
                if self.budget.left_s(self.usage) <= 0:
                    return answers, "deadline"
                self._run_calls += 1
                began = time.monotonic()
                result = await self.environment.call(call, timeout_s=self.budget.call_s)
                spent_s = time.monotonic() - began
                self.usage = replace(self.usage, tools_s=self.usage.tools_s + spent_s)
                failed, done, name, text = result.failed, result.done, call.name, result.text
            self.usage = replace(
                self.usage,
                calls=self.usage.calls + 1,
                failed_calls=self.usage.failed_calls + failed,
            )
            text = self.budget.cut(text)
            answers.append(
                {"role": "tool", "content": text, "tool_call_id": call.call_id, "name": name}
            )
            if done:
                return answers, "stop"
        return answers, None
