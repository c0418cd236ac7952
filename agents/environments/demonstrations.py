"""Scripted conversations of the small tasks, for a cold start: each task done as it should be, and
in haste."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from keel.agents.env_runtime import games
from keel.agents.env_runtime import tool_objects as kinds
from keel.agents.environments.textarena_game import Game
from keel.agents.environments.trip.environment import Trip, make_task
from keel.agents.environments.trip.prompts import trip_prompts
from keel.agents.environments.trip.solver import Calls, solve, written
from keel.agents.environments.trip.tasks import LEVELS, TripTask
from keel.agents.environments.trip.verify import checks
from keel.agents.environments.trip.world import World
from keel.rl.turns import Message, ToolSpec

FAR = 1 << 20
"""Added to the seed of the tasks, far from any that a recipe gives its prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A task and two conversations about it, which end with the policy's last call or words."""

    tools: tuple[ToolSpec, ...]
    worked: tuple[Message, ...]
    """Looks first, and is right."""
    hasty: tuple[Message, ...]
    """Well formed, and looks at nothing."""


def trip_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Of the trip planner's tasks; in haste a plan is submitted at once, and wrong. `arguments`: of
    the environment."""
    level = int(arguments.get("level", 0))
    made: list[Demonstration] = []
    for prompt in trip_prompts(level, count, seed=FAR + seed):
        number = prompt.reward["trip"]["seed"]
        world, task = make_task(number, LEVELS[level])
        given = {"messages": prompt.messages, "reward": prompt.reward}

        def played(calls: Calls, given: Mapping[str, Any] = given) -> Conversation:
            trip = Trip()
            return play(kinds.Object(trip, kinds.methods_of(trip)), given, 0, calls)

        worked = played(solve(task))
        hasty = played(_submit(_wrong_plan(world, task, random.Random(f"hasty {number}"))))
        made.append(Demonstration(tools=worked.tools, worked=worked.said, hasty=hasty.said))
    return made


def guess_demonstrations(
    count: int, *, seed: int, arguments: Mapping[str, Any]
) -> list[Demonstration]:
    """Of TextArena's GuessTheNumber in few words; in haste, numbers are drawn and hints not heeded.
    `arguments`: of the environment, with `min_number` and `max_number` among its `options`.

    Raises ModuleNotFoundError without the package textarena.
    """
    options = arguments["options"]
    low, high = options["min_number"], options["max_number"]
    made: list[Demonstration] = []
    with _dice_put_back():
        for number in range(count):
            draw = random.Random(f"guess {seed} {number}")
            game_seed = draw.randrange(1 << 31)

            def played(calls: Calls, game_seed: int = game_seed) -> Conversation:
                game = games.TextGame(Game("GuessTheNumber-v0", dict(options), brief=True))
                return play(game, {}, game_seed, calls)

            worked = played(_bisect(low, high))
            hasty = played(_draw_numbers(low, high, draw))
            made.append(Demonstration(tools=worked.tools, worked=worked.said, hasty=hasty.said))
    return made


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, the opening with it."""

    tools: tuple[ToolSpec, ...]
    said: tuple[Message, ...]


def play(environment: Any, task: Mapping[str, Any], seed: int, calls: Calls) -> Conversation:
    """A conversation of `calls` with an environment of this process, until that ends it or they
    return the policy's last words."""
    opening = environment.opening(task, seed)
    tools = tuple(ToolSpec(**one) for one in opening["tools"])
    said: list[Message] = list(opening["messages"])
    turn, seen = 0, ""
    while True:
        try:
            name, arguments = calls.send(seen) if turn else next(calls)
        except StopIteration as end:
            if not isinstance(end.value, str):
                raise ValueError(
                    f"the script ends after {turn} calls, and the environment does not; let it "
                    f"return the policy's last words, a text: it returns {end.value!r:.50}"
                ) from None
            said.append({"role": "assistant", "content": end.value})
            return Conversation(tools, tuple(said))
        if name not in (names := [tool.name for tool in tools]):
            raise ValueError(f"the script calls {name!r}, and the tools are {', '.join(names)}")
        call_id = f"call_{turn}_0"
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = environment.call(name, arguments)
        if result["done"]:
            return Conversation(tools, tuple(said))
        said.append(
            {"role": "tool", "content": result["text"], "tool_call_id": call_id, "name": name}
        )
        turn, seen = turn + 1, result["text"]


def _submit(answer: str) -> Calls:
    yield "submit_result", {"answer_text": answer}


def _wrong_plan(world: World, task: TripTask, draw: random.Random) -> str:
    """Of the right form, with things from anywhere."""
    places = {
        "hotel": world.hotels,
        "restaurant": world.restaurants,
        "attraction": world.attractions,
    }
    while True:
        plan: list[dict[str, str]] = []
        for day, date in enumerate(task.dates):
            fields = {"time": date, "city": (task.cities or world.cities)[day]}
            for key in task.keys:
                kind = key.rpartition("_")[2]
                if kind in places:
                    fields[key] = draw.choice(list(places[kind]))
            plan.append({key: fields[key] for key in task.keys})
        answer = written(task, plan)
        if not all(checks(world, task, answer).values()):
            return answer


def _bisect(low: int, high: int) -> Calls:
    while True:
        middle = (low + high) // 2
        hint = yield "play", {"action": str(middle)}
        low, high = (middle + 1, high) if hint == "higher" else (low, middle - 1)


def _draw_numbers(low: int, high: int, draw: random.Random) -> Calls:
    for number in draw.sample(range(low, high + 1), high + 1 - low):
        yield "play", {"action": str(number)}


@contextmanager
def _dice_put_back() -> Generator[None]:
    """The games draw from the global random state."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
