"""A scripted policy and a small environment, played without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from keel.agents.budget import Budget
from keel.agents.context import ContextManager
from keel.agents.episode import Episode
from keel.agents.types import (
    Environment,
    EnvironmentLost,
    Opening,
    ToolResult,
    Transcript,
    Unscored,
)
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.turns import Message, ToolCall, ToolSpec, TurnRequest, TurnResult
from keel.rl.types import Prompt, Trajectory, Verdict
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.encoding import Marks
from tests.agents.episodes import result_of
from tests.waiting import PATIENCE_S

END = "<|im_end|>"
ADD = ToolSpec(
    name="add",
    description="a + b",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
ROUTES = (2, 2)
"""Layers and experts per token."""


@cache
def chat() -> TemplateChat:
    return TemplateChat(build_tokenizer())


@dataclass
class Policy:
    """Answers `script(turn, context as text)`; `finish` is the finish reason. Row t of the routes
    is t + 100 * turn."""

    script: Callable[[int, str], str]
    requests: list[TurnRequest] = field(default_factory=list[TurnRequest])
    seconds: float = 1.0
    finish: Literal["stop", "length", "deadline"] = "stop"

    async def sample(self, request: TurnRequest) -> TurnResult:
        await asyncio.sleep(0)
        return self.say(request)

    def say(self, request: TurnRequest) -> TurnResult:
        turn = len([r for r in self.requests if r.conversation == request.conversation])
        self.requests.append(request)
        text = self.script(turn, chat().decode(request.token_ids_T.tolist()))
        ended = text.endswith(END)
        ids = [*chat().encoder.encode(text.removesuffix(END), UNMARKED)]
        ids = [*ids, chat().ends[END]] if ended else ids
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        count = len(ids)
        rows = np.arange(request.routes_from, max(len(request.token_ids_T) + count - 1, 0))
        return TurnResult(
            token_ids_N=np.array(ids, np.int32),
            logp_old_N=np.full(count, -0.5, np.float32),
            version_N=np.full(count, turn, np.int32),
            finish_reason="length" if cut else self.finish,
            routes_RLK=np.broadcast_to(
                (rows + 100 * turn)[:, None, None], (len(rows), *ROUTES)
            ).astype(np.int16),
            cached_tokens=request.routes_from // 16 * 16,
            sampling_s=self.seconds,
        )

    def turns(self) -> Callable[..., Future[TurnResult]]:
        """Return a `TurnSampler`."""

        def ask(request: TurnRequest, purpose: str) -> Future[TurnResult]:
            future: Future[TurnResult] = Future()
            try:
                future.set_result(self.say(request))
            except Exception as error:
                future.set_exception(error)
            return future

        return ask


UNMARKED = Marks("", "")


@dataclass
class Sums:
    """Adds two numbers. A sum of 99 ends the episode, and the correct final answer is 42."""

    log: list[str] = field(default_factory=list[str])
    replies: Sequence[str] = ()
    """Replies of the user to turns without a call, in order."""
    fails: str = ""
    """Phase in which it is lost."""
    hangs: str = ""
    grade: Verdict | Unscored | None = None
    words: int = 0
    """Words appended to each result."""

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        await self._at(f"open {seed}", "open")
        return Opening(messages=({"role": "user", "content": "Sum."},), tools=(ADD,))

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        await self._at(f"call {call.name} {dict(call.arguments)}", "call")
        if call.name != "add":
            return ToolResult(text=f"no tool {call.name}", failed=True)
        total = int(call.arguments["a"]) + int(call.arguments["b"])
        return ToolResult(text=f"{total}{' word' * self.words}", done=total == 99)

    async def reply(self, turn: Message) -> Message | None:
        await self._at(f"reply {turn['content']}", "reply")
        count = sum(line.startswith("reply") for line in self.log)
        if count > len(self.replies):
            return None
        return {"role": "user", "content": self.replies[count - 1]}

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored:
        await self._at(f"verdict {transcript.finish_reason}", "verdict")
        right = str(transcript.messages[-1]["content"]).strip() == "42"
        return self.grade or Verdict(parts={"correct": float(right)})

    async def close(self) -> None:
        await self._at("close", "close")

    async def _at(self, what: str, method: str) -> None:
        self.log.append(what)
        if method == self.hangs:
            await asyncio.sleep(3600)
        if method == self.fails:
            raise EnvironmentLost("crash", method, "ended with SIGSEGV")


TASK = Prompt(
    prompt_id="s/1",
    domain="sums",
    messages=({"role": "user", "content": "sums, task 1"},),
    environment="sums",
    thinking=False,
)
BUDGET = Budget(turns=8, turn_tokens=64, tokens=400, window=600)
NO_CONTEXT = ContextManager(method="none", window=600, most=0)


def play(
    policy: Policy,
    environment: Environment,
    *,
    budget: Budget = BUDGET,
    context: ContextManager = NO_CONTEXT,
    thinking: bool = False,
    form: TemplateChat | None = None,
    crash_is_failure: Collection[str] = (),
) -> Trajectory | str:
    episode = Episode(
        environment=environment,
        task=replace(TASK, thinking=thinking),
        chat=form or chat(),
        sample=policy.sample,
        budget=budget,
        context=context,
        name="c",
        sibling=0,
        seed=5,
        environment_seed=7,
        crash_is_failure=crash_is_failure,
    )
    return result_of(episode.run(), within_s=PATIENCE_S)


def says(*turns: str) -> Policy:
    """Return a policy that answers these turns in order."""
    return Policy(lambda turn, _: turns[turn] + END)
