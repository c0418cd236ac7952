"""A scripted policy that speaks the tiny model's chat format, and the law of recording."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from keel.agents.budget import Budget
from keel.agents.endpoint.recorder import TrajectoryRecorder
from keel.agents.endpoint.replies import Reply
from keel.agents.endpoint.requests import load_object, read_request
from keel.agents.endpoint.server import Address, Endpoint
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import NO_ROUTE, SamplingMasks, Segment
from tests.agents.episodes import result_of
from tests.rollout.chat.families import CITY, chat_of, tokenizer_of
from tests.waiting import PATIENCE_S

Messages = list[dict[str, Any]]
CHAT = chat_of("tiny")
BUDGET = Budget(window=6000, tokens=4000, turns=60, turn_tokens=300)
TOOLS = [CITY.as_json()]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def ids_of(text: str, family: str = "tiny") -> list[int]:
    """Return ids as the policy would sample them; control texts become control tokens."""
    return tokenizer_of(family).encode(text, add_special_tokens=False)


ids_of("The tokenizer starts threads at its first use, before any test counts them.")


class Policy:
    """Answers `script(context as text, turn)`. Every sampled token has a number as its version, and
    in its log-probability and mask. Every routes row has its turn and position."""

    def __init__(
        self, script: Callable[[str, int], str] | Sequence[str], family: str = "tiny"
    ) -> None:
        """family: of `tests.rollout.chat.families`, one whose turns end in <|im_end|>."""
        self._script, self.family = script, family
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

    async def __call__(self, request: TurnRequest) -> TurnResult:
        self.requests.append(request)
        if self.hold is not None:
            await self.hold.wait()
        if self.fail is not None:
            raise self.fail
        context, turn = request.token_ids_T.tolist(), len(self.turns)
        text = (
            self._script(chat_of(self.family).decode(context), turn)
            if callable(self._script)
            else self._script[min(turn, len(self._script) - 1)]
        )
        sampled = ids_of(text + "<|im_end|>", self.family)
        cut = len(sampled) > request.max_tokens
        sampled = [] if self.silent else sampled[: request.max_tokens]
        self.turns.append((context, sampled))
        first = len(self.numbers)
        numbers = np.arange(first, first + len(sampled), dtype=np.int32)
        self.numbers |= {first + i: (turn, i) for i in range(len(sampled))}
        rows = range(request.routes_from, len(context) + len(sampled) - 1)
        routes = np.array([[[turn, t]] for t in rows], np.int16).reshape(-1, 1, 2)
        masks = SamplingMasks.from_lists([[n, n + 1] for n in numbers])
        return TurnResult(
            token_ids_N=np.array(sampled, np.int32),
            logp_old_N=-numbers.astype(np.float32) / 1024,
            version_N=numbers,
            finish_reason="length" if cut else "stop",
            routes_RLK=None if self.plain else routes,
            sampling_mask=None if self.plain else masks,
            cached_tokens=7,
            sampling_s=0.5,
        )


def check_law(policy: Policy, segments: Sequence[Segment]) -> None:
    """Assert that every sampled token is trained once, after exactly the ids that were sent."""
    trained: list[int] = []
    for segment in segments:
        ids, masks, routes = segment.token_ids_T.tolist(), segment.sampling_mask, segment.routes_TLK
        assert (masks is None) == (routes is None) == policy.plain
        for t in range(len(ids)):
            if not segment.trainable_T[t]:
                assert (segment.version_T[t], segment.logp_old_T[t]) == (-1, 0)
                assert masks is None or not len(masks[t])
                continue
            number = int(segment.version_T[t])
            assert segment.logp_old_T[t] == -number / 1024
            turn, place = policy.numbers[number]
            context, sampled = policy.turns[turn]
            assert ids[:t] == context + sampled[:place]
            assert ids[t] == sampled[place]
            assert masks is None or masks[t].tolist() == [number, number + 1]
            # The previous token's row comes from the same turn, at its own position.
            assert routes is None or routes[t - 1, 0].tolist() == [turn, t - 1]
            trained.append(number)
        assert segment.trainable_T[-1]
        if routes is not None:
            assert routes[:-1, 0, 1].tolist() == list(range(len(ids) - 1))
            assert routes.dtype == np.int16 and (routes[-1] == NO_ROUTE).all()
    assert sorted(trained) == sorted(policy.numbers)


def recorder_of(
    policy: Any,
    *,
    name: str = "p/0",
    thinking: bool = False,
    chat: Any = CHAT,
    turn_s: float = PATIENCE_S,
    **budget: Any,
) -> TrajectoryRecorder:
    return TrajectoryRecorder(
        name=name,
        prompt_id="p",
        chat=chat,
        sample=policy,
        thinking=thinking,
        seed=3,
        budget=replace(BUDGET, **budget),
        turn_s=turn_s,
    )


async def ask(
    recorder: TrajectoryRecorder, messages: Messages, tools: Any = (), **fields: Any
) -> Reply:
    """Send a request as JSON."""
    body = {"model": "m", "messages": messages, "tools": list(tools), **fields}
    return await recorder.turn(read_request(load_object(json.dumps(body).encode())))


def record(
    policy: Any, work: Callable[[TrajectoryRecorder], Awaitable[object]], **settings: Any
) -> TrajectoryRecorder:
    """Run `work` with a recorder, check the law, and return what was recorded."""

    async def recorded() -> TrajectoryRecorder:
        recorder = recorder_of(policy, **settings)
        await work(recorder)
        await recorder.finish()
        return recorder

    finished = play(recorded())
    if isinstance(policy, Policy):
        check_law(policy, finished.segments)
    return finished


def as_sent(reply: Reply) -> dict[str, Any]:
    """Return the policy's message as most clients send it back: without its thinking."""
    message = {"role": "assistant", "content": reply.message["content"] or None}
    if calls := reply.message.get("tool_calls"):
        message["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], indent=1),
                },
            }
            for call in calls
        ]
    return message


def play(work: Any) -> Any:
    return result_of(work, within_s=PATIENCE_S)


def client_of(address: Address) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=address.base_url,
        api_key=address.api_key,
        max_retries=0,
        timeout=PATIENCE_S,
        http_client=DefaultAsyncHttpxClient(verify=False),  # plain HTTP needs no certificates
    )


@asynccontextmanager
async def served(
    recorder: TrajectoryRecorder,
) -> AsyncIterator[tuple[Endpoint, Address, AsyncOpenAI]]:
    async with Endpoint() as endpoint:
        address = endpoint.add(recorder)
        async with client_of(address) as client:
            yield endpoint, address, client


def script(context: str, turn: int) -> str:
    """Call no tool, one, two, none, …, with thinking where it is allowed."""
    thought = "" if "<think>\n\n</think>" in context[-24:] else f"<think>\nhm {turn}\n</think>\n\n"
    calls = ["", '\n@city "Rome"', '\n@city "Rome", 2\n@city "Oslo", 3.0'][turn % 3]
    return f"{thought}turn {turn}{calls if 'Tools:' in context else ''}"
