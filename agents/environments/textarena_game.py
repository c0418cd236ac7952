"""Single-player TextArena games. A game is selected with `arguments={"game": "Sudoku-v0"}`. The
games use Python's global random state, so a process can run only one at a time."""

from __future__ import annotations

import re
import sys
from typing import Any, cast

PRELOAD = ("textarena",)
_MAX_LOST = 0.99
"""Maximum score for a game that was not won. TextArena's 2048 returns 1 for some lost games."""
_LOST = re.compile(r"turn limit|game over|no moves left", re.IGNORECASE)
_INVALID = re.compile(
    r"You attempted an invalid move\. Reason: (.*?)\s*Please resubmit.*", re.DOTALL
)


class Game:
    """Wraps a TextArena game in gymnasium's interface. The rewards sum to the result of the game,
    or to the progress made if it is not finished. `options` are passed to the game's class, and
    `brief` shortens the texts of GuessTheNumber."""

    def __init__(self, game: str, options: dict[str, Any] | None = None, brief: bool = False):
        try:
            import textarena  # noqa: PLC0415  # pyright: ignore
        except ModuleNotFoundError as error:
            cure = f"{sys.executable} -m pip install textarena==0.7.4"
            raise ModuleNotFoundError(f"{error}; {cure}", name=error.name) from error
        if brief and not game.startswith("GuessTheNumber-"):
            raise ValueError(f"game {game}: only GuessTheNumber has a brief form")
        library = cast(Any, textarena)
        self._game: Any = library.make(game, **(options or {}))
        while isinstance(self._game, library.Wrapper):  # wrappers repeat the whole history
            self._game = self._game.env
        self._brief = brief
        self._given = 0.0

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._game.reset(num_players=1, seed=seed)
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        move = action if "[" in action else f"[{action.strip()}]"
        over = bool(self._game.step(move)[0])
        share = getattr(self._game, "_get_percentage_completion", None)
        score = min(max(float(share()), 0.0), _MAX_LOST) if share and not over else 0.0
        if over:
            score = self._result()
        reward = score - self._given
        self._given += reward
        if not over:
            observation = self._news()
        elif self._brief:
            observation = "won" if self._given >= 1 else "lost"
        else:
            facts = self._game.state.game_info[0]
            observation = str(facts.get("reason", "The game is over."))
        return observation, reward, over, False, {}

    def _result(self) -> float:
        rewards: Any = self._game.state.rewards or {}
        score = min(max(float(rewards.get(0, 0.0)), 0.0), 1.0)
        facts = self._game.state.game_info[0]
        lost = facts.get("invalid_move") or _LOST.search(str(facts.get("reason", "")))
        return min(score, _MAX_LOST) if lost else score

    def _news(self) -> str:
        _, messages = self._game.get_observation()
        texts: list[str] = []
        for _, text, kind in messages:
            name = str(getattr(kind, "name", kind))
            if name == "PLAYER_ACTION":
                continue
            if not self._brief:
                texts.append(str(text).strip("\n"))
            elif name == "PROMPT":
                low, high = self._game.min_number, self._game.max_number
                texts.append(f"Guess a number from {low} to {high}.")
            else:
                shorter = _INVALID.sub(r"No: \1", str(text))
                shorter = re.sub(r"The target number is (\w+)\.", r"\1", shorter)
                texts += [line.strip() for line in shorter.splitlines()]
        return "\n".join(filter(None, texts))
