"""Adapts OpenEnv environments, local or on a server, and text games with `reset` and `step`
(gymnasium, gym, TextWorld)."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from contextlib import suppress
from typing import Any, Callable, cast, get_type_hints  # noqa: UP035  (Python 3.9)

from keel.agents.env_runtime.tool_objects import (
    EnvironmentGone,
    InvalidEnvironment,
    error_text,
    object_schema,
)

_COLORED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MAX_DIGITS = 20
"""Maximum number of digits in a move. Python refuses to parse numbers with thousands of digits."""
_TEXT_SPACES = ("Text", "Word", "Char")
_ROUNDING = 1e-9
"""Tolerance for rounding errors. For example, the sum of ten rewards of 0.1 is slightly less than
1."""


class TextGame:
    """A single-player text game. The policy plays by calling the `play` tool or, with
    play_by="text", by writing its moves in its responses. The score is the sum of the rewards or,
    with score="last" (TextWorld), the last reward. It is rescaled from the range `scale` to [0, 1].
    `rules` are shown before the first observation."""

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
        _scaled_score(0.0, scale)
        self._game, self._scale, self._rules = game, scale, rules
        self._sums = score == "sum"
        self._by_text = play_by == "text"
        self._over, self._total, self._moves = False, 0.0, 0
        space = getattr(game, "action_space", None)
        count = getattr(space, "n", None)
        self._first = int(getattr(space, "start", 0))
        self._last = None if count is None else self._first + int(count) - 1
        if count is None and hasattr(space, "sample") and type(space).__name__ not in _TEXT_SPACES:
            raise InvalidEnvironment(f"the game's action space {space} is not Discrete or Text")

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
        action: dict[str, Any] = {"type": "string"}
        if self._last is not None:
            action = {"type": "integer", "minimum": self._first, "maximum": self._last}
        tool = {
            "name": "play",
            "description": "Make a move. The result is what can be seen after it.",
            "parameters": object_schema({"action": action}, ["action"]),
        }
        messages = _opening_messages(task, self._rules, observation)
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
            expected = "(seen, reward, terminated, truncated, info) or (seen, reward, done, info)"
            raise EnvironmentGone(
                f"`step` must return {expected}, is {str(cast(Any, result))[:100]}"
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
        return {"parts": _scaled_score(self._total, self._scale), "facts": facts}

    def close(self) -> None:
        if hasattr(self._game, "close"):
            self._game.close()


def _opening_messages(task: dict[str, Any], *texts: str) -> list[dict[str, Any]] | None:
    """Return the task's system messages followed by the texts as a user message, or None if there
    are no texts and the task's own messages apply."""
    system = [message for message in task.get("messages", ()) if message["role"] == "system"]
    text = "\n\n".join(filter(None, texts))
    return [*system, {"role": "user", "content": text}] if text else None


def _scaled_score(total: float, scale: tuple[float, float]) -> dict[str, float]:
    """Rescale a sum of rewards from the range `scale` to a `score` between 0 and 1. `correct` is 1
    only for a full score."""
    low, high = map(float, scale)
    if not low < high:
        raise ValueError(f"scale = {scale!r}: the lowest score must be below the highest")
    score = min(max((total - low) / (high - low), 0.0), 1.0)
    score = 1.0 if score > 1 - _ROUNDING else score
    return {"correct": float(score == 1.0), "score": score}


CLIENT = "openenv.core.generic_client"
_SCHEMA_S = 10.0
_STEP_S = 86_400.0
_SCHEMES = ("http://", "https://", "ws://", "wss://")
_HIDDEN_FIELDS = ("done", "reward", "metadata")
_Data = dict[str, Any]


def is_address(target: str) -> bool:
    return target.startswith(_SCHEMES)


def is_openenv(value: Any) -> bool:
    bases = getattr(value, "__mro__", ())
    return any(one.__module__.startswith(("openenv.", "openenv_core.")) for one in bases)


class OpenEnv:
    """An episode in an OpenEnv environment. The policy acts through the `step` tool or the
    environment's MCP tools. The score is the sum of the rewards, rescaled from the range `scale` to
    [0, 1]. `rules` are shown before the first observation. The `reset` entry of a task's reward
    holds the arguments for the `reset` call."""

    grades = True

    def __init__(
        self, backend: Any, scale: tuple[float, float] = (0.0, 1.0), rules: str = ""
    ) -> None:
        _scaled_score(0.0, scale)
        self._backend, self._scale, self._rules = backend, scale, rules
        self._total, self._steps, self._over = 0.0, 0, False
        self._tools: list[_Data] = []
        if not backend.has_tools:
            schema: _Data = backend.schema()
            about = schema.get("description") or "Act. The result is what is seen after it."
            hidden = ("title", "description", "properties")
            parameters = {k: v for k, v in schema.items() if k not in hidden}
            parameters |= {"type": "object", "properties": {**schema.get("properties", {})}}
            parameters["properties"].pop("metadata", None)
            self._tools = [{"name": "step", "description": about, "parameters": parameters}]

    def opening(self, task: _Data, seed: int) -> _Data:
        reward: _Data = task.get("reward") or {}
        options: _Data = reward.get("reset") or {}
        first, _, self._over = self._backend.reset({"seed": seed % 2**31, **options})
        if self._backend.has_tools:
            listing: _Data = self._backend.step({"type": "list_tools"})[0]
            self._tools = [
                {
                    "name": one["name"],
                    "description": one.get("description") or "",
                    "parameters": one.get("input_schema") or {"type": "object", "properties": {}},
                }
                for one in listing.get("tools", [])
            ]
            if not self._tools:
                raise InvalidEnvironment(f"the environment lists no tools: {listing}")
        messages = _opening_messages(task, self._rules, _observation_text(first))
        return {"messages": messages, "tools": self._tools}

    def call(self, name: str, arguments: _Data) -> _Data:
        if self._over:
            raise ValueError("the episode is over")
        action = arguments
        if self._backend.has_tools:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        observation, reward, self._over = self._backend.step(action)
        self._total += float(reward or 0.0)
        self._steps += 1
        failure = observation.get("error") if self._backend.has_tools else None
        text = (
            str(cast(_Data, failure).get("message")) if failure else _observation_text(observation)
        )
        return {"text": text, "failed": bool(failure), "done": self._over}

    def reply(self, turn: _Data) -> None:
        return None

    def verdict(self, messages: list[Any], finish_reason: str) -> _Data:
        facts = {"return": self._total, "steps": self._steps, "state": self._backend.state()}
        return {"parts": _scaled_score(self._total, self._scale), "facts": facts}

    def close(self) -> None:
        self._backend.close()


