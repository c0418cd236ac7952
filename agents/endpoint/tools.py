"""An MCP server with an environment's tools, for the program that drives its episode.

It speaks the protocol's Streamable HTTP without sessions and streams: one JSON-RPC message each
way. Programs use an MCP client, or post `tools/call`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from keel.agents.budget import Budget
from keel.agents.endpoint.requests import load
from keel.agents.types import Environment, EnvironmentLost, ToolResult
from keel.rl.turns import ToolCall, ToolSpec

PROTOCOL = "2025-06-18"
_METHOD, _PARAMS, _LOST = -32601, -32602, -32000
"""Error codes of JSON-RPC, and one of ours."""
_OVER = "the episode is over"


class Tools:
    """The tools of one episode. Calls run one after the other, as in Keel's own episodes, and none
    after the call that ends the episode. A call runs to its end even if its client disconnects: an
    environment that is interrupted is lost."""

    def __init__(
        self, environment: Environment, tools: Sequence[ToolSpec], *, budget: Budget
    ) -> None:
        self._environment, self._tools, self._budget = environment, tools, budget
        self._calls = 0
        self._running: set[asyncio.Task[ToolResult | None]] = set()
        """Calls that run or wait for their turn."""
        self._turn = asyncio.Lock()
        self._finished = False
        self.lost: EnvironmentLost | None = None
        """Why the episode cannot go on."""
        self.done = False
        """Whether a tool has ended the episode."""

    @property
    def over(self) -> bool:
        return self.done or self.lost is not None

    async def finish(self, within_s: float) -> None:
        """Wait `within_s` seconds for the running call, then cancel it. No other call begins."""
        self._finished = True
        try:
            if self._running:
                await asyncio.wait(self._running, timeout=within_s)
        finally:
            for task in self._running:
                task.cancel()

    async def answer(self, body: bytes) -> dict[str, Any] | None:
        """Answer a JSON-RPC message; None for a notification. Raises ValueError if it is no
        message."""
        value = load(body)
        if not isinstance(value, dict):
            raise ValueError("a JSON-RPC message is an object")
        message = cast(dict[str, Any], value)
        if "id" not in message:
            return None
        result = await self._result(str(message.get("method")), message.get("params"))
        return {"jsonrpc": "2.0", "id": message["id"], **result}

    async def _result(self, method: str, params: Any) -> dict[str, Any]:
        given = cast(dict[str, Any], params) if isinstance(params, dict) else {}
        if method == "initialize":
            return {
                "result": {
                    "protocolVersion": str(given.get("protocolVersion", PROTOCOL)),
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "keel", "version": "1"},
                }
            }
        if method == "ping":
            return {"result": {}}
        if method == "tools/list":
            return {"result": {"tools": [_listed(tool) for tool in self._tools]}}
        if method != "tools/call":
            return _error(_METHOD, f"there is no method {method}")
        name: Any = given.get("name")
        arguments: Any = given.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            return _error(_PARAMS, "tools/call wants a name and arguments by name")
        return await self._called(name, cast(Mapping[str, Any], arguments))

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self.over or self._finished:
            return _error(_LOST, _OVER)
        if refusal := self._budget.refusal(self._calls):
            return {"result": {"content": [{"type": "text", "text": refusal}], "isError": True}}
        self._calls += 1
        call = ToolCall(call_id=f"mcp_{self._calls}", name=name, arguments=arguments)
        task = asyncio.create_task(self._call(call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            found = await asyncio.shield(task)
        except EnvironmentLost as error:
            return _error(_LOST, str(error))
        if found is None:
            return _error(_LOST, _OVER)
        content = [{"type": "text", "text": found.text}]
        return {"result": {"content": content, "isError": found.failed}}

    async def _call(self, call: ToolCall) -> ToolResult | None:
        """Run a call. None if the episode was over when its turn came."""
        async with self._turn:
            if self.over or self._finished:
                return None
            try:
                found = await self._environment.call(call, timeout_s=self._budget.call_s)
            except EnvironmentLost as error:
                self.lost = error
                raise
            self.done = found.done
            return found


def _listed(tool: ToolSpec) -> dict[str, Any]:
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}
