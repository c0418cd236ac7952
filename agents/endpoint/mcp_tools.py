"""Serves an environment's tools over MCP to the program that drives the episode. A program can use
an MCP client or send `tools/call` requests itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from keel.agents.budget import Budget
from keel.agents.endpoint.requests import load_json
from keel.agents.types import Environment, EnvironmentLost, ToolResult
from keel.rl.turns import ToolCall, ToolSpec

_PROTOCOL = "2025-06-18"
_UNKNOWN_METHOD, _INVALID_PARAMS, _LOST = -32601, -32602, -32000
"""JSON-RPC error codes. The last one is specific to Keel."""


class McpTools:
    """The tools of one episode. Calls run one at a time. A call is completed even if the client
    disconnects, because interrupting it would lose the environment."""

    def __init__(
        self, environment: Environment, tools: Sequence[ToolSpec], *, budget: Budget
    ) -> None:
        self._environment, self._tools, self._budget = environment, tools, budget
        self._calls = 0
        self._running: set[asyncio.Task[dict[str, Any]]] = set()
        self._turn = asyncio.Lock()
        self._finished = False
        self.lost: EnvironmentLost | None = None
        self.done = False

    @property
    def over(self) -> bool:
        return self.done or self.lost is not None

    async def finish(self, within_s: float) -> None:
        """Reject new calls, wait up to `within_s` seconds for pending calls, then cancel them."""
        self._finished = True
        try:
            if self._running:
                await asyncio.wait(self._running, timeout=within_s)
        finally:
            for task in self._running:
                task.cancel()

    async def answer(self, body: bytes) -> dict[str, Any] | None:
        """Answer a JSON-RPC message. Returns None if the message is a notification."""
        message = load_json(body)
        if not isinstance(message, dict):
            raise ValueError("a JSON-RPC message is an object")
        message = cast(dict[str, Any], message)
        if "id" not in message:
            return None
        params = message.get("params")
        fields = cast(dict[str, Any], params) if isinstance(params, dict) else {}
        outcome = await self._handle(str(message.get("method")), fields)
        return {"jsonrpc": "2.0", "id": message["id"], **outcome}

    async def _handle(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            return {
                "result": {
                    "protocolVersion": str(params.get("protocolVersion", _PROTOCOL)),
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "keel", "version": "1"},
                }
            }
        if method == "ping":
            return {"result": {}}
        if method == "tools/list":
            tools = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "inputSchema": {"type": "object", **tool.parameters},
                }
                for tool in self._tools
            ]
            return {"result": {"tools": tools}}
        if method != "tools/call":
            return _error(_UNKNOWN_METHOD, f"there is no method {method}")
        name: Any = params.get("name")
        arguments: Any = params.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            return _error(_INVALID_PARAMS, "tools/call needs a name and arguments by name")
        task = asyncio.create_task(self._call(name, cast(Mapping[str, Any], arguments)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run a call after all earlier calls have finished. If the episode is over by then, the
        call is rejected."""
        async with self._turn:
            if self.over or self._finished:
                return _error(_LOST, "the episode is over")
            refusal = self._budget.refusal(self._calls)
            result = ToolResult(text=refusal, failed=True)
            if not refusal:
                self._calls += 1
                call = ToolCall(call_id=f"mcp_{self._calls}", name=name, arguments=arguments)
                try:
                    result = await self._environment.call(call, timeout_s=self._budget.call_s)
                except EnvironmentLost as error:
                    self.lost = error
                    return _error(_LOST, str(error))
                self.done = result.done
            content = [{"type": "text", "text": result.text}]
            return {"result": {"content": content, "isError": result.failed}}


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}
