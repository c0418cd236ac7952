"""The adapter for games with `reset` and `step`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import Hosted, Program
from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment
from keel.agents.env_runtime.games import TextGame
from keel.rl.types import Prompt, Verdict
from tests.agents.episodes import run, transcript, use


class Walk:
    """Like FrozenLake: the observation is a number, the rendering is colored."""

    render_mode: str | None = "ansi"

    class _Space:
        n, start = 2, 0

    action_space: Any = _Space()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self._at = 0
        return self._at, {"prob": 1}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._at += 1 if action else 0
        return self._at, 0.1, self._at == 10, False, {}

    def render(self) -> str:
        cells = ["."] * 11
        cells[self._at] = f"\x1b[41m{cells[self._at]}\x1b[0m"
        return "\n" + "".join(cells) + "\x1b[0m\n"


TASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Walk."}]}


def test_rendering_marks_the_colored_cell() -> None:
    game = TextGame(Walk(), rules="Walk to the right: 1.")
    (message,) = game.opening(TASK, 3)["messages"]
    assert message["content"] == "Walk to the right: 1.\n\n[.].........."
    assert game.call("play", {"action": 1})["text"] == ".[.]........."
    plain = Walk()
    plain.render_mode = None
    assert TextGame(plain).opening(TASK, 3)["messages"][0]["content"] == "0"


def test_rewards_summing_to_one_win() -> None:
    game = TextGame(Walk())
    game.opening(TASK, 3)
    for _ in range(10):
        done = game.call("play", {"action": 1})["done"]
    assert done and sum([0.1] * 10) < 1
    assert game.verdict([], "stop")["parts"] == {"correct": 1.0, "score": 1.0}


def test_system_message_is_kept() -> None:
    system = {"role": "system", "content": "Think first."}
    messages = TextGame(Walk()).opening({"messages": [system, *TASK["messages"]]}, 3)["messages"]
    assert messages[0] == system and [one["role"] for one in messages] == ["system", "user"]


def test_unsupported_action_space_is_refused() -> None:
    class Box:
        def sample(self) -> None: ...

        def __repr__(self) -> str:
            return "Box(-1.0, 1.0, (3,))"

    class Text(Box): ...

    game = Walk()
    game.action_space = Box()
    with pytest.raises(InvalidEnvironment, match="Box"):
        TextGame(game)
    game.action_space = Text()
    (tool,) = TextGame(game).opening(TASK, 3)["tools"]
    assert tool["parameters"]["properties"]["action"] == {"type": "string"}


class Points:
    """Like old gym: four results and a method `seed`."""

    def __init__(self, seen: Any, rewards: Sequence[float], info: dict[str, Any]) -> None:
        self._seen, self._rewards, self._info = seen, rewards, info
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reset(self) -> Any:
        self._moves = 0
        return self._seen

    def step(self, action: str) -> tuple[Any, float, bool, dict[str, Any]]:
        self._moves += 1
        done = self._moves == len(self._rewards)
        return self._seen, self._rewards[self._moves - 1], done, self._info

    def get_observation(self) -> Any:
        raise AssertionError("this is not TextArena")


class TextWorld(Points):
    """Its `step` returns the score so far, its `reset` the observation and infos."""

    def reset(self) -> Any:
        return super().reset(), self._info


@pytest.mark.parametrize("kind", [Points, TextWorld])
@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ("You are in a kitchen.", "You are in a kitchen."),
        ((3, 7), "(3, 7)"),
        ([(1, 2), (3, 4)], "[(1, 2), (3, 4)]"),
        (("wall", {"a": 1}, 2), "('wall', {'a': 1}, 2)"),
    ],
)
def test_four_result_games_are_supported(kind: type[Points], seen: Any, text: str) -> None:
    inner = kind(seen, [0.0, 0.25, 0.5], {"won": True, "max_score": 4})
    game = TextGame(inner, score="last" if kind is TextWorld else "sum")
    assert game.opening(TASK, 3)["messages"][0]["content"] == text and inner.seeds == [3]
    moves = [game.call("play", {"action": "go"}) for _ in range(3)]
    assert [move["done"] for move in moves] == [False, False, True]
    assert {move["text"] for move in moves} == {text}
    assert game.verdict([], "stop")["facts"] == {
        "return": 0.5 if kind is TextWorld else 0.75,
        "moves": 3,
    }


@pytest.mark.parametrize("ends", [(True, False), (False, True)])
def test_terminated_or_truncated_ends_the_game(ends: tuple[bool, bool]) -> None:
    class Ends(Walk):
        def step(self, action: int) -> Any:
            return (self._at, 0.0, *ends, {})

    game = TextGame(Ends())
    game.opening(TASK, 3)
    assert game.call("play", {"action": 1})["done"]


def test_invalid_step_result_ends_the_episode() -> None:
    class Pair(Walk):
        def step(self, action: int) -> Any:
            return 1.0, True

    game = TextGame(Pair())
    game.opening(TASK, 3)
    with pytest.raises(EnvironmentGone, match="`step`"):
        game.call("play", {"action": 1})


GYMNASIUM = os.environ.get("KEEL_GYMNASIUM_PYTHON", "")


@pytest.mark.e2e
@pytest.mark.skipif(
    not GYMNASIUM,
    reason="KEEL_GYMNASIUM_PYTHON does not name an interpreter with gymnasium[toy-text]",
)
def test_frozen_lake_of_gymnasium(tmp_path: Path) -> None:
    arguments = {
        "id": "FrozenLake-v1",
        "render_mode": "ansi",
        "is_slippery": False,
        "rules": "Walk from S to G, not into H. 0 left, 1 down, 2 right, 3 up.",
    }
    program = Program(
        target="gymnasium:make",
        kind="game",
        arguments=arguments,
        python=GYMNASIUM,
        folder=tmp_path,
    )
    task = Prompt(prompt_id="p", domain="game", messages=({"role": "user", "content": ""},))

    async def play() -> None:
        environment = Hosted(program)
        try:
            opening = await environment.open(task, seed=3)
            rules, _, lake = opening.messages[0]["content"].partition("\n\n")
            assert rules == arguments["rules"]
            assert lake == "[S]FFF\nFHFH\nFFFH\nHFFG"
            (tool,) = opening.tools
            action = {"type": "integer", "minimum": 0, "maximum": 3}
            assert tool.parameters["properties"] == {"action": action}
            assert (await use(environment, "play", action=4)).failed
            results = [await use(environment, "play", action=n) for n in (1, 1, 2, 1, 2, 2)]
            assert [one.done for one in results] == [False] * 5 + [True]
            assert results[0].text == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Verdict)
            assert verdict.parts == {"correct": 1.0, "score": 1.0}
            assert verdict.facts == {"return": 1.0, "moves": 6}
        finally:
            await environment.close()

    run(play())


def test_huge_number_is_an_invalid_move() -> None:
    game = TextGame(Walk(), play_by="text")
    game.opening(TASK, 3)
    assert "0 to 1" in game.reply({"content": "9" * 5000})["content"]
