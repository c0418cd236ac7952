"""Scripted conversations match the environments' messages and end as intended."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from keel.agents.env_runtime.tool_objects import Object, methods_of
from keel.agents.environments.demonstrations import (
    guess_demonstrations,
    play,
    trip_demonstrations,
)
from keel.agents.environments.textarena_game import Game
from keel.agents.environments.trip.environment import Trip, make_task
from keel.agents.environments.trip.prompts import trip_prompts
from keel.agents.environments.trip.solver import Calls
from keel.agents.environments.trip.tasks import LEVELS
from keel.agents.environments.trip.verify import checks
from keel.rl.turns import Message
from tests.rollout.chat.families import chat_of


def calls_of(messages: Sequence[Message]) -> list[tuple[str, dict[str, Any]]]:
    functions = [m["tool_calls"][0]["function"] for m in messages if m["role"] == "assistant"]
    return [(one["name"], one["arguments"]) for one in functions]


@pytest.mark.parametrize("level", [0, 3])
def test_trips(level: int) -> None:
    made = trip_demonstrations(12, seed=3, arguments={"level": level})
    assert made == trip_demonstrations(12, seed=3, arguments={"level": level})
    first = made[0].worked[0]["content"]
    for one in made:
        assert one.worked[0] == one.hasty[0] and one.tools
        for messages, right in ((one.worked, True), (one.hasty, False)):
            *looked, (name, submitted) = calls_of(messages)
            assert name == "submit_result" and bool(looked) == right
            assert messages[-1]["role"] == "assistant"
            answers = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
            assert answers == [f"call_{turn}_0" for turn in range(len(looked))]
            del submitted
    assert len({one.worked[0]["content"] for one in made}) > 6 and first
    others = {prompt.prompt_id for prompt in trip_prompts(level, 12, seed=3)}
    assert not others & {p.prompt_id for p in trip_prompts(level, 12, seed=3 + (1 << 20))}


def test_careful_trips_succeed_and_hasty_ones_fail() -> None:
    for number, one in enumerate(trip_demonstrations(30, seed=0, arguments={})):
        seed = (1 << 20) * 1_000_000 + number
        for messages, right in ((one.worked, 1.0), (one.hasty, 0.0)):
            trip = Trip(ready=(*make_task(seed, LEVELS[0]), LEVELS[0]))
            for name, arguments in calls_of(messages):
                getattr(trip, name)(**arguments)
            parts = trip.verdict()[0]
            assert parts["correct"] == right and (parts["progress"] == 1.0) == bool(right)


def test_small_tasks_fit_few_tokens() -> None:
    """Counted in the tiny model's tokens."""
    chat = chat_of("tiny")
    for one in trip_demonstrations(10, seed=1, arguments={}):
        assert len(chat.opening(one.worked[:1], one.tools, thinking=True)) == 19
        assert len(chat.opening(one.worked, one.tools, thinking=True)) <= 64


def test_level_zero_verifier_matches_brute_force() -> None:
    """Tries every two-letter name, and other forms of each."""
    for seed in range(40):
        world, task = make_task(seed, LEVELS[0])
        assert task.cities is not None and task.hotel_at_most is not None
        names = {a + b for a in "BDFGKLMNPRSTVZ" for b in "aeiou"}
        places = [*world.cities, *world.restaurants, *world.attractions]
        assert names >= {*world.hotels, *places}
        good = 0
        for name in sorted(names):
            hotel = world.hotels.get(name)
            expected = (
                hotel is not None
                and hotel.city == task.cities[0]
                and hotel.price <= task.hotel_at_most
            )
            assert all(checks(world, task, name).values()) == expected, name
            good += expected
            for other in (f"{name}, {name}", f"{name}\n{name}", name.lower(), f'["{name}"]', ""):
                assert not all(checks(world, task, other).values())
            assert all(checks(world, task, f" {name}\n").values()) == expected
        assert 1 <= good <= 2


class Shop:
    def opening(self) -> str:
        return "Buy."

    def ask(self, stall: str) -> str:
        return stall


def unknown() -> Calls:
    yield "sell", {}


def unfinished() -> Calls:
    yield "ask", {"stall": "1"}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (unknown, "calls 'sell', and the tools are ask"),
        (unfinished, "ends after 1 calls, and the environment does not; .* it returns None"),
    ],
)
def test_invalid_scripts_are_reported(script: Callable[[], Calls], why: str) -> None:
    shop = Shop()
    with pytest.raises(ValueError, match=why):
        play(Object(shop, methods_of(shop)), {}, 0, script())


@pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is not installed")
def test_guesses() -> None:
    options = {"min_number": 1, "max_number": 7, "max_turns": 2}
    before = random.getstate()
    made = guess_demonstrations(40, seed=3, arguments={"options": options})
    assert random.getstate() == before
    assert made == guess_demonstrations(40, seed=3, arguments={"options": options})
    won = {"worked": 0, "hasty": 0}
    try:
        for number, one in enumerate(made):
            for habit, messages in (("worked", one.worked), ("hasty", one.hasty)):
                game = Game("GuessTheNumber-v0", options, brief=True)
                drawn = random.Random(f"guess 3 {number}").randrange(1 << 31)
                seen, _ = game.reset(seed=drawn)
                assert messages[0]["content"] == seen == "Guess a number from 1 to 7."
                total, over, texts = 0.0, False, list[str]()
                for name, arguments in calls_of(messages):
                    assert name == "play" and not over
                    text, reward, over, _, _ = game.step(**arguments)
                    texts.append(text)
                    total += reward
                assert over and texts[:-1] == [
                    m["content"] for m in messages if m["role"] == "tool"
                ]
                won[habit] += total == 1.0
    finally:
        random.setstate(before)
    assert won["worked"] == 40 and 5 < won["hasty"] < 30
