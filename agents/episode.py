"""Runs one episode: a policy acts in an environment until one of them ends it or a limit is
reached. An episode is dropped, with a reason, if the environment is lost or cannot grade it. When a
conversation fills its window, `shorten_context` shortens the context as in DeepSeek-V3.2 (2025),
section 4.4. The opening messages are always kept, and a tool call is kept or removed together with
its results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any, Literal

from keel.agents.conversation import Conversation
from keel.agents.env_process.launch import AgentProgram
from keel.agents.types import (
    Environment,
    EnvironmentLost,
    NodeLost,
    Opening,
    ToolResult,
)
from keel.configs.system_prompts import with_system
from keel.rl.turns import (
    MALFORMED,
    Chat,
    Malformed,
    Message,
    Parsed,
    ToolCall,
    TurnRequest,
    TurnResult,
)
from keel.rl.types import FinishReason, Prompt, Trajectory, Usage, Verdict

CHARACTERS_PER_TOKEN = 16
"""Upper bound on the average number of characters per token in a long text. Prose has about 4."""
_SHORT_TEXT = 1 << 16
"""Texts up to this many characters are always tokenized, which takes at most 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    turns: int
    turn_tokens: int
    """Maximum number of tokens sampled per turn. A truncated turn is continued only if an agent
    program requests it."""
    tokens: int
    window: int
    timeout_s: float = inf
    """Time limit for the trajectory in seconds, including cancelled turns, tool calls, and the time
    that a program spends between turns."""
    call_s: float = 60.0
    calls: float = inf
    """Maximum number of tool calls. Further calls return an error."""
    context: Literal["none", "summary", "discard-75", "discard-all"] = "none"
    """How to shorten a context that is nearly full."""
    max_rewrites: int = 0
    """Maximum number of times to shorten it, or 0 for no limit. After that, the trajectory ends
    when its window is full."""
    summary_tokens: int = 1024

    @property
    def characters(self) -> int:
        """Maximum number of characters to tokenize. Anything longer is assumed to exceed the
        context window, because tokenizing it would block all other episodes."""
        return max(CHARACTERS_PER_TOKEN * self.window, _SHORT_TEXT)

    def truncate(self, text: str) -> str:
        excess = len(text) - self.characters
        return text if excess <= 0 else f"{text[:-excess]}\n[{excess} characters left out]"

    def refusal(self, calls: int) -> str:
        if calls < self.calls:
            return ""
        return f"Not run: the limit of {self.calls} tool calls is reached."

    def fits_summary(self, tokens: int) -> bool:
        return tokens + self.summary_tokens <= self.window

    def remaining_s(self, usage: Usage) -> float:
        return self.timeout_s - usage.sampling_s - usage.tools_s

    def turn_limit(self, usage: Usage, *, context: int, sampled: int) -> tuple[FinishReason, int]:
        """Return the limit that the next turn will reach first, and the number of tokens left
        before that. A number below 1 means that the limit has already been reached."""
        if usage.turns >= self.turns:
            return "turns", 0
        if self.remaining_s(usage) <= 0:
            return "deadline", 0
        limits: dict[FinishReason, int] = {
            "length": min(self.tokens - sampled, self.turn_tokens),
            "window": self.window - context,
        }
        nearest = min(limits, key=lambda name: limits[name])
        return nearest, limits[nearest]


def add_turn(usage: Usage, result: TurnResult, *, repeated: int) -> Usage:
    """Return a copy of `usage` with one more turn added. `repeated` is the number of context tokens
    that an earlier turn already processed."""
    return usage.plus(
        turns=1,
        repeated_tokens=repeated,
        cached_tokens=min(result.cached_tokens, repeated),
        sampling_s=result.sampling_s,
    )


BROKE = "the conversation broke: "
"""Prefix of the drop reason of a trajectory whose conversation is invalid."""
_NOTHING_SAMPLED = "late: its time was up before it had sampled a token (rollout.timeout_s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """Settings shared by all episodes of a data source."""

    environment: Callable[[bool], Environment]
    """Creates the environment of an episode. The argument is True on the last try, after the nodes
    of the earlier ones were lost."""
    chat: Chat
    budget: Budget
    system_prompt: Callable[[Sequence[str]], str] | None = None
    """Returns the system prompt for the given tool names, or "" for no system prompt."""
    program: AgentProgram | None = None
    """The agent program that requests the policy's turns, or None without one."""
    crash_is_failure: Collection[str] = ()
    """Phases (call, reply, verdict) in which losing the environment counts as a failure of the
    policy."""


