"""OpenEnv's environments (`reset`, `step`, `state`): a class in this process, or a server's.

What they need of the package openenv this interpreter must have; Keel's has not.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any, Callable, cast, get_args, get_type_hints  # noqa: UP035  (Python 3.9)

from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment, error_text
from keel.agents.env_runtime.games import scaled_score

CURE = f"{sys.executable} -m pip install openenv"
CLIENT = "openenv.core.generic_client"
ANSWER_S = 10.0
"""Longest wait for a server's schemas."""
WAIT_S = 86_400.0
"""Longest wait for a step: the host's deadlines come first."""
_SCHEMES = ("http://", "https://", "ws://", "wss://")
_NOT_SHOWN = ("done", "reward", "metadata")
Data = dict[str, Any]


def is_address(target: str) -> bool:
    return target.startswith(_SCHEMES)


def is_openenv(found: Any) -> bool:
    bases = getattr(found, "__mro__", ())
    return any(one.__module__.startswith(("openenv.", "openenv_core.")) for one in bases)


class OpenEnv:
    """One environment of OpenEnv's. The score is the sum of rewards, where `scale` is the least and
    the most that can be had. What `reset` shows is said after `rules`; the task's `reward` may have
    arguments for it: `{"reset": {"split": "train", "index": 12}}`.

    An action is a call of the tool `step`, or of one of the environment's own tools (MCP); with
    play_by="text", what the policy says is the action's only text.
    """

    grades = True

    def __init__(
        self,
        side: Any,
        play_by: str = "tool",
        scale: tuple[float, float] = (0.0, 1.0),
        rules: str = "",
    ) -> None:
        if play_by not in ("tool", "text"):
            raise ValueError(f"play_by = {play_by!r}: there are 'tool' and 'text'")
        self._side, self._scale, self._rules = side, scale, rules
        scaled_score(0.0, scale)
        self._total, self._steps, self._over = 0.0, 0, False
        self._tools: list[Data] | None = None
        self._spoken = ""
        schema: Data = {} if side.has_tools() else self._schema(side.schema())
        if play_by == "text":
            texts = [
                k for k, v in schema.get("properties", {}).items() if v.get("type") == "string"
            ]
            needed = schema.get("required", texts)
            if len(texts) != 1 or set(needed) - set(texts):
                raise InvalidEnvironment(
                    "play_by = 'text': its action is not one text; play by tool"
                )
            (self._spoken,), self._tools = texts, []
        elif schema:
            about = str(
                schema.pop("description", "") or "Act. The result is what is seen after it."
            )
            self._tools = [{"name": "step", "description": about, "parameters": schema}]

    @staticmethod
    def _schema(given: Data) -> Data:
        """Of an action's arguments: everything but the metadata that each may have."""
        shown = {k: v for k, v in given.get("properties", {}).items() if k != "metadata"}
        kept = {k: v for k, v in given.items() if k not in ("title", "properties")}
        return {**kept, "type": "object", "properties": shown}

    def opening(self, task: Data, seed: int) -> Data:
        reward: Data = task.get("reward") or {}
        wanted: Data = reward.get("reset") or {}
        first, _, self._over = self._side.reset({"seed": seed % 2**31, **wanted})
        if self._tools is None:
            self._tools = self._listed()
        said = "\n\n".join(filter(None, (self._rules, shown(first))))
        system = [one for one in task.get("messages", ()) if one["role"] == "system"]
        messages = [*system, {"role": "user", "content": said}] if said else None
        return {"messages": messages, "tools": self._tools}

    def _listed(self) -> list[Data]:
        listed: Data = self._side.step({"type": "list_tools"})[0]
        tools: list[Data] = [
            {
                "name": one["name"],
                "description": one.get("description") or "",
                "parameters": one.get("input_schema") or {"type": "object", "properties": {}},
            }
            for one in listed.get("tools", [])
        ]
        if not tools:
            more: Data = listed.get("metadata") or {}
            why = more.get("error", "it lists none")
            raise InvalidEnvironment(f"the environment's tools cannot be had: {why}")
        return tools

    def call(self, name: str, arguments: Data) -> Data:
        if self._side.has_tools():
            arguments = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        seen = self._act(arguments)
        failure = seen.get("error") if self._side.has_tools() else None
        text = str(cast(Data, failure).get("message")) if failure else shown(seen)
        return {"text": text, "failed": bool(failure), "done": self._over}

    def reply(self, said: Data) -> Any:
        if not self._spoken or self._over:
            return None
        seen = self._act({self._spoken: str(said.get("content") or "")})
        return None if self._over else {"role": "user", "content": shown(seen)}

    def _act(self, action: Data) -> Data:
        if self._over:
            raise ValueError("the episode is over")
        seen, reward, self._over = self._side.step(action)
        self._total += float(reward or 0.0)
        self._steps += 1
        return seen

    def verdict(self, messages: list[Any], finish_reason: str) -> Data:
        facts = {"return": self._total, "steps": self._steps, "state": self._side.state()}
        return {"parts": scaled_score(self._total, self._scale), "facts": facts}

    def close(self) -> None:
        self._side.close()


