"""Text games with `reset` and `step`: gymnasium's five results, and TextArena's two."""

from __future__ import annotations

import inspect
import re
from typing import Any, cast

from keel.agents.inside.errors import Refused
from keel.agents.inside.hints import object_schema

_COLOURED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
MOST_DIGITS = 20
"""Of a move that are read: Python refuses numbers of thousands."""
ROUNDING = 1e-9
"""Ten rewards of 0.1 are a little less than 1."""


class Game:
    """A game for one player.

    The policy plays by a tool, `play(action)`, so that its thinking stays while the game goes on;
    with play_by="text", what it says is its move. The score is the sum of rewards (TextArena: the
    reward of player 0), where `scale` is the least and the most that can be had. `rules` are said
    before the first observation.
    """

    grades = True

    def __init__(
        self,
        game: Any,
        play_by: str = "tool",
        scale: tuple[float, float] = (0.0, 1.0),
        rules: str = "",
    ) -> None:
        if play_by not in ("tool", "text"):
            raise ValueError(f"play_by = {play_by!r}: there are 'tool' and 'text'")
        graded(0.0, scale)
        self._scale = scale
        self._game = game
        self._textarena = hasattr(game, "get_observation")
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
        if count is None and hasattr(space, "sample") and type(space).__name__ != "Text":
            raise Refused(
                f"the game's actions are {space}; those of Discrete and Text can be played. Wrap "
                "it in a class whose `step` takes a number or a text"
            )

    def opening(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        wanted = inspect.signature(self._game.reset).parameters
        given: dict[str, Any] = {"seed": seed % 2**31}
        if self._textarena:
            given["num_players"] = 1
        takes_all = any(one.kind is one.VAR_KEYWORD for one in wanted.values())
        first = self._game.reset(**{k: v for k, v in given.items() if k in wanted or takes_all})
        seen = self._game.get_observation() if self._textarena else first
        self._seen = self._shown(seen)
        said = "\n\n".join(filter(None, (self._rules, self._seen)))
        system = [one for one in task.get("messages", ()) if one["role"] == "system"]
        messages = [*system, {"role": "user", "content": said}]
        return {"messages": messages, "tools": [] if self._by_text else [self._spec()]}

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
        seen, reward, terminated, truncated = after[:4]
        self._total += float(reward)
        self._over = bool(terminated) or bool(truncated)
        return self._shown(seen)

    def _shown(self, seen: Any) -> str:
        """gymnasium's render_mode="ansi" has the picture for people; the observation is a number
        then, or an array."""
        if getattr(self._game, "render_mode", None) == "ansi":
            seen = self._game.render()
            text = seen if isinstance(seen, str) else observed(seen)
            return _ESCAPES.sub("", _COLOURED.sub(r"[\1]", text)).strip("\n")
        return observed(seen)

    def _news(self) -> str:
        """What is new to see: TextArena's wrappers show everything since the start each time."""
        before, self._seen = self._seen, observed(self._game.get_observation())
        new = self._seen[len(before) :] if self._seen.startswith(before) else ""
        return new.strip("\n") or self._seen

    def verdict(self, messages: list[Any], finish_reason: str) -> dict[str, Any]:
        total = self._total
        if self._textarena:
            ended = self._game.close()
            rewards = cast(Any, ended[0] if isinstance(ended, tuple) else ended)
            total = float(rewards.get(0, 0.0)) if self._over and rewards else 0.0
        return {
            "parts": graded(total, self._scale),
            "facts": {"return": total, "moves": self._moves},
        }

    def close(self) -> None:
        if not self._textarena and hasattr(self._game, "close"):
            self._game.close()


def graded(total: float, scale: tuple[float, float]) -> dict[str, float]:
    """The parts of a verdict, from a sum of rewards. Raises ValueError for a scale that is none."""
    low, high = map(float, scale)
    if not low < high:
        raise ValueError(f"scale = {scale!r}: the least score must be below the most")
    score = min(max((total - low) / (high - low), 0.0), 1.0)
    score = 1.0 if score > 1 - ROUNDING else score
    return {"correct": float(score == 1.0), "score": score}


def observed(seen: Any) -> str:
    """An observation as text. TextArena's: (player, what can be seen); gymnasium's reset: (what can
    be seen, info)."""
    pair = cast("tuple[Any, ...]", seen) if isinstance(seen, tuple) else ()
    if len(pair) == 2 and isinstance(pair[1], dict):
        seen = pair[0]
    elif len(pair) == 2 and isinstance(pair[0], int):
        seen = pair[1]
    said = cast("list[Any]", seen) if isinstance(seen, list) else []
    if said and all(isinstance(one, tuple) for one in said):
        return "\n".join(str(one[1]) for one in said)  # (from whom, what, of what kind)
    return str(cast(Any, seen))