@dataclass(kw_only=True)
class Episode:
    """A single episode. It can only be run once."""

    settings: EpisodeSettings
    task: Prompt
    sample: Callable[[TurnRequest], Awaitable[TurnResult]]
    """Samples a turn on an engine. It must not raise ValueError, which would drop the episode."""
    name: str
    sibling: int
    seed: int
    environment_seed: int
    """Seed of the environment, shared by the episodes of a group, so that they get the same
    task."""
    last_try: bool = False
    usage: Usage = field(default_factory=lambda: Usage(turns=0))
    _calls_run: int = 0
    _conversation: Conversation | None = None

    def __post_init__(self) -> None:
        self.environment = self.settings.environment(self.last_try)
        self.budget = self.settings.budget

    async def run(self) -> Trajectory | str:
        """Run the episode and close its environment. Returns the trajectory, or the reason if the
        episode is dropped. Raises NodeLost if the environment's node was lost."""
        try:
            return await self._run()
        except NodeLost:
            raise
        except EnvironmentLost as error:
            is_failure = error.during in self.settings.crash_is_failure
            return self._crashed(str(error)) if is_failure else str(error)
        except (ValueError, OSError) as error:
            return f"{BROKE}{error}"
        finally:
            # Has its own deadline, and must finish even if this task is cancelled.
            await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _open(self) -> Opening:
        opening = await self.environment.open(self.task, seed=self.environment_seed)
        if self.settings.system_prompt is None:
            return opening
        text = self.settings.system_prompt([tool.name for tool in opening.tools])
        return replace(opening, messages=with_system(text, opening.messages))

    async def _close(self) -> None:
        try:
            await self.environment.close()
        except Exception as error:  # the trajectory is complete all the same
            logging.getLogger(__name__).warning(
                "the environment of %s could not be closed: %r", self.name, error
            )

    async def _run(self) -> Trajectory | str:
        opening = await self._open()
        self._conversation = conversation = Conversation(
            name=self.name,
            prompt_id=self.task.prompt_id,
            chat=self.settings.chat,
            messages=opening.messages,
            tools=opening.tools,
            thinking=self.task.thinking,
        )
        if len(conversation.ids) >= self.budget.window:
            return (
                f"the opening has {len(conversation.ids)} tokens and fills the window of "
                f"{self.budget.window} (agents.window)"
            )
        reason: FinishReason | None = None
        while reason is None:
            reason = await self._shorten_context(conversation) or await self._turn(conversation)
        if not conversation.sampled_tokens:
            return _NOTHING_SAMPLED
        return await self._graded(reason)

    def _recorded(self) -> dict[str, Any]:
        """Return the fields of the trajectory that were recorded during the episode."""
        conversation = self._conversation
        assert conversation is not None, "the environment was not opened"
        return {
            "segments": conversation.segments(),
            "messages": tuple(conversation.transcript),
            "opening": len(conversation.opening),
            "tools": tuple(tool.as_json() for tool in conversation.tools),
        }

    async def _graded(self, reason: FinishReason) -> Trajectory | str:
        recorded = self._recorded()
        verdict = await self.environment.verdict(recorded["messages"], reason)
        if isinstance(verdict, str):
            return f"the environment has no verdict: {verdict}"
        return self._trajectory(reason, verdict, recorded)

    def _crashed(self, reason: str) -> Trajectory:
        verdict = Verdict(parts={"correct": 0.0}, facts={"crash": reason})
        return self._trajectory("crash", verdict, self._recorded())

    def _trajectory(
        self, reason: FinishReason, verdict: Verdict, recorded: Mapping[str, Any]
    ) -> Trajectory:
        return Trajectory(
            prompt_id=self.task.prompt_id,
            sibling=self.sibling,
            finish_reason=reason,
            verdict=verdict,
            usage=self.usage,
            **recorded,
        )

    async def _turn(self, conversation: Conversation) -> FinishReason | None:
        """Let the policy act once and the environment respond. Returns why the episode ended, or
        None if it continues."""
        turn = await self._sample_turn(conversation)
        if isinstance(turn, str):
            return turn
        if turn.calls:
            messages, reason = await self._call_tools(turn.calls)
        elif (reply := await self.environment.reply(conversation.context[-1])) is not None:
            reply = {**reply, "content": self.budget.truncate(reply["content"])}
            messages, reason = [reply], None
        else:
            messages, reason = [], "stop"
        if reason is not None:
            conversation.note_messages(messages)
        else:
            conversation.continue_with(messages)
        return reason

    async def _sample_turn(
        self, conversation: Conversation, *, is_summary: bool = False
    ) -> Parsed | FinishReason:
        """Sample the policy's next turn. Returns the finish reason if a limit ended the episode. A
        summary has its own token limit, and is used even if that limit truncates it."""
        nearest, room = self.budget.turn_limit(
            self.usage, context=len(conversation.ids), sampled=conversation.sampled_tokens
        )
        if room < 1:
            return nearest
        request = conversation.request(
            max_tokens=min(room, self.budget.summary_tokens) if is_summary else room,
            seed=self.seed,
            timeout_s=self.budget.remaining_s(self.usage),
        )
        result = await self.sample(request)
        self.usage = add_turn(self.usage, result, repeated=request.routes_from)
        if not len(result.token_ids_R):
            return "deadline"
        turn = conversation.append_turn(request, result)
        if result.finish_reason == "deadline":
            return "deadline"
        if turn.closed or is_summary:
            return turn
        # Either a limit, or an end of turn that the chat format does not know.
        return "stop" if result.finish_reason == "stop" else nearest

    async def _call_tools(
        self, calls: Sequence[ToolCall | Malformed]
    ) -> tuple[list[Message], FinishReason | None]:
        """Run a turn's tool calls in order. Returns their results as messages, along with why the
        episode ended, or None if it continues."""
        messages: list[Message] = []
        for call in calls:
            name = MALFORMED if isinstance(call, Malformed) else call.name
            if isinstance(call, Malformed):
                text = f"This is not a tool call: {call.why}. Nothing was run."
                result = ToolResult(text=text, failed=True)
                self.usage = self.usage.plus(malformed_calls=1)
            elif text := self.budget.refusal(self._calls_run):
                result = ToolResult(text=text, failed=True)
            else:
                if self.budget.remaining_s(self.usage) <= 0:
                    return messages, "deadline"
                self._calls_run += 1
                began = time.monotonic()
                result = await self.environment.call(call, timeout_s=self.budget.call_s)
                self.usage = self.usage.plus(tools_s=time.monotonic() - began)
            self.usage = self.usage.plus(calls=1, failed_calls=result.failed)
            text = self.budget.truncate(result.text)
            messages.append(
                {"role": "tool", "content": text, "tool_call_id": call.call_id, "name": name}
            )
            if result.done:
                return messages, "stop"
        return messages, None

    async def _shorten_context(self, conversation: Conversation) -> FinishReason | None:
        """Shorten the context if it is nearly full. Returns why the episode ended, or None if it
        continues."""
        budget, tokens, rewrites = self.budget, len(conversation.ids), self.usage.rewrites
        messages = shorten_context(
            budget, conversation.opening, conversation.context, tokens=tokens, rewrites=rewrites
        )
        if messages is None:
            return None
        self.usage = self.usage.plus(rewrites=1)
        if budget.context == "summary":
            if not budget.fits_summary(tokens):
                conversation.rewrite(messages)
            conversation.ask(ASK_FOR_SUMMARY)
            turn = await self._sample_turn(conversation, is_summary=True)
            if isinstance(turn, str):
                return turn
            if summary := turn.content.strip():  # empty if truncated while thinking
                message = {"role": "user", "content": SUMMARY + summary}
                conversation.transcript.append(message)
                messages = (*conversation.opening, message)
        conversation.rewrite(messages)
        return None


