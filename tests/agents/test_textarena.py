"""TextArena games: a stand-in, and the real package where it is installed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import Hosted
from keel.agents.environments.textarena_game import BRIEF, MOST_LOST, Game
from keel.agents.types import EnvironmentLost
from keel.rl.types import Verdict
from tests.agents.episodes import TASK, program, run, transcript, use

TARGET = "keel.agents.environments.textarena_game:Game"
STAND_IN = """
import random
from enum import Enum

Kind = Enum("Kind", "PROMPT PLAYER_ACTION GAME_MESSAGE GAME_ADMIN")

class State:
    rewards = None

class GuessTheNumber:
    def __init__(self, min_number=1, max_number=20):
        self.min_number, self.max_number = min_number, max_number
    def reset(self, num_players, seed=None):
        assert num_players == 1
        random.seed(seed)
        self._number, self._last, self._left = random.randint(1, self.max_number), None, 4
        self.state = State()
        self.state.game_info = {0: {"invalid_move": False}}
        self._new = [(-1, "You have to guess.\\n", Kind.PROMPT)]
    def get_observation(self):
        new, self._new = self._new, []
        return 0, new
    def _get_percentage_completion(self):
        return 0.0 if self._last is None else 1 - abs(self._last - self._number) / 20
    def step(self, action):
        self._new.append((0, action, Kind.PLAYER_ACTION))
        self._left -= 1
        if action == "[seven]":
            said = "You attempted an invalid move. Reason: no number. Please resubmit a valid move"
            self._new.append((-1, said, Kind.GAME_ADMIN))
            return False, {}
        self._last = int(action[1:-1])
        if self._last == self._number:
            return self._end(1, "Congratulations!")
        if not self._left:
            return self._end(1.3 if self.max_number > 20 else -1, "The turn limit is reached.")
        hint = "lower" if self._last > self._number else "higher"
        self._new.append((-1, f"The target number is {hint}.", Kind.GAME_MESSAGE))
        return False, {}
    def _end(self, reward, reason):
        self.state.rewards = {0: reward}
        self.state.game_info[0]["reason"] = reason
        return True, {}

class Wrapper:
    def __init__(self, env):
        self.env = env
    def get_observation(self):
        raise AssertionError("shows everything each time")

def make(name, **options):
    return Wrapper(Wrapper({"GuessTheNumber-v0": GuessTheNumber}[name](**options)))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "textarena.py").write_text(STAND_IN)
    return tmp_path


def hosted(folder: Path, **arguments: Any) -> Hosted:
    all_arguments = {"game": "GuessTheNumber-v0", **arguments}
    return Hosted(program(TARGET, arguments=all_arguments, folder=folder))


async def verdict_of(environment: Hosted) -> Verdict:
    verdict = await environment.verdict(transcript())
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.e2e
def test_brief_game_with_tool_calls(folder: Path) -> None:
    async def play() -> list[str]:
        environment = hosted(folder, options={"max_number": 7}, brief=True)
        opening = await environment.open(TASK, seed=5)
        (question,) = opening.messages
        assert question["content"] == "Guess a number from 1 to 7."
        result = await use(environment, "play", action="seven")
        assert (result.text, result.failed) == ("No: no number.", False)
        low, high, observation = 1, 7, list[str]()
        for _ in range(2):
            middle = (low + high) // 2
            result = await use(environment, "play", action=str(middle))
            observation.append(result.text)
            low, high = (middle + 1, high) if result.text == "higher" else (low, middle - 1)
        verdict = await verdict_of(environment)
        # A game that is not won scores its progress, which is below 1.
        assert verdict.parts["correct"] == float(observation[-1] == "won")
        assert 0.5 < verdict.parts["score"] <= 1
        await environment.close()
        return observation

    assert run(play()) == run(play())


@pytest.mark.e2e
def test_full_game_with_text_replies(folder: Path) -> None:
    async def play() -> None:
        environment = hosted(folder, play_by="text", options={"max_number": 1})
        opening = await environment.open(TASK, seed=5)
        assert opening.messages[0]["content"] == "You have to guess." and not opening.tools
        reply = await environment.reply({"role": "assistant", "content": "[2]"})
        assert reply is not None and reply["content"] == "The target number is lower."
        # A repeated observation is returned again.
        reply = await environment.reply({"role": "assistant", "content": "[2]"})
        assert reply is not None and reply["content"] == "The target number is lower."
        assert await environment.reply({"role": "assistant", "content": "1"}) is None
        assert (await verdict_of(environment)).parts == {"correct": 1.0, "score": 1.0}
        await environment.close()

    run(play())


@pytest.mark.e2e
@pytest.mark.parametrize(("most", "score"), [(20, 0.0), (99, MOST_LOST)])
def test_a_lost_game_is_never_correct(folder: Path, most: int, score: float) -> None:
    async def play() -> None:
        environment = hosted(folder, options={"max_number": most})
        await environment.open(TASK, seed=5)
        for _ in range(4):
            result = await use(environment, "play", action="1000")
        assert result.done and result.text == "The turn limit is reached."
        verdict = await verdict_of(environment)
        assert verdict.parts["correct"] == 0.0
        assert verdict.parts["score"] == pytest.approx(score)
        await environment.close()

    run(play())


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"game": "Chess-v9"}, "KeyError: 'Chess-v9'"),
        ({"game": "Hangman-v0", "brief": True}, "there is no brief form; there is of GuessTheN"),
        ({"options": {"size": 3}}, "unexpected keyword argument 'size'"),
        ({"play_by": "mail"}, "must be 'tool' or 'text'"),
    ],
)
def test_invalid_arguments_are_reported(folder: Path, arguments: dict[str, Any], why: str) -> None:
    async def play() -> None:
        environment = hosted(folder, **arguments)
        with pytest.raises(EnvironmentLost, match=why):
            await environment.open(TASK, seed=5)
        await environment.close()

    run(play())


