"""Adapts text games that have `reset` and `step`, as in gymnasium, gym and TextWorld."""

from __future__ import annotations

import inspect
import re
from typing import Any, cast

from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment
from keel.agents.env_runtime.tool_objects import object_schema

_COLORED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MAX_DIGITS = 20
"""Maximum number of digits in a move. Python refuses to parse numbers with thousands of digits."""
_TEXT_SPACES = ("Text", "Word", "Char")
_ROUNDING = 1e-9
"""Tolerance for rounding errors. For example, the sum of ten rewards of 0.1 is slightly less than
1."""


class TextGame:
    """A single-player text game. The policy plays it with the tool `play` or, with play_by="text",
    in its replies. The score is the sum of the rewards within the range `scale`. With score="last"
    (TextWorld), it is the last reward. `rules` comes before the first observation."""

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
            raise ValueError(f"play_by = {play_by!r} must be 'tool' or 'text'")
        if score not in ("sum", "last"):
            raise ValueError(f"score = {score!r} must be 'sum' or 'last'")
        scaled_score(0.0, scale)
        self._game, self._scale, self._rules = game, scale, rules
        self._sums = score == "sum"
        self._by_text = play_by == "text"
        self._over, self._total, self._moves = False, 0.0, 0
        space = getattr(game, "action_space", None)
        count = getattr(space, "n", None)
        self._first = int(getattr(space, "start", 0))
        self._last = None if count is None else self._first + int(count) - 1
        if count is None and hasattr(space, "sample") and type(space).__name__ not in _TEXT_SPACES:
            raise InvalidEnvironment(
                f"the game's action space {space} is not Discrete or Text. Wrap the game in a "
                "class whose `step` takes a number or a text"
            )

    def opening(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        seed %= 2**31
        parameters = inspect.signature(self._game.reset).parameters
        any_name = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        options: dict[str, Any] = {"seed": seed} if "seed" in parameters or any_name else {}
        if not options and hasattr(self._game, "seed"):  # old gym, TextWorld
            self._game.seed(seed)
        first = self._game.reset(**options)
        pair = list(cast("tuple[Any, ...]", first)) if isinstance(first, tuple) else []
        has_info = len(pair) == 2 and isinstance(pair[1], dict)  # old gym returns none
        observation = self._render(pair[0] if has_info else first)
        text = "\n\n".join(filter(None, (self._rules, observation)))
        system = [message for message in task.get("messages", ()) if message["role"] == "system"]
        action: dict[str, Any] = {"type": "string"}
        if self._last is not None:
            action = {"type": "integer", "minimum": self._first, "maximum": self._last}
        tool = {
            "name": "play",
            "description": "Make a move. The result is what can be seen after it.",
            "parameters": object_schema({"action": action}, ["action"]),
        }
        messages = [*system, {"role": "user", "content": text}]
        return {"messages": messages, "tools": [] if self._by_text else [tool]}

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"text": self._play(arguments["action"]), "done": self._over}

    def reply(self, turn: dict[str, Any]) -> Any:
        if not self._by_text or self._over:
            return None
        move: Any = str(turn.get("content") or "").strip()
        if self._last is not None:
            last_line = move.splitlines()[-1:] or [""]
            text = last_line[0].strip()[: _MAX_DIGITS + 1]
            if not text.isdecimal() or not self._first <= int(text) <= self._last:
                hint = f"The last line must be a whole number from {self._first} to {self._last}."
                return {"role": "user", "content": hint}
            move = int(text)
        observation = self._play(move)
        return None if self._over else {"role": "user", "content": observation}

    def _play(self, move: Any) -> str:
        if self._over:
            return "The game is over."
        result = self._game.step(move if self._last is None else int(move))
        self._moves += 1
        if not isinstance(result, (tuple, list)) or len(cast(Any, result)) not in (4, 5):
            raise EnvironmentGone(
                "`step` must return (seen, reward, terminated, truncated, info) or (seen, reward, "
                f"done, info); it returned {str(cast(Any, result))[:100]}"
            )
        observation, reward, *ends, _ = cast("tuple[Any, ...]", result)
        self._total = float(reward) + self._total * self._sums
        self._over = any(map(bool, ends))
        return self._render(observation)

    def _render(self, observation: Any) -> str:
        # With render_mode="ansi", the observation itself is a number or an array.
        if getattr(self._game, "render_mode", None) == "ansi":
            return _ESCAPES.sub("", _COLORED.sub(r"[\1]", str(self._game.render()))).strip("\n")
        return str(observation)

    def verdict(self, messages: list[Any], finish_reason: str) -> dict[str, Any]:
        facts = {"return": self._total, "moves": self._moves}
        return {"parts": scaled_score(self._total, self._scale), "facts": facts}

    def close(self) -> None:
        if hasattr(self._game, "close"):
            self._game.close()


def scaled_score(total: float, scale: tuple[float, float]) -> dict[str, float]:
    """Map a sum of rewards from the range `scale` to a `score` from 0 to 1. `correct` is 1 if the
    score is 1, and 0 otherwise."""
    low, high = map(float, scale)
    if not low < high:
        raise ValueError(f"scale = {scale!r}: the lowest score must be below the highest")
    score = min(max((total - low) / (high - low), 0.0), 1.0)
    score = 1.0 if score > 1 - _ROUNDING else score
    return {"correct": float(score == 1.0), "score": score}
