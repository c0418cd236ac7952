"""Creates scripted conversations for cold starts: a careful and a hasty one per task."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keel.agents.env_runtime.games import TextGame
from keel.agents.env_runtime.tool_objects import ObjectEnvironment
from keel.agents.environments.textarena_game import Game
from keel.agents.environments.trip.environment import Calls, Trip, make_task, solve
from keel.agents.environments.trip.tasks import LEVELS, TripTask, World, check_plan
from keel.rl.turns import Message, ToolSpec

_FAR = 1 << 20
"""Offset that keeps the seeds used here apart from the seeds of a recipe's prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A task with a careful and a hasty example conversation. Each ends with the policy's last tool
    call or answer."""

    tools: tuple[ToolSpec, ...]
    worked: tuple[Message, ...]
    hasty: tuple[Message, ...]
    """A well-formed conversation that does not use the tools properly and fails."""


def trip_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Generate demonstrations of trip planning. The hasty ones submit a wrong plan at once."""
    level = int(arguments.get("level", 0))
    made: list[Demonstration] = []
    first = (_FAR + seed) * 1_000_000
    for number in range(first, first + count):
        world, task = make_task(number, LEVELS[level])
        wrong = _wrong_plan(world, task, random.Random(f"hasty {number}"))
        prompt_task = {"reward": {"trip": {"level": level, "seed": number}}}
        worked, hasty = solve(task), _submit(wrong)
        made.append(_demonstrate(lambda: ObjectEnvironment(Trip()), prompt_task, 0, worked, hasty))
    return made


def guess_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Generate demonstrations of TextArena's GuessTheNumber, with shortened texts. The hasty ones
    ignore the hints."""
    options = arguments["options"]
    low, high = options["min_number"], options["max_number"]
    made: list[Demonstration] = []
    before = random.getstate()  # the games draw from it

    def game() -> TextGame:
        return TextGame(Game("GuessTheNumber-v0", dict(options), brief=True))

    try:
        for number in range(count):
            draw = random.Random(f"guess {seed} {number}")
            game_seed = draw.randrange(1 << 31)
            worked, hasty = _bisect(low, high), _draw_numbers(low, high, draw)
            made.append(_demonstrate(game, {}, game_seed, worked, hasty))
    finally:
        random.setstate(before)
    return made


def _demonstrate(
    environment: Callable[[], Any], task: Mapping[str, Any], seed: int, worked: Calls, hasty: Calls
) -> Demonstration:
    """Run the careful and the hasty script, each in a new environment."""
    (tools, one), (_, two) = (play(environment(), task, seed, calls) for calls in (worked, hasty))
    return Demonstration(tools=tools, worked=one, hasty=two)


def play(
    environment: Any, task: Mapping[str, Any], seed: int, calls: Calls
) -> tuple[tuple[ToolSpec, ...], tuple[Message, ...]]:
    """Run scripted tool calls in a local environment, until the environment ends the episode or the
    script returns a final answer. Returns the tools and the messages."""
    opening = environment.opening(task, seed)
    tools = tuple(ToolSpec(**one) for one in opening["tools"])
    messages: list[Message] = list(opening["messages"])
    turn, seen = 0, ""
    while True:
        try:
            name, arguments = calls.send(seen) if turn else next(calls)
        except StopIteration as end:
            if not isinstance(end.value, str):
                reason = f"it must return the policy's last words, is {end.value!r:.50}"
                raise ValueError(f"the script ends after {turn} calls; {reason}") from None
            messages.append({"role": "assistant", "content": end.value})
            return tools, tuple(messages)
        if name not in (names := [tool.name for tool in tools]):
            raise ValueError(f"the script calls {name!r}, and the tools are {', '.join(names)}")
        result = environment.call(name, arguments)
        call, reply = call_messages(turn, name, arguments, result["text"])
        messages.append(call)
        if result["done"]:
            return tools, tuple(messages)
        messages.append(reply)
        turn, seen = turn + 1, result["text"]


def call_messages(
    turn: int, name: str, arguments: Mapping[str, Any], text: str
) -> tuple[Message, Message]:
    """Return the messages of a tool call and of its result."""
    call_id = f"call_{turn}_0"
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": call_id, "name": name},
    )


def _submit(answer: str) -> Calls:
    yield "submit_result", {"answer_text": answer}


def _wrong_plan(world: World, task: TripTask, draw: random.Random) -> str:
    while True:
        plan: list[dict[str, str]] = []
        for day, date in enumerate(task.dates):
            fields = {"time": date, "city": (task.cities or world.cities)[day]}
            for key in task.place_keys:
                fields[key] = draw.choice(list(world.places[key.rpartition("_")[2]]))
            plan.append({key: fields[key] for key in task.level.keys})
        answer = task.write(plan)
        if not all(check_plan(world, task, answer).values()):
            return answer


def _bisect(low: int, high: int) -> Calls:
    while True:
        middle = (low + high) // 2
        hint = yield "play", {"action": str(middle)}
        low, high = (middle + 1, high) if hint == "higher" else (low, middle - 1)


def _draw_numbers(low: int, high: int, draw: random.Random) -> Calls:
    for number in draw.sample(range(low, high + 1), high + 1 - low):
        yield "play", {"action": str(number)}
