"""The adapter for games with `reset` and `step`."""

from importlib.util import find_spec
from typing import Any

import pytest

from keel.agents.env_runtime.games import TextGame
from keel.agents.env_runtime.tool_objects import EnvironmentGone
from keel.rl.types import Verdict
from tests.agents.episodes import episode, run, use


class Walk:
    render_mode: str | None = "ansi"

    class _Space:
        n, start = 2, 0

    action_space: Any = _Space()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self._at = 0
        return self._at, {"prob": 1}

    def step(self, action: int) -> Any:
        self._at += 1 if action else 0
        return self._at, 0.1, self._at == 10, False, {}

    def render(self) -> str:
        cells = ["."] * 11
        cells[self._at] = f"\x1b[41m{cells[self._at]}\x1b[0m"
        return "\n" + "".join(cells) + "\x1b[0m\n"


SYSTEM = {"role": "system", "content": "Think first."}
TASK: dict[str, Any] = {"messages": [SYSTEM, {"role": "user", "content": "Walk."}]}


def test_walk_to_the_end() -> None:
    game = TextGame(Walk(), rules="Walk to the right: 1.")
    system, message = game.opening(TASK, 3)["messages"]
    assert system == SYSTEM
    assert message["content"] == "Walk to the right: 1.\n\n[.].........."
    assert game.call("play", {"action": 1})["text"] == ".[.]........."
    for _ in range(9):
        done = game.call("play", {"action": 1})["done"]
    assert done
    assert game.verdict([], "stop")["parts"] == {"correct": 1.0, "score": 1.0}


class Points:
    def __init__(self) -> None:
        self.seeds: list[int] = []
        self._rewards = iter([0.0, 0.25, 0.5])

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reset(self) -> Any:
        return (3, 7), {"won": True}

    def step(self, action: str) -> tuple[Any, float, bool, dict[str, Any]]:
        reward = next(self._rewards)
        return (3, 7), reward, reward == 0.5, {"won": True}


@pytest.mark.parametrize(("score", "total"), [("sum", 0.75), ("last", 0.5)])
def test_four_result_games_are_supported(score: Any, total: float) -> None:
    inner = Points()
    game = TextGame(inner, score=score)
    assert game.opening(TASK, 3)["messages"][1]["content"] == "(3, 7)" and inner.seeds == [3]
    moves = [game.call("play", {"action": "go"}) for _ in range(3)]
    assert [move["done"] for move in moves] == [False, False, True]
    assert {move["text"] for move in moves} == {"(3, 7)"}
    assert game.verdict([], "stop")["facts"] == {"return": total, "moves": 3}


def test_truncation_ends_and_invalid_results_lose_games() -> None:
    game = TextGame(Walk())
    game.opening(TASK, 3)
    game._game.step = lambda _: (1.0, True)
    with pytest.raises(EnvironmentGone, match="step"):
        game.call("play", {"action": 1})
    game._game.step = lambda _: (1, 0.0, False, True, {})
    assert game.call("play", {"action": 1})["done"]


TARGET = "keel.agents.environments.textarena_game:Game"


@pytest.mark.e2e
@pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is not installed")
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
            verdict = await environment.verdict((), "stop")
            assert isinstance(verdict, Verdict)
            assert texts[-1] == "won" and verdict.parts == {"correct": 1.0, "score": 1.0}
            return texts

    assert run(play()) == run(play())
