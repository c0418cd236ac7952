"""Scripted conversations match the environments' messages and end as intended."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from keel.agents.env_runtime.tool_objects import Object, methods_of
from keel.agents.environments.demonstrations import guess_demonstrations, play
from keel.agents.environments.textarena_game import Game


class Shop:
    def opening(self) -> str:
        return "Buy."

    def ask(self, stall: str) -> str:
        return stall


def unknown() -> Any:
    yield "sell", {}


def unfinished() -> Any:
    yield "ask", {"stall": "1"}


@pytest.mark.parametrize(("script", "why"), [(unknown, "sell"), (unfinished, "None")])
def test_invalid_scripts_are_reported(script: Callable[[], Any], why: str) -> None:
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
                for message in messages:
                    if message["role"] == "assistant":
                        arguments = message["tool_calls"][0]["function"]["arguments"]
                        text, reward, over, _, _ = game.step(**arguments)
                        texts.append(text)
                        total += reward
                seen_texts = [m["content"] for m in messages if m["role"] == "tool"]
                assert over and texts[:-1] == seen_texts
                won[habit] += total == 1.0
    finally:
        random.setstate(before)
    assert won["worked"] == 40 and 5 < won["hasty"] < 30