def _observation_text(observation: _Data) -> str:
    """Convert an observation to text: a tool call's result, the value of its only field, or
    JSON."""
    fields = {k: v for k, v in observation.items() if k not in _HIDDEN_FIELDS and v is not None}
    value: Any = fields
    if "tool_name" in fields:
        value = fields.get("result", "")
        if isinstance(value, dict) and "data" in value:  # an MCP result, which repeats its content
            value = cast(_Data, value)["data"]
    elif len(fields) < 2:
        value = next(iter(fields.values()), "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class WrappedObject:
    def __init__(self, environment: Any, action: Any = None) -> None:
        self._environment = environment
        kind = cast(Any, type(environment))
        self.has_tools = any(one.__name__ == "MCPEnvironment" for one in kind.__mro__)
        self._action: Any = action
        if action is None and not self.has_tools:
            with suppress(Exception):  # a hint may be any expression
                self._action = get_type_hints(kind.step).get("action")
            named = getattr(self._action, "__name__", "Action") != "Action"
            if not (named and hasattr(self._action, "model_json_schema")):
                cure = 'add the argument `"action": "my_env.models:MyAction"`'
                raise InvalidEnvironment(f"{kind.__name__}: `step` has no type hint; {cure}")

    def schema(self) -> _Data:
        return self._action.model_json_schema()

    def reset(self, options: _Data) -> tuple[_Data, Any, bool]:
        return self._unpack(self._environment.reset(**options))

    def step(self, action: _Data) -> tuple[_Data, Any, bool]:
        kind = self._action
        if self.has_tools:
            kinds: Any = importlib.import_module("openenv.core.env_server.mcp_types")
            is_listing = action["type"] == "list_tools"
            kind = kinds.ListToolsAction if is_listing else kinds.CallToolAction
        return self._unpack(self._environment.step(kind.model_validate(action)))

    @staticmethod
    def _unpack(observation: Any) -> tuple[_Data, Any, bool]:
        return observation.model_dump(mode="json"), observation.reward, bool(observation.done)

    def state(self) -> Any:
        return self._environment.state.model_dump(mode="json")

    def close(self) -> None:
        self._environment.close()


class RemoteSession:
    def __init__(self, address: str, headers: dict[str, str] | None = None) -> None:
        import urllib.request  # noqa: PLC0415  (slow, and rarely needed)

        try:
            client: Any = importlib.import_module(CLIENT)
        except ModuleNotFoundError as error:
            cure = f"{sys.executable} -m pip install openenv"
            raise InvalidEnvironment(f"{address}: {error_text(error)}; {cure}") from error
        self._address = address.rstrip("/")
        session = client.GenericEnvClient(
            base_url=address, message_timeout_s=_STEP_S, headers=headers
        )
        self._client = session.sync()
        page = re.sub("^ws", "http", self._address)
        request = urllib.request.Request(f"{page}/schema", headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=_SCHEMA_S) as reply:
                self._schema: _Data = json.load(reply)["action"]
        except (OSError, ValueError, KeyError) as error:
            message = f"{page}/schema has no schema of actions: {error_text(error)}"
            raise InvalidEnvironment(message) from error
        self.has_tools = self._schema.get("title") in ("CallToolAction", "ListToolsAction")

    def schema(self) -> _Data:
        return self._schema

    def reset(self, options: _Data) -> tuple[_Data, Any, bool]:
        return self._request(lambda: self._client.reset(**options))

    def step(self, action: _Data) -> tuple[_Data, Any, bool]:
        return self._request(lambda: self._client.step(action))

    def _request(self, send: Callable[[], Any]) -> tuple[_Data, Any, bool]:
        try:
            result = send()
        except Exception as error:
            # The environment's own error, passed on by its server. Others are lost connections.
            if isinstance(error, RuntimeError) and str(error).startswith("Server error"):
                raise
            raise EnvironmentGone(f"{self._address}: {error_text(error)}") from error
        return result.observation, result.reward, bool(result.done)

    def state(self) -> Any:
        return self._client.state()

    def close(self) -> None:
        self._client.close()
