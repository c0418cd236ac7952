"""Text games with `reset` and `step`, as gymnasium, old gym, TextWorld and TextArena have them."""

from __future__ import annotations

import inspect
import re
from typing import Any, cast

from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment
from keel.agents.env_runtime.type_schemas import object_schema

_COLOURED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
MOST_DIGITS = 20
"""Digits of a move that are read: Python refuses numbers of thousands."""
TEXTS = ("Text", "Word", "Char")
"""Action spaces of texts: gymnasium's, and TextWorld's two."""
ROUNDING = 1e-9
"""Ten rewards of 0.1 are a little less than 1."""


class Game:
    """A game for one player.

    The policy plays by a tool, `play(action)`, so that its thinking stays while the game goes on;
    with play_by="text", what it says is its move. The score is the sum of rewards, with
    score="last" the last one, for games whose `step` returns the score so far (TextWorld), and in
    TextArena the reward of player 0. `scale` is the least and the most that can be had. `rules`
    stand before the first observation.
    """

    grades = True

    def __init__(
        self,
        game: Any,
        play_by: str = "tool",
        scale: tuple[float, float] = (0.0, 1.0),
        rules: str = "",
        score: str = "sum",
    ) -> None:
        if play_by not in ("tool", "text"):
            raise ValueError(f"play_by = {play_by!r}: there are 'tool' and 'text'")
        if score not in ("sum", "last"):
            raise ValueError(f"score = {score!r}: there are 'sum' and 'last'")
        scaled_score(0.0, scale)
        self._scale = scale
        self._adds_up = score == "sum"
        self._game = game
        self._takes = inspect.signature(game.reset).parameters
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in self._takes.values())
        self._textarena = hasattr(game, "get_observation") and self._takes_option("num_players")
        self._by_text = play_by == "text"
        self._over = False
        self._seen = ""
        self._total = 0.0
        self._moves = 0
        self._rules = rules
        space = getattr(game, "action_space", None)
        count = getattr(space, "n", None)
        self._first = int(getattr(space, "start", 0))
        self._count = None if count is None else int(count)
        if count is None and hasattr(space, "sample") and type(space).__name__ not in TEXTS:
            raise InvalidEnvironment(
                f"the game's actions are {space}; those of Discrete and Text can be played. Wrap "
                "it in a class whose `step` takes a number or a text"
            )

    def opening(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        seed %= 2**31
        options: dict[str, Any] = {"seed": seed} if self._takes_option("seed") else {}
        if self._textarena:
            options["num_players"] = 1
        elif not options and hasattr(self._game, "seed"):  # old gym, TextWorld
            self._game.seed(seed)
        first = self._game.reset(**options)
        if self._textarena:
            self._seen = read_textarena(self._game.get_observation())
        else:
            self._seen = self._shown(without_info(first))
        text = "\n\n".join(filter(None, (self._rules, self._seen)))
        system = [message for message in task.get("messages", ()) if message["role"] == "system"]
        messages = [*system, {"role": "user", "content": text}]
        return {"messages": messages, "tools": [] if self._by_text else [self._spec()]}

    def _takes_option(self, name: str) -> bool:
        return self._takes_all or name in self._takes

    def _spec(self) -> dict[str, Any]:
        action: dict[str, Any] = {"type": "string"}
        if self._count is not None:
            last = self._first + self._count - 1
            action = {"type": "integer", "minimum": self._first, "maximum": last}
        return {
            "name": "play",
            "description": "Make a move. The result is what can be seen after it.",
            "parameters": object_schema({"action": action}, ["action"]),
        }

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"text": self._play(arguments["action"]), "done": self._over}

    def reply(self, said: dict[str, Any]) -> Any:
        if not self._by_text or self._over:
            return None
        move: Any = str(said.get("content") or "").strip()
        if self._count is not None:
            last, most = move.splitlines()[-1:] or [""], self._first + self._count - 1
            text = last[0].strip()[: MOST_DIGITS + 1]
            if not text.isdecimal() or not self._first <= int(text) <= most:
                said_so = f"The last line must be a whole number from {self._first} to {most}."
                return {"role": "user", "content": said_so}
            move = int(text)
        seen = self._play(move)
        return None if self._over else {"role": "user", "content": seen}

    def _play(self, move: Any) -> str:
        if self._over:
            return "The game is over."
        if self._count is not None:
            move = int(move)
        after = self._game.step(move)
        self._moves += 1
        if self._textarena:
            self._over = bool(after[0])
            return "The game is over." if self._over else self._news()
        if not isinstance(after, (tuple, list)) or len(cast(Any, after)) not in (4, 5):
            raise EnvironmentGone(
                "`step` must return (seen, reward, terminated, truncated, info) or (seen, reward, "
                f"done, info); it returned {str(cast(Any, after))[:100]}"
            )
        seen, reward, *ends, _ = cast("tuple[Any, ...]", after)
        self._total = float(reward) + self._total * self._adds_up
        self._over = any(map(bool, ends))
        return self._shown(seen)

    def _shown(self, seen: Any) -> str:
        """Return an observation as text. With gymnasium's render_mode="ansi" it is the picture: the
        observation is a number then, or an array."""
        if getattr(self._game, "render_mode", None) == "ansi":
            return _ESCAPES.sub("", _COLOURED.sub(r"[\1]", str(self._game.render()))).strip("\n")
        return str(seen)

    def _news(self) -> str:
        """Return what is new to see: TextArena's wrappers repeat everything since the start."""
        before, self._seen = self._seen, read_textarena(self._game.get_observation())
        new = self._seen[len(before) :] if self._seen.startswith(before) else ""
        return new.strip("\n") or self._seen

    def verdict(self, messages: list[Any], finish_reason: str) -> dict[str, Any]:
        total = self._total
        if self._textarena:
            ended = self._game.close()
            rewards = cast(Any, ended[0] if isinstance(ended, tuple) else ended)
            total = float(rewards.get(0, 0.0)) if self._over and rewards else 0.0
        return {
            "parts": scaled_score(total, self._scale),
            "facts": {"return": total, "moves": self._moves},
        }

    def close(self) -> None:
        if not self._textarena and hasattr(self._game, "close"):
            self._game.close()


def scaled_score(total: float, scale: tuple[float, float]) -> dict[str, float]:
    """Return the parts of a verdict from the sum of rewards. Raises ValueError: no such scale."""
    low, high = map(float, scale)
    if not low < high:
        raise ValueError(f"scale = {scale!r}: the least score must be below the most")
    score = min(max((total - low) / (high - low), 0.0), 1.0)
    score = 1.0 if score > 1 - ROUNDING else score
    return {"correct": float(score == 1.0), "score": score}


def without_info(first: Any) -> Any:
    """Return the observation that `reset` returned, alone (old gym) or as (observation, info)."""
    pair = cast("tuple[Any, ...]", first) if isinstance(first, tuple) else ()
    return pair[0] if len(pair) == 2 and isinstance(pair[1], dict) else cast(Any, first)


def read_textarena(seen: Any) -> str:
    """Return TextArena's observation, (player, text or messages), as text. A message is (sender,
    text, kind)."""
    _, shown = seen
    return shown if isinstance(shown, str) else "\n".join(str(text) for _, text, *_ in shown)