_FULL = 0.8
"""The context is rewritten once it fills this fraction of the window."""
_SHARES = {"summary": 0.75, "discard-75": 0.75, "discard-all": 1.0}
"""The fraction of tool calls that each method removes from the context."""

ASK_FOR_SUMMARY = (
    "The conversation is about to outgrow its window. Write down what is needed to go on without "
    "it: what was asked, what was done and found out, with names and figures, and what is left to "
    "do. Call no tool."
)
SUMMARY = "What was done so far, in your own words:\n\n"


def shorten_context(
    budget: Budget,
    opening: Sequence[Message],
    context: Sequence[Message],
    *,
    tokens: int,
    rewrites: int,
) -> tuple[Message, ...] | None:
    """Shorten the `context`, which is `tokens` tokens long, before the next turn. Returns None if
    it still fits or nothing can be removed. With the method `summary`, the result is used only if
    the policy's summary is empty or the context has no room for one."""
    spent = 0 < budget.max_rewrites <= rewrites
    if budget.context == "none" or spent or tokens < _FULL * budget.window:
        return None
    steps: list[list[Message]] = []  # an assistant message with its results, or another message
    for message in context[len(opening) :]:
        if message["role"] == "tool" and steps and steps[-1][0]["role"] == "assistant":
            steps[-1].append(message)
        else:
            steps.append([message])
    calls = [i for i, step in enumerate(steps) if step[0].get("tool_calls")]
    if calls:
        removed = set(calls[: ceil(len(calls) * _SHARES[budget.context])])
        rest = (m for i, step in enumerate(steps) if i not in removed for m in step)
        return (*opening, *rest)
    if budget.context == "summary" and steps and budget.fits_summary(tokens):
        return tuple(context)
    return None
