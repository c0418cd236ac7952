"""TextArena games, where the package is installed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from keel.agents.environments.textarena_game import BRIEF, MOST_LOST, Game
from keel.rl.types import Verdict
from tests.agents.episodes import episode, run, transcript, use

TARGET = "keel.agents.environments.textarena_game:Game"
pytestmark = pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is not installed")
SIZES: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "GuessTheNumber-v0": ({"max_number": 7, "max_turns": 2}, ("1", "7")),
    "Mastermind-v0": ({"code_length": 2, "num_numbers": 4}, ("1 2", "3 4")),
    "TowerOfHanoi-v0": ({"num_disks": 2, "max_turns": 6}, ("A B", "A C")),
    "FrozenLake-v0": ({"size": 3, "num_holes": 2}, ("right", "down")),
    "LightsOut-v0": ({"size": 3}, ("0 0", "1 1")),
    "Minesweeper-v0-small": ({}, ("2 2", "0 0")),
    "Sudoku-v0-very-easy": ({}, ("1 1 1", "2 2 2")),
    "2048-v0-ultra-easy": ({"board_size": 3, "target_tile": 8}, ("left", "down")),
}
"""Arguments and two moves of each game."""


@pytest.mark.e2e
def test_brief_game_with_tool_calls() -> None:
    async def play() -> list[str]:
        options = {"min_number": 1, "max_number": 7}
        arguments = {"game": "GuessTheNumber-v0", "options": options, "brief": True}
        async with episode(TARGET, arguments=arguments, seed=5) as environment:
            result = await use(environment, "play", action="seven")
            assert result.text.startswith("No: ") and not result.failed
            low, high, texts = 1, 7, list[str]()
            while not result.done:
                middle = (low + high) // 2
                result = await use(environment, "play", action=str(middle))
                texts.append(result.text)
                low, high = (middle + 1, high) if result.text == "higher" else (low, middle - 1)
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Verdict)
            assert texts[-1] == "won" and verdict.parts == {"correct": 1.0, "score": 1.0}
            return texts

    assert run(play()) == run(play())


@pytest.fixture
def dice() -> Iterator[None]:
    """Restore the global random state, which the games draw from."""
    before = random.getstate()
    yield
    random.setstate(before)


@pytest.mark.parametrize("name", SIZES)
def test_games_are_seeded_and_brief(name: str, dice: None) -> None:
    options, moves = SIZES[name]
    for seed in range(2):
        game = Game(name, options, brief=True)
        seen, _ = game.reset(seed=seed)
        assert seen == Game(name, options, brief=True).reset(seed=seed)[0]
        game.reset(seed=seed)
        rules, _, board = seen.partition("\n")
        assert rules == BRIEF[name.partition("-v")[0]].rules.format(game=game._game)
        assert len(seen) < 200 and "You " not in seen and "Board" not in seen
        assert name[0] in "GM" or board
        for move in moves:
            observation, _, over, _, _ = game.step(move)
            assert "Board:" not in observation and "grid" not in observation
            if over:
                break


def test_right_moves_win(dice: None) -> None:
    for name, moves in (
        ("GuessTheNumber-v0", lambda game: [str(game.game_number)]),
        ("Mastermind-v0", lambda game: [" ".join(map(str, game.state.game_state["secret_code"]))]),
        ("TowerOfHanoi-v0", lambda game: ["A B", "A C", "B C"]),
    ):
        game = Game(name, SIZES[name][0], brief=True)
        game.reset(seed=3)
        results = [game.step(move) for move in moves(game._game)]
        assert (results[-1][0], sum(one[1] for one in results)) == ("won", 1.0)


@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "Mastermind-v0", "2048-v0-ultra-easy"])
def test_lost_games_score_less(name: str, dice: None) -> None:
    game = Game(name)
    game.reset(seed=1)
    total, over = 0.0, False
    while not over:
        observation, reward, over, _, _ = game.step("nonsense")
        total += reward
    assert observation and 0 <= total < 0.5
    game._game.state.rewards = {0: 1.3}  # as 2048 gives for some losses
    assert game._result() == MOST_LOST