def shown(seen: Data) -> str:
    """An observation as text: of a tool's, its result; of a single field, that."""
    fields = {k: v for k, v in seen.items() if k not in _NOT_SHOWN and v is not None}
    value: Any = fields
    if "tool_name" in fields:
        value = fields.get("result", "")
        if isinstance(value, dict) and "data" in value:  # MCP's result, with its content again
            value = cast(Data, value)["data"]
    elif len(fields) < 2:
        value = next(iter(fields.values()), "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class Here:
    """An environment's object in this process."""

    def __init__(self, environment: Any, action: Any = None) -> None:
        self._environment = environment
        self._is_mcp = any(one.__name__ == "MCPEnvironment" for one in type(environment).__mro__)
        self._action: Any = action
        if action is None and not self._is_mcp:
            self._action = action_of(environment)

    def has_tools(self) -> bool:
        return self._is_mcp

    def schema(self) -> Data:
        return self._action.model_json_schema()

    def reset(self, wanted: Data) -> tuple[Data, Any, bool]:
        return self._told(self._environment.reset(**wanted))

    def step(self, action: Data) -> tuple[Data, Any, bool]:
        kind = self._action
        if self._is_mcp:
            kinds: Any = importlib.import_module("openenv.core.env_server.mcp_types")
            listing = action["type"] == "list_tools"
            kind = kinds.ListToolsAction if listing else kinds.CallToolAction
        made = kind.model_validate(action)
        return self._told(self._environment.step(made))

    @staticmethod
    def _told(seen: Any) -> tuple[Data, Any, bool]:
        return seen.model_dump(mode="json"), seen.reward, bool(seen.done)

    def state(self) -> Any:
        return self._environment.state.model_dump(mode="json")

    def close(self) -> None:
        self._environment.close()


class There:
    """A session with a server, by OpenEnv's own client."""

    def __init__(self, address: str, headers: dict[str, str] | None = None) -> None:
        import urllib.request  # noqa: PLC0415  (takes a while, and most environments do without)

        try:
            client: Any = importlib.import_module(CLIENT)
        except ModuleNotFoundError as error:
            raise InvalidEnvironment(f"{address}: {error_text(error)}; {CURE}") from error
        self._address = address.rstrip("/")
        made = client.GenericEnvClient(base_url=address, message_timeout_s=WAIT_S, headers=headers)
        self._client = made.sync()
        page = re.sub("^ws", "http", self._address)
        ask = urllib.request.Request(f"{page}/schema", headers=headers or {})
        try:
            with urllib.request.urlopen(ask, timeout=ANSWER_S) as reply:
                self._schema: Data = json.load(reply)["action"]
        except (OSError, ValueError, KeyError) as error:
            raise InvalidEnvironment(
                f"{page}/schema has no schema of actions: {error_text(error)}"
            ) from error

    def has_tools(self) -> bool:
        return self._schema.get("title") in ("CallToolAction", "ListToolsAction")

    def schema(self) -> Data:
        return self._schema

    def reset(self, wanted: Data) -> tuple[Data, Any, bool]:
        return self._ask(lambda: self._client.reset(**wanted))

    def step(self, action: Data) -> tuple[Data, Any, bool]:
        return self._ask(lambda: self._client.step(action))

    def _ask(self, what: Callable[[], Any]) -> tuple[Data, Any, bool]:
        try:
            result = what()
        except RuntimeError as error:  # the environment's own, which its server passes on
            if str(error).startswith("Server error"):
                raise
            raise EnvironmentGone(f"{self._address}: {error_text(error)}") from error
        except Exception as error:  # the connection's, of whatever library
            raise EnvironmentGone(f"{self._address}: {error_text(error)}") from error
        return result.observation, result.reward, bool(result.done)

    def state(self) -> Any:
        return self._client.state()

    def close(self) -> None:
        self._client.close()


def action_of(environment: Any) -> Any:
    """The class of an environment's actions, from its hints."""
    kind = cast(Any, type(environment))
    try:
        found: list[Any] = [get_type_hints(kind.step).get("action")]
    except Exception:  # a hint is any expression
        found = []
    for base in (one for each in kind.__mro__ for one in getattr(each, "__orig_bases__", ())):
        found += get_args(base)[:1]
    for one in found:
        if hasattr(one, "model_json_schema") and one.__name__ != "Action":
            return one
    raise InvalidEnvironment(
        f"{kind.__name__}: its `step` has no type hint that says what its actions are; name their "
        'class, as `"action": "my_env.models:MyAction"` among the arguments'
    )
