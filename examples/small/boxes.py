"""Scripted conversations of `keel.agents.environments.boxes` for cold starts."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from keel.agents.env_runtime.tool_objects import ObjectEnvironment
from keel.agents.environments.boxes import Boxes
from keel.agents.environments.demonstrations import Demonstration, play
from keel.agents.environments.trip.environment import Calls
from keel.agents.episode import ASK_FOR_SUMMARY, SUMMARY
from keel.rl.turns import Message

_SEEN = 4


def demonstrations(count: int, *, seed: int, arguments: Mapping[str, Any]) -> list[Demonstration]:
    """Generate demonstrations in which the agent opens boxes in random order, plus hasty ones in
    which it guesses. Some start or end with a summary, as happens when the context is full."""
    made: list[Demonstration] = []
    for number in range(count):
        draw = random.Random(f"boxes shown {seed} {number}")
        environment = ObjectEnvironment(Boxes(**arguments))
        last = int(arguments.get("boxes", 12))
        order = draw.sample(range(1, last + 1), last)
        tools, worked = play(environment, {}, number, _look(order))
        _, hasty = play(environment, {}, number, _guess(draw.randint(1, last)))
        made.append(Demonstration(tools=tools, worked=_shown(worked, draw), hasty=hasty))
    return made


def _look(order: Sequence[int]) -> Calls:
    for box in order:
        if "prize" in (yield "look", {"box": box}):
            return str(box)
    raise AssertionError("no box has the prize")


def _guess(box: int) -> Calls:
    return str(box)
    yield  # without a call


def _shown(whole: Sequence[Message], draw: random.Random) -> tuple[Message, ...]:
    """Return an excerpt of a few steps from a conversation. A summary may replace the earlier
    steps. If later steps were cut off, the excerpt ends with the request for a summary and the
    summary itself."""
    opening, *turns = whole
    steps = [turns[i : i + 2] for i in range(0, len(turns) - 1, 2)]
    start = draw.randrange(max(1, len(steps)))
    part = [message for step in steps[start : start + _SEEN] for message in step]
    empty = [str(step[0]["tool_calls"][0]["function"]["arguments"]["box"]) for step in steps]
    before: list[Message] = []
    if start and draw.random() < 0.7:
        before = [{"role": "user", "content": SUMMARY + _written(empty[:start])}]
    if start + _SEEN >= len(steps):
        return (opening, *before, *part, turns[-1])
    last = {**part[-1], "content": f"{part[-1]['content']}\n\n{ASK_FOR_SUMMARY}"}
    summary = _written(empty[: start + _SEEN] if before else empty[start : start + _SEEN])
    return (opening, *before, *part[:-1], last, {"role": "assistant", "content": summary})


def _written(boxes: Sequence[str]) -> str:
    return f"Empty: {' '.join(boxes)}"
