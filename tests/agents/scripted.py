"""A scripted policy and a small environment, played without an engine."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from keel.agents.episode import Budget, Episode, EpisodeSettings
from keel.agents.types import (
    Environment,
    EnvironmentLost,
    Opening,
    ToolResult,
)
from keel.rl.recordings import Recordings, SamplingMasks, StoredRecordings
from keel.rl.turns import Message, ToolCall, ToolSpec, TurnRequest, TurnResult
from keel.rl.types import Prompt, Trajectory, Verdict
from keel.rollout.chat.chat import TemplateChat
from tests.agents.episodes import result_of
from tests.rollout.chat.families import chat_of, tokenizer_of
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
CHAT = chat_of("tiny")


def ids_of(text: str, family: str = "tiny") -> list[int]:
    """Return ids as the policy would sample them; control texts become control tokens."""
    return tokenizer_of(family).encode(text, add_special_tokens=False)


ids_of("The tokenizer starts threads at its first use, before any test counts them.")


class Policy:
    """Answers `script(context as text, turn)`, where the turns of each conversation are counted.

    Every sampled token has a number as its version, and in its log-probability and mask. Every
    routes row has its turn, among all conversations, and its position.
    """

    def __init__(
        self,
        script: Callable[[str, int], str] | Sequence[str],
        family: str = "tiny",
        *,
        seconds: float = 0.5,
        finish: Literal["stop", "length"] = "stop",
    ) -> None:
        """family: of `tests.rollout.chat.families`, one whose turns end in <|im_end|>."""
        self._script, self.family, self.seconds, self.finish = script, family, seconds, finish
        self.requests: list[TurnRequest] = []
        self.turns: list[tuple[list[int], list[int]]] = []
        """(context, sampled ids) of each answered request."""
        self.numbers: dict[int, tuple[int, int]] = {}
        """(turn, token) by number."""
        self.hold: asyncio.Event | None = None
        self.fail: Exception | None = None
        self.silent = False
        self.plain = False
        """True for an engine without routes and sampling masks."""
        self._answered = Counter[str]()

    async def sample(self, request: TurnRequest) -> TurnResult:
        await asyncio.sleep(0)
        self.requests.append(request)
        if self.hold is not None:
            await self.hold.wait()
        return self.say(request)

    def say(self, request: TurnRequest) -> TurnResult:
        if self.fail is not None:
            raise self.fail
        context, count = request.token_ids_T.tolist(), self._answered[request.conversation]
        text = (
            self._script(chat_of(self.family).decode(context), count)
            if callable(self._script)
            else self._script[min(count, len(self._script) - 1)]
        )
        self._answered[request.conversation] += 1
        sampled = ids_of(text + END * (self.finish == "stop"), self.family)
        cut = len(sampled) > request.max_tokens
        sampled = [] if self.silent else sampled[: request.max_tokens]
        turn, first = len(self.turns), len(self.numbers)
        self.turns.append((context, sampled))
        numbers = np.arange(first, first + len(sampled), dtype=np.int32)
        self.numbers |= {first + i: (turn, i) for i in range(len(sampled))}
        rows = range(request.routes_from, len(context) + len(sampled) - 1)
        routes = np.array([[[turn, t]] for t in rows], np.int16).reshape(-1, 1, 2)
        own = np.eye(rows.stop, dtype=bool)[rows.start :, None]  # each token selects itself
        selected = np.packbits(own, axis=-1, bitorder="little")
        masks = SamplingMasks.from_lists([[n, n + 1] for n in numbers])
        recordings = Recordings(routes_TLK=routes, sampling_mask=masks, selected_TLb=selected)
        stored = StoredRecordings.of(recordings, len(context) - request.routes_from)
        return TurnResult(
            token_ids_R=np.array(sampled, np.int32),
            logp_old_R=-numbers.astype(np.float32) / 1024,
            version_R=numbers,
            finish_reason="length" if cut else self.finish,
            recordings=None if self.plain else stored,
            cached_tokens=7,
            sampling_s=self.seconds,
        )

    def submit(self, request: TurnRequest, purpose: str) -> Future[TurnResult]:
        self.requests.append(request)
        future: Future[TurnResult] = Future()
        try:
            future.set_result(self.say(request))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass
class Sums:
    log: list[str] = field(default_factory=list[str])
    replies: Sequence[str] = ()
    """Replies of the user to turns without a call, in order."""
    fails: str = ""
    """Phase in which it is lost."""
    hangs: str = ""
    grade: Verdict | str | None = None
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

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict | str:
        await self._at(f"verdict {finish_reason}", "verdict")
        right = str(messages[-1]["content"]).strip() == "42"
        return self.grade or Verdict(parts={"correct": float(right)})

    async def close(self) -> None:
        await self._at("close", "close")

    async def _at(self, what: str, method: str) -> None:
        self.log.append(what)
        if method == self.hangs:
            await asyncio.sleep(3600)
        if method == self.fails:
            raise EnvironmentLost(method, "ended with SIGSEGV")


TASK = Prompt(
    prompt_id="s/1",
    domain="sums",
    messages=({"role": "user", "content": "sums, task 1"},),
    environment="sums",
    thinking=False,
)
BUDGET = Budget(turns=8, turn_tokens=64, tokens=400, window=600)


def play(
    policy: Policy,
    environment: Environment,
    *,
    budget: Budget = BUDGET,
    thinking: bool = False,
    form: TemplateChat | None = None,
    crash_is_failure: Collection[str] = (),
) -> Trajectory | str:
    episode = Episode(
        settings=EpisodeSettings(
            environment=lambda _: environment,
            chat=form or CHAT,
            budget=budget,
            crash_is_failure=crash_is_failure,
        ),
        task=replace(TASK, thinking=thinking),
        sample=policy.sample,
        name="c",
        sibling=0,
        seed=5,
        environment_seed=7,
    )
    return result_of(episode.run(), within_s=PATIENCE_S)
