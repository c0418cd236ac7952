"""HTTP server for all trajectories of a process. Each trajectory has its own URL and key. The tools
of its environment are also served over MCP."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from keel.agents.endpoint.recorder import TrajectoryRecorder
from keel.agents.endpoint.requests import (
    MODEL,
    ApiError,
    anthropic_answer,
    anthropic_events,
    completion,
    from_anthropic,
    load_object,
    read_request,
    stream_events,
)
from keel.agents.env_runtime.processes import make_socket_folder
from keel.agents.episode import Budget
from keel.agents.types import Environment, EnvironmentLost, ToolResult
from keel.rl.supervisor import GRACE_S
from keel.rl.turns import ToolCall, ToolSpec

_MAX_REQUEST_BYTES = 16 << 20
"""Maximum size of a request in bytes. 131,072 tokens take at most 12 MiB."""
_SOCKET = "keel.sock"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    base_url: str
    api_key: str
    socket: Path
    """Unix socket of the same server, for sandboxes without network access."""
    tools_url: str = ""

    @property
    def env(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,  # LiteLLM and older clients
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            **({"KEEL_MCP_URL": self.tools_url} if self.tools_url else {}),
        }


@dataclass(frozen=True, slots=True)
class _Place:
    key: str
    recorder: TrajectoryRecorder
    tools: McpTools | None


class Endpoint:
    """Serves all trajectories on the loopback interface and a unix socket. Use it as an async
    context manager. Call `add` at the start of each trajectory and `finish` at the end."""

    def __init__(self, *, max_connections: int = 1024) -> None:
        """Create an endpoint. Once `max_connections` are open, a new one closes another."""
        self._max_connections = max_connections
        self._port = 0
        self._open: dict[str, _Place] = {}
        self._busy: dict[web.RequestHandler, TrajectoryRecorder] = {}
        """Connections with a request that is being served."""
        self._accepting = 0
        """Number of accepted connections that are not yet in the server's list."""
        self._listeners: list[asyncio.Server] = []
        self._runner: web.AppRunner | None = None
        self._folder = ""

    async def __aenter__(self) -> Endpoint:
        app = web.Application(middlewares=[self._format_errors], client_max_size=_MAX_REQUEST_BYTES)
        app.router.add_get("/t/{name}/v1/models", self._models)
        app.router.add_post("/t/{name}/v1/chat/completions", self._chat)
        app.router.add_post("/t/{name}/v1/messages", self._chat)
        app.router.add_route("*", "/t/{name}/mcp/{key}", self._handle_mcp)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # A client that disconnects cancels its turn. Bodies are not decompressed: a small one may
        # hold gigabytes.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=GRACE_S,
        )
        self._folder = make_socket_folder("keel-endpoint-", _SOCKET)
        try:
            await self._runner.setup()
            loop, path = asyncio.get_running_loop(), Path(self._folder) / _SOCKET
            self._listeners.append(await loop.create_server(self._accept, "127.0.0.1", 0))
            self._port = self._listeners[0].sockets[0].getsockname()[1]
            self._listeners.append(await loop.create_unix_server(self._accept, str(path)))
            # As open as the port, since a sandbox's user may be another. The keys protect it.
            path.parent.chmod(0o711)
            path.chmod(0o666)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        for place in list(self._open.values()):
            await self.finish(place.recorder.name)
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder that contains the unix socket. Thread-safe, and works even if
        `__aexit__` hangs."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, recorder: TrajectoryRecorder, tools: McpTools | None = None) -> Address:
        name, key = secrets.token_urlsafe(12), f"keel-{secrets.token_urlsafe(24)}"
        self._open[name] = _Place(key, recorder, tools)
        url = f"http://127.0.0.1:{self._port}/t/{name}"
        return Address(
            base_url=f"{url}/v1",
            api_key=key,
            socket=Path(self._folder) / _SOCKET,
            tools_url=f"{url}/mcp/{key}" if tools is not None else "",
        )

    async def finish(self, name: str) -> TrajectoryRecorder:
        places = {place.recorder.name: key for key, place in self._open.items()}
        recorder = self._open.pop(places[name]).recorder
        await recorder.finish()
        return recorder

    def _accept(self) -> web.RequestHandler:
        """Create the handler for a new connection. If too many connections are open, close one
        first: the oldest idle one or, if none is idle, the newest one of the trajectory that has
        the most."""
        assert self._runner is not None and self._runner.server is not None
        server = self._runner.server
        connections = [one for one in server.connections if one.transport is not None]
        while connections and len(connections) + self._accepting >= self._max_connections:
            victim = next((one for one in connections if one not in self._busy), None)
            if victim is None:
                ((recorder, _),) = Counter(self._busy[one] for one in connections).most_common(1)
                victim = next(one for one in reversed(connections) if self._busy[one] is recorder)
                message = f"the endpoint has {self._max_connections} connections, too many"
                recorder.record_error(ApiError(429, message, code="too_many_connections"))
            connections.remove(victim)
            assert victim.transport is not None
            victim.transport.abort()  # `close` would wait for the client to read
            victim.force_close()
        self._accepting += 1
        asyncio.get_running_loop().call_soon(self._accepted)
        return server()

    def _accepted(self) -> None:
        self._accepting -= 1

    @web.middleware
    async def _format_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        place = self._open.get(request.match_info.get("name", ""))
        if place is not None:
            self._busy[request.protocol] = place.recorder
        try:
            return await handler(request)
        except ApiError as error:
            failure = error
        except web.HTTPException as error:
            failure = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception as error:
            logging.getLogger(__name__).exception("%s %s failed", request.method, request.path)
            failure = ApiError(500, f"the endpoint failed: {error!r}", code="internal_error")
            if place is not None:
                place.recorder.record_error(failure)
        finally:
            self._busy.pop(request.protocol, None)
        body = failure.body(anthropic=_is_anthropic(request))
        return web.json_response(body, status=failure.status)

    async def _body_of(self, request: web.Request) -> bytes:
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            message = f"Content-Encoding {encoding[:50]} is not supported: send the body unencoded"
            raise ApiError(400, message, code="unsupported_encoding")
        return await request.read()

    def _authenticate(self, request: web.Request, api_key: str = "") -> _Place:
        place = self._open.get(request.match_info["name"])
        if place is None:
            message = "there is no such trajectory, or it is over"
            raise ApiError(404, message, code="trajectory_over")
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        header = bearer if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        sent = (api_key or header).strip().encode(errors="replace")
        if not hmac.compare_digest(sent, place.key.encode()):
            message = "wrong API key: send the trajectory's OPENAI_API_KEY"
            raise ApiError(401, message, code="invalid_api_key")
        return place

    async def _handle_mcp(self, request: web.Request) -> web.StreamResponse:
        """Handle a JSON-RPC message from an MCP client. The key is part of the URL, because MCP
        clients don't send an API key."""
        if request.method != "POST":
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        place = self._authenticate(request, request.match_info["key"])
        if place.tools is None:
            raise ApiError(404, "there are no tools", code="unknown_url")
        answer = await place.tools.answer(await self._body_of(request))
        return web.Response(status=202) if answer is None else web.json_response(answer)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._authenticate(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "keel"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rpartition("/v1/")[2]
        error = ApiError(
            404,
            f"{request.method} {path}: the endpoint serves chat/completions, messages and models. "
            "Set the program's client to chat completions",
            code="unknown_url",
        )
        if place := self._open.get(request.path.removeprefix("/t/").partition("/")[0]):
            place.recorder.record_error(error)
        raise error

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        place = self._authenticate(request)
        recorder = place.recorder
        try:
            fields = load_object(await self._body_of(request))
            chat = from_anthropic(fields) if _is_anthropic(request) else fields
            chat_request = read_request(chat)
        except ApiError as error:
            recorder.record_error(error)
            raise
        reply = await recorder.turn(chat_request)
        model, is_anthropic = chat_request.model, _is_anthropic(request)
        if not chat_request.stream:
            answer = anthropic_answer if is_anthropic else completion
            return web.json_response(answer(reply, model))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        usage = chat_request.stream_options.include_usage
        events = stream_events(reply, model, include_usage=usage)
        with suppress(ConnectionError):  # the client is gone
            await response.prepare(request)
            for event in anthropic_events(reply, model) if is_anthropic else events:
                await response.write(event)
            await response.write_eof()
        return response


def _is_anthropic(request: web.Request) -> bool:
    return request.path.endswith("/v1/messages")


_PROTOCOL = "2025-06-18"
_UNKNOWN_METHOD, _INVALID_PARAMS, _LOST = -32601, -32602, -32000
"""JSON-RPC error codes. The last one is specific to Keel."""


class McpTools:
    """Serves one episode's tools over MCP, one call at a time. Calls run to completion even if the
    client disconnects, because interrupting one would lose the environment."""

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
        """Reject new calls, and give pending calls up to `within_s` seconds before cancelling
        them."""
        self._finished = True
        try:
            if self._running:
                await asyncio.wait(self._running, timeout=within_s)
        finally:
            for task in self._running:
                task.cancel()

    async def answer(self, body: bytes) -> dict[str, Any] | None:
        message = load_object(body)
        if "id" not in message:
            return None
        params = message.get("params")
        fields = cast(dict[str, Any], params) if isinstance(params, dict) else {}
        outcome = await self._handle(str(message.get("method")), fields)
        return {"jsonrpc": "2.0", "id": message["id"], **outcome}

    async def _handle(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            version = str(params.get("protocolVersion", _PROTOCOL))
            info: Any = {
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "keel", "version": "1"},
            }
            return {"result": {"protocolVersion": version, **info}}
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
