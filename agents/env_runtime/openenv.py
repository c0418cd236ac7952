"""Adapter for OpenEnv environments, which run in this process or on a server. Needs the package
openenv."""

from __future__ import annotations

import importlib
import json
import re
import sys
from contextlib import suppress
from typing import Any, Callable, cast, get_type_hints  # noqa: UP035  (Python 3.9)

from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment, error_text
from keel.agents.env_runtime.games import scaled_score

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
    """An OpenEnv environment for one episode. The policy acts with the tool `step` or with the
    environment's own tools (MCP). The score is the sum of the rewards within the range `scale`.
    `rules` comes before the first observation. `reset` in the reward of a task contains the
    arguments for `reset`."""

    grades = True

    def __init__(
        self, backend: Any, scale: tuple[float, float] = (0.0, 1.0), rules: str = ""
    ) -> None:
        scaled_score(0.0, scale)
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
        text = "\n\n".join(filter(None, (self._rules, _text_of(first))))
        system = [one for one in task.get("messages", ()) if one["role"] == "system"]
        messages = [*system, {"role": "user", "content": text}] if text else None
        return {"messages": messages, "tools": self._tools}

    def call(self, name: str, arguments: _Data) -> _Data:
        action = arguments
        if self._backend.has_tools:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        observation = self._act(action)
        failure = observation.get("error") if self._backend.has_tools else None
        text = str(cast(_Data, failure).get("message")) if failure else _text_of(observation)
        return {"text": text, "failed": bool(failure), "done": self._over}

    def reply(self, turn: _Data) -> None:
        return None

    def _act(self, action: _Data) -> _Data:
        if self._over:
            raise ValueError("the episode is over")
        observation, reward, self._over = self._backend.step(action)
        self._total += float(reward or 0.0)
        self._steps += 1
        return observation

    def verdict(self, messages: list[Any], finish_reason: str) -> _Data:
        facts = {"return": self._total, "steps": self._steps, "state": self._backend.state()}
        return {"parts": scaled_score(self._total, self._scale), "facts": facts}

    def close(self) -> None:
        self._backend.close()


def _text_of(observation: _Data) -> str:
    """Return an observation as text: the result of a tool call, the value of the only field, or
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
            self._action = _action_class(kind)

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


def _action_class(kind: Any) -> Any:
    with suppress(Exception):  # a hint may be any expression
        action: Any = get_type_hints(kind.step).get("action")
        if hasattr(action, "model_json_schema") and action.__name__ != "Action":
            return action
    raise InvalidEnvironment(
        f"{kind.__name__}: `step` has no type hint for its action. Name the class among the "
        'arguments: `"action": "my_env.models:MyAction"`'
    )


class RemoteSession:
    """A session with an environment server, which uses OpenEnv's client."""

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