@pytest.mark.e2e
def test_a_missing_package_names_the_install_command(tmp_path: Path) -> None:
    (tmp_path / "textarena.py").write_text("raise ModuleNotFoundError('No module: textarena')\n")

    async def play() -> None:
        environment = hosted(tmp_path)
        with pytest.raises(EnvironmentLost, match=r"-m pip install textarena==0\.7\.4"):
            await environment.open(TASK, seed=5)
        await environment.close()

    run(play())


real = pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is not installed")
SIZES: dict[str, dict[str, Any]] = {
    "GuessTheNumber-v0": {"max_number": 7, "max_turns": 2},
    "Mastermind-v0": {"code_length": 2, "num_numbers": 4},
    "TowerOfHanoi-v0": {"num_disks": 2, "max_turns": 6},
    "FrozenLake-v0": {"size": 3, "num_holes": 2},
    "LightsOut-v0": {"size": 3},
    "Minesweeper-v0-small": {},
    "Sudoku-v0-very-easy": {},
    "2048-v0-ultra-easy": {"board_size": 3, "target_tile": 8},
}


def right_moves(name: str, game: Any) -> Iterator[str]:
    """Yield winning moves, using the hidden state."""
    hidden = game._game
    if name.startswith("Guess"):
        yield str(hidden.game_number)
    elif name.startswith("Master"):
        yield " ".join(map(str, hidden.state.game_state["secret_code"]))
    elif name.startswith("Tower"):
        yield from ("A B", "A C", "B C")
    elif name.startswith("Frozen"):
        yield from lake_moves(hidden.state.game_state["grid"])
    elif name.startswith("Lights"):
        yield from light_moves(hidden.state.game_state["grid"])
    elif name.startswith("Mine"):
        yield "2 2"
        cells = [(r, c) for r in range(5) for c in range(5) if hidden.grid[r][c] != -1]
        yield from (f"{r} {c}" for r, c in cells if not hidden.revealed[r][c])
    elif name.startswith("Sudoku"):
        board, full = hidden.game_board, hidden.full_grid
        cells = [(r, c) for r in range(9) for c in range(9) if not board[r][c]]
        yield from (f"{r + 1} {c + 1} {full[r][c]}" for r, c in cells)
    else:
        while True:
            yield from ("left", "down", "right", "up")


def shortest(start: Any, over: Any, moves: Any) -> list[str]:
    known: dict[Any, list[str]] = {start: []}
    queue = deque([start])
    while not over(here := queue.popleft()):
        for move, there in moves(here):
            if there not in known:
                known[there] = [*known[here], move]
                queue.append(there)
    return known[here]


def lake_moves(grid: list[list[str]]) -> list[str]:
    ways = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

    def moves(at: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int]]]:
        for way, (down, right) in ways.items():
            r, c = at[0] + down, at[1] + right
            if 0 <= r < len(grid) and 0 <= c < len(grid) and grid[r][c] != "H":
                yield way, (r, c)

    return shortest((0, 0), lambda at: grid[at[0]][at[1]] == "G", moves)


def light_moves(grid: list[list[bool]]) -> list[str]:
    size = len(grid)
    cells = [(r, c) for r in range(size) for c in range(size)]

    def moves(on: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Any]]:
        for r, c in cells:
            near = {(r, c), (r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)} & set(cells)
            yield f"{r} {c}", on ^ near

    start = frozenset((r, c) for r, c in cells if grid[r][c])
    return shortest(start, lambda on: not on, moves)


@pytest.fixture
def dice() -> Iterator[None]:
    """Restore the global random state, which the games draw from."""
    before = random.getstate()
    yield
    random.setstate(before)


@real
@pytest.mark.parametrize("name", SIZES)
def test_games_are_seeded_and_winnable(name: str, dice: None) -> None:
    first: set[str] = set()
    for seed in range(4):
        game = Game(name, SIZES[name], brief=True)
        seen, _ = game.reset(seed=seed)
        again, _ = Game(name, SIZES[name], brief=True).reset(seed=seed)
        assert seen == again
        game.reset(seed=seed)
        first.add(seen)
        rules, _, board = seen.partition("\n")
        assert rules == BRIEF[name.partition("-v")[0]].rules.format(game=game._game)
        assert len(seen) < 200 and "You " not in seen and "Board" not in seen
        assert name[0] in "GM" or board
        total, over = 0.0, False
        for move in right_moves(name, game):
            observation, reward, over, _, _ = game.step(move)
            assert "Board:" not in observation and "grid" not in observation
            total += reward
            if over:
                break
        assert over
        if name[0] != "2":  # the moves ignore the board
            assert (observation, total) == ("won", 1.0)
        assert (observation == "won") == (total == 1.0)
    assert len(first) > 1 or name[:5] in ("Guess", "Maste", "Tower", "Mines")


@real
@pytest.mark.parametrize("name", ["GuessTheNumber-v0", "Mastermind-v0", "2048-v0-ultra-easy"])
def test_lost_games_score_less(name: str, dice: None) -> None:
    game = Game(name)
    game.reset(seed=1)
    total, over = 0.0, False
    while not over:
        observation, reward, over, _, _ = game.step("nonsense")
        total += reward
    assert observation and 0 <= total < 0.5
