"""Requests and clients for a recorder, and the law of recording."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from keel.agents.endpoint.recorder import TrajectoryRecorder
from keel.agents.endpoint.requests import Reply, load_object, read_request
from keel.agents.endpoint.server import Address, Endpoint
from keel.agents.episode import Budget
from keel.rl.recordings import NO_ROUTE
from keel.rl.types import Segment
from tests.agents.episodes import result_of
from tests.agents.scripted import CHAT, Policy
from tests.rollout.chat.families import CITY
from tests.waiting import PATIENCE_S

Messages = list[dict[str, Any]]
BUDGET = Budget(window=6000, tokens=4000, turns=60, turn_tokens=300)
TOOLS = [CITY.as_json()]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def check_law(policy: Policy, segments: Sequence[Segment]) -> None:
    """Assert that every sampled token is trained once, after exactly the ids that were sent."""
    trained: list[int] = []
    for segment in segments:
        segment = segment.loaded({})
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
            assert segment.selected_TLb is not None
            selected = np.unpackbits(segment.selected_TLb[:, 0], axis=-1, bitorder="little")
            assert selected[:-1].nonzero()[1].tolist() == list(range(len(ids) - 1))
            assert not selected[-1].any()
    assert sorted(trained) == sorted(policy.numbers)


def recorder_of(
    policy: Any,
    *,
    name: str = "p/0",
    thinking: bool = False,
    chat: Any = CHAT,
    **budget: Any,
) -> TrajectoryRecorder:
    return TrajectoryRecorder(
        name=name,
        prompt_id="p",
        chat=chat,
        sample=policy.sample if isinstance(policy, Policy) else policy,
        thinking=thinking,
        seed=3,
        budget=replace(BUDGET, **budget),
    )


async def ask(
    recorder: TrajectoryRecorder, messages: Messages, tools: Any = (), **fields: Any
) -> Reply:
    body = {"model": "m", "messages": messages, "tools": list(tools), **fields}
    return await recorder.turn(read_request(load_object(json.dumps(body).encode())))


def record(
    policy: Any, work: Callable[[TrajectoryRecorder], Awaitable[object]], **settings: Any
) -> TrajectoryRecorder:
    """Run `work` with a recorder, check the law, and return the recorder."""

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
