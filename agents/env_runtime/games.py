"""Adapts text games with `reset` and `step`, as in gymnasium, gym, TextWorld and TextArena."""

from __future__ import annotations

import inspect
import re
from typing import Any, cast

from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment
from keel.agents.env_runtime.type_schemas import object_schema

_COLORED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MAX_DIGITS = 20
"""How many digits of a move are parsed, since Python refuses to parse thousands."""
_TEXT_SPACES = ("Text", "Word", "Char")
"""Names of the text action spaces in gymnasium and TextWorld."""
_ROUNDING = 1e-9
"""Tolerance for rounding errors. Ten rewards of 0.1 sum to slightly less than 1."""


class TextGame:
    """A single-player text game.

    The policy plays by calling the tool `play(action)`, which keeps its thinking in the context
    during the game. With play_by="text", its replies are the actions.

    The score is the sum of the rewards. With score="last", it is the last reward, for games that
    return the score so far (TextWorld). In TextArena, it is the reward of player 0. `scale` is the
    range of the score, and `rules` is a text shown before the first observation.
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
            raise ValueError(f"play_by = {play_by!r} must be 'tool' or 'text'")
        if score not in ("sum", "last"):
            raise ValueError(f"score = {score!r} must be 'sum' or 'last'")
        scaled_score(0.0, scale)
        self._scale = scale
        self._sums = score == "sum"
        self._game = game
        self._options = inspect.signature(game.reset).parameters
        self._textarena = hasattr(game, "get_observation") and self._takes("num_players")
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
        if count is None and hasattr(space, "sample") and type(space).__name__ not in _TEXT_SPACES:
            raise InvalidEnvironment(
                f"the game's action space {space} is not Discrete or Text. Wrap the game in a "
                "class whose `step` takes a number or a text"
            )

    def opening(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        seed %= 2**31
        options: dict[str, Any] = {"seed": seed} if self._takes("seed") else {}
        if self._textarena:
            options["num_players"] = 1
        elif not options and hasattr(self._game, "seed"):  # old gym, TextWorld
            self._game.seed(seed)
        first = self._game.reset(**options)
        if self._textarena:
            self._seen = _textarena_text(self._game.get_observation())
        else:
            pair = list(cast("tuple[Any, ...]", first)) if isinstance(first, tuple) else []
            has_info = len(pair) == 2 and isinstance(pair[1], dict)  # old gym returns none
            self._seen = self._render(pair[0] if has_info else first)
        text = "\n\n".join(filter(None, (self._rules, self._seen)))
        system = [message for message in task.get("messages", ()) if message["role"] == "system"]
        messages = [*system, {"role": "user", "content": text}]
        return {"messages": messages, "tools": [] if self._by_text else [self._spec()]}

    def _takes(self, option: str) -> bool:
        parameters = self._options.values()
        return option in self._options or any(one.kind is one.VAR_KEYWORD for one in parameters)

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

    def reply(self, turn: dict[str, Any]) -> Any:
        if not self._by_text or self._over:
            return None
        move: Any = str(turn.get("content") or "").strip()
        if self._count is not None:
            last_line, last = move.splitlines()[-1:] or [""], self._first + self._count - 1
            text = last_line[0].strip()[: _MAX_DIGITS + 1]
            if not text.isdecimal() or not self._first <= int(text) <= last:
                hint = f"The last line must be a whole number from {self._first} to {last}."
                return {"role": "user", "content": hint}
            move = int(text)
        observation = self._play(move)
        return None if self._over else {"role": "user", "content": observation}

    def _play(self, move: Any) -> str:
        if self._over:
            return "The game is over."
        if self._count is not None:
            move = int(move)
        result = self._game.step(move)
        self._moves += 1
        if self._textarena:
            self._over = bool(result[0])
            return "The game is over." if self._over else self._new_text()
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
        """Return the observation as text.

        With gymnasium's render_mode="ansi", it is the rendered picture, because the observation
        itself is a number or an array.
        """
        if getattr(self._game, "render_mode", None) == "ansi":
            return _ESCAPES.sub("", _COLORED.sub(r"[\1]", str(self._game.render()))).strip("\n")
        return str(observation)

    def _new_text(self) -> str:
        """Return only the new part of the text, since TextArena's wrappers repeat all of it."""
        before, self._seen = self._seen, _textarena_text(self._game.get_observation())
        new = self._seen[len(before) :] if self._seen.startswith(before) else ""
        return new.strip("\n") or self._seen

    def verdict(self, messages: list[Any], finish_reason: str) -> dict[str, Any]:
        total = self._total
        if self._textarena:
            closed = self._game.close()
            rewards = cast(Any, closed[0] if isinstance(closed, tuple) else closed)
            total = float(rewards.get(0, 0.0)) if self._over and rewards else 0.0
        return {
            "parts": scaled_score(total, self._scale),
            "facts": {"return": total, "moves": self._moves},
        }

    def close(self) -> None:
        if not self._textarena and hasattr(self._game, "close"):
            self._game.close()


def scaled_score(total: float, scale: tuple[float, float]) -> dict[str, float]:
    """Return the parts of a verdict for a sum of rewards.

    Raises ValueError if the scale is empty.
    """
    low, high = map(float, scale)
    if not low < high:
        raise ValueError(f"scale = {scale!r}: the lowest score must be below the highest")
    score = min(max((total - low) / (high - low), 0.0), 1.0)
    score = 1.0 if score > 1 - _ROUNDING else score
    return {"correct": float(score == 1.0), "score": score}


def _textarena_text(observation: Any) -> str:
    """Return the text of an observation, which is a player with a text or with (sender, text, kind)
    messages."""
    _, text = observation
    return text if isinstance(text, str) else "\n".join(str(one) for _, one, *_ in text)
