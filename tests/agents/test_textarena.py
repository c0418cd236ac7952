"""TextArena games, where the package is installed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from keel.agents.environments.textarena_game import _MAX_LOST, Game
from keel.rl.types import Verdict
from tests.agents.episodes import episode, run, transcript, use

TARGET = "keel.agents.environments.textarena_game:Game"
pytestmark = pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is not installed")


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
    assert game._result() == _MAX_LOST
