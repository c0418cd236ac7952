"""Single-player games from TextArena, selected by id as in `arguments={"game": "Sudoku-v0"}`.

The environment's interpreter needs the package textarena, whose import takes 0.4 s of CPU time. The
games draw from Python's global random state, so each process can run only one game.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple, cast

PRELOAD = ("textarena",)
"""Modules that the fork server imports in addition to this one."""
CURE = f"{sys.executable} -m pip install textarena==0.7.4"
MOST_LOST = 0.99
"""Maximum score for a game that was not won. TextArena's 2048 gives 1 for some losses."""
_LOST = re.compile(r"turn limit|game over|no moves left", re.IGNORECASE)
_INVALID = (r"You attempted an invalid move\. Reason: (.*?)\s*Please resubmit.*", r"No: \1")


class Brief(NamedTuple):
    """Short versions of a game's rules and observations."""

    rules: str
    """A format string for the rules. `{game.target_tile}`, for example, is an attribute of the
    game."""
    cuts: tuple[tuple[str, str], ...]
    """Patterns to replace in observations, with their replacements. Lines that become blank are
    dropped."""


BRIEF: dict[str, Brief] = {
    "GuessTheNumber": Brief(
        "Guess a number from {game.min_number} to {game.max_number}.",
        ((r"The target number is (\w+)\.", r"\1"),),
    ),
    "Mastermind": Brief(
        "Find the code of {game.code_length} digits from 1 to {game.num_numbers}. Digits repeat: "
        "{game.duplicate_numbers}. A move is the digits, with a space between two.",
        ((r".*Feedback: (\d+) black peg\(s\), (\d+) white.*", r"\1 right, \2 elsewhere"),),
    ),
    "TowerOfHanoi": Brief(
        "Move all disks from A to C, one at a time, never onto a smaller one. A move is two "
        "towers: A C.",
        ((r"You moved disk.*", ""), (r"Current Board:|[\[\],:.]", "")),
    ),
    "FrozenLake": Brief(
        "Walk from P to G, not into H. Moves: up, down, left, right.",
        (
            (r"You moved.*|You're on safe ice.*|Current Board:|Available Actions.*", ""),
            (r"\+[-+]+\+\n?", ""),
            (r" {5}(?=\|)", "."),
            (r"[| ]", ""),
        ),
    ),
    "LightsOut": Brief(
        "Press lights until all are off. A press flips a light and those above, below, left and "
        "right of it. A move is row and column, from 0: 1 0.",
        ((r"Current grid state.*\n.*\n", ""), (r"(?m)^\d+: ", ""), (r"(?<=[O.]) (?=[O.])", "")),
    ),
    "2048": Brief(
        "Slide the tiles: up, down, left or right. Equal ones merge. Make a {game.target_tile}.",
        ((r"Score: .*\n|\+-+\+\n?|\|", ""), (r" +", " ")),
    ),
    "Minesweeper": Brief(
        "Reveal every cell without a mine. A number counts the mines around it. A move is row and "
        "column, from 0: 1 0.",
        (
            (r"You revealed.*", ""),
            (r"(Current|Game) Board:\s*\n( +\d+)+ *\n", ""),
            (r"(?m)^ *\d+ +", ""),
            (r" +", ""),
        ),
    ),
    "Sudoku": Brief(
        "Fill the grid: every row, column and 3x3 box has 1 to 9. A move is row, column and "
        "digit, from 1: 1 2 9.",
        ((r".*:\s*\n *(C\d *)+\n", ""), (r"(?m)^R\d |^[ -]+$\n|[| ]", "")),
    ),
}
"""The short versions by the game's name, which is its id up to the first hyphen."""


class Game:
    """A single game with gymnasium's interface.

    If the game ends, the rewards sum to its own result, which is 1 for a win. Otherwise they sum to
    the progress made so far. `game` is the game's id, for example `2048-v0-easy`, and `options` are
    arguments for its class, for example `{"max_number": 7}`. With `brief`, the short rules and
    observations in `BRIEF` are used.
    """

    def __init__(self, game: str, options: dict[str, Any] | None = None, brief: bool = False):
        try:
            import textarena  # noqa: PLC0415  # pyright: ignore
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; {CURE}", name=error.name) from error
        library = cast(Any, textarena)
        name = game.partition("-v")[0]
        if brief and name not in BRIEF:
            raise ValueError(f"game {game}: there is no brief form; there is of {', '.join(BRIEF)}")
        self._brief = BRIEF[name] if brief else None
        made = library.make(game, **(options or {}))
        while isinstance(made, library.Wrapper):  # wrappers repeat the whole history
            made = made.env
        self._game: Any = made
        self._given = 0.0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._game.reset(num_players=1, seed=seed)
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        move = action if "[" in action else f"[{action.strip()}]"
        over = bool(self._game.step(move)[0])
        now = self._result() if over else self._so_far()
        reward = now - self._given
        self._given += reward
        return (self._end() if over else self._news()), reward, over, False, {}

    def _result(self) -> float:
        rewards: Any = self._game.state.rewards or {}
        score = min(max(float(rewards.get(0, 0.0)), 0.0), 1.0)
        facts = self._facts()
        lost = facts.get("invalid_move") or _LOST.search(str(facts.get("reason", "")))
        return min(score, MOST_LOST) if lost else score

    def _so_far(self) -> float:
        share = getattr(self._game, "_get_percentage_completion", None)
        return min(max(float(share()), 0.0), MOST_LOST) if share else 0.0

    def _facts(self) -> dict[str, Any]:
        return self._game.state.game_info[0]

    def _end(self) -> str:
        if self._brief:
            return "won" if self._given >= 1 else "lost"
        return str(self._facts().get("reason", "The game is over."))

    def _news(self) -> str:
        _, messages = self._game.get_observation()
        texts = [
            self._said(str(text), str(getattr(kind, "name", kind)))
            for _, text, kind in messages
            if getattr(kind, "name", kind) != "PLAYER_ACTION"
        ]
        return "\n".join(filter(None, texts))

    def _said(self, text: str, kind: str) -> str:
        if self._brief is None:
            return text.strip("\n")
        if kind == "PROMPT":
            return self._brief.rules.format(game=self._game)
        text, invalid = re.subn(_INVALID[0], _INVALID[1], text, flags=re.DOTALL)
        for pattern, instead in () if invalid else self._brief.cuts:
            text = re.sub(pattern, instead, text)
        lines = [line.strip() for line in text.splitlines()]
        return "\n".join(filter(None, lines))
