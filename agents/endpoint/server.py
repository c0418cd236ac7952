"""The HTTP server for all trajectories in a process. Each trajectory has its own URL and key."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from keel.agents.endpoint import anthropic, replies
from keel.agents.endpoint.mcp_tools import McpTools
from keel.agents.endpoint.recorder import Finished, TrajectoryRecorder
from keel.agents.endpoint.requests import ApiError, ChatRequest, IgnoredFields, read_request
from keel.agents.env_runtime.socket_folder import socket_folder

MAX_REQUEST_BYTES = 16 << 20
"""Size limit for a request. A context of 131,072 tokens needs at most 12 MiB, even if every
character is escaped."""
_MAX_TRAJECTORY_BYTES, _MAX_TOTAL_BYTES = 2 * MAX_REQUEST_BYTES, 16 * MAX_REQUEST_BYTES
"""Size limits for all requests that are being received at once, per trajectory and in total."""
_READ_S = 60.0
"""Seconds to wait for the rest of a request, or for a client to read an answer."""
_SHUTDOWN_S = 5.0
_DISCONNECT_ROUNDS = 4
"""How many iterations of the event loop it takes until a closed connection cancels its request."""
_SOCKET = "keel.sock"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address and key of a trajectory's endpoint."""

    base_url: str
    api_key: str
    socket: Path
    """A unix socket for the same server, which a sandbox without a network can use."""
    tools_url: str = ""
    """URL at which an MCP client finds the environment's tools, or "" if there are none."""

    @property
    def env(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,  # LiteLLM and older clients
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": replies.MODEL,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            **({"KEEL_MCP_URL": self.tools_url} if self.tools_url else {}),
        }


class _Connections:
    """Limits how many connections are open at once, so that the process does not run out of file
    descriptors.

    A new connection beyond `most` closes another one. `accept` is the protocol factory for the
    listening sockets. `on_abort` is called with the trajectory when a connection with a request in
    flight is closed.
    """

    def __init__(self, server: web.Server, most: int, on_abort: Callable[[str], None]) -> None:
        self._server, self._most, self._on_abort = server, most, on_abort
        self._accepting = 0
        """How many accepted connections the server does not list yet."""
        self._busy: dict[web.RequestHandler, str] = {}
        """The connections with a request in flight and their trajectories, oldest first."""

    def accept(self) -> web.RequestHandler:
        connections = [one for one in self._server.connections if one.transport is not None]
        while connections and len(connections) + self._accepting >= self._most:
            connections.remove(victim := self._victim(connections))
            if (trajectory := self._busy.pop(victim, None)) is not None:
                self._on_abort(trajectory)
            assert victim.transport is not None
            victim.transport.abort()  # `close` would wait for the client to read
            victim.force_close()
        self._accepting += 1
        asyncio.get_running_loop().call_soon(self._accepted)
        return self._server()

    def _accepted(self) -> None:
        self._accepting -= 1

    @contextmanager
    def request(self, connection: web.RequestHandler, trajectory: str) -> Generator[None]:
        """Mark a connection as busy while its request is handled."""
        self._busy[connection] = trajectory
        try:
            yield
        finally:
            self._busy.pop(connection, None)

    def _victim(self, connections: list[web.RequestHandler]) -> web.RequestHandler:
        """Choose the connection to close.

        This is the oldest idle connection, which its client will simply reopen. If all are busy, it
        is the newest connection of the trajectory that has the most, and its turn is cancelled.
        """
        for connection in connections:
            if connection not in self._busy:
                return connection
        busy = {one: name for one, name in self._busy.items() if one.transport is not None}
        (largest, _), *_ = Counter(busy.values()).most_common(1)
        return next(one for one, name in reversed(busy.items()) if name == largest)


class Endpoint:
    """Serves all trajectories in a process, on the loopback interface and on a unix socket.

    Use it as an async context manager. Call `add` for each trajectory, and `finish` when the
    trajectory ends.
    """

    def __init__(self, *, port: int = 0, most: int = 1024) -> None:
        """Prepare an endpoint, which starts when its context is entered.

        If `port` is 0, the system chooses one. `most` limits the number of connections over all
        trajectories.
        """
        self._port, self._most = port, most
        self._open: dict[str, tuple[str, TrajectoryRecorder, McpTools | None]] = {}
        """The key, recorder and tools of each open trajectory, by its name in the URL."""
        self._ignored = IgnoredFields()
        self._receiving: Counter[str] = Counter()
        """How many bytes of unfinished requests each trajectory has sent."""
        self._runner: web.AppRunner | None = None
        self._connections: _Connections | None = None
        self._listeners: list[asyncio.Server] = []
        self._folder = ""

    async def __aenter__(self) -> Endpoint:
        app = web.Application(middlewares=[self._track_connection, self._format_errors])
        app.router.add_get("/t/{name}/v1/models", self._models)
        app.router.add_get("/t/{name}/v1/models/{model:.+}", self._model)
        app.router.add_post("/t/{name}/v1/chat/completions", self._chat)
        app.router.add_post("/t/{name}/v1/messages", self._chat)
        app.router.add_post("/t/{name}/mcp/{key}", self._tools)
        app.router.add_route("*", "/t/{name}/mcp/{key}", _post_only)
        app.router.add_route("*", "/t/{name}/{path:.*}", self._unknown)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        logger = logging.getLogger(f"{__name__}.http")
        logger.addFilter(_is_our_fault)
        # A client that disconnects cancels its turn. Bodies are not decompressed: a small one may
        # hold gigabytes.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=logger,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._folder = socket_folder("keel-endpoint-", _SOCKET)
        try:
            await self._runner.setup()
            assert self._runner.server is not None
            self._connections = _Connections(self._runner.server, self._most, self._aborted)
            accept, loop = self._connections.accept, asyncio.get_running_loop()
            listener = await loop.create_server(accept, "127.0.0.1", self._port)
            self._listeners.append(listener)
            self._port = listener.sockets[0].getsockname()[1]
            path = str(Path(self._folder) / _SOCKET)
            self._listeners.append(await loop.create_unix_server(accept, path))
            # As open as the port, since a sandbox's user may be another. The keys protect it.
            Path(self._folder).chmod(0o711)
            (Path(self._folder) / _SOCKET).chmod(0o666)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        for name in list(self._open):
            await self.finish(name)
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder that contains the unix socket.

        It is safe to call this from any thread, even if `__aexit__` hangs.
        """
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, recorder: TrajectoryRecorder, tools: McpTools | None = None) -> Address:
        """Open an endpoint for a trajectory and its tools, and return its address.

        Raises ValueError if a trajectory with the same name is open.
        """
        if any(other.name == recorder.name for _, other, _ in self._open.values()):
            raise ValueError(f"endpoint: {recorder.name} is open already")
        place, key = secrets.token_urlsafe(12), f"keel-{secrets.token_urlsafe(24)}"
        self._open[place] = (key, recorder, tools)
        here = f"http://127.0.0.1:{self._port}/t/{place}"
        return Address(
            base_url=f"{here}/v1",
            api_key=key,
            socket=Path(self._folder) / _SOCKET,
            tools_url=f"{here}/mcp/{key}" if tools is not None else "",
        )

    async def finish(self, name: str) -> Finished:
        """Close the endpoint for the trajectory `name` and return what was recorded.

        Raises KeyError if it is not open.
        """
        for place, (_, recorder, _) in self._open.items():
            if name in (place, recorder.name):
                del self._open[place]
                return await recorder.finish()
        raise KeyError(name)

    def _aborted(self, place: str) -> None:
        if place in self._open:
            _, recorder, _ = self._open[place]
            recorder.failure = f"the endpoint closed one of more than {self._most} connections"

    @web.middleware
    async def _track_connection(
        self, request: web.Request, handler: _Handler
    ) -> web.StreamResponse:
        assert self._connections is not None
        with self._connections.request(request.protocol, request.match_info.get("name", "")):
            return await handler(request)

    @web.middleware
    async def _format_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Convert exceptions to error responses in OpenAI's or Anthropic's format."""
        try:
            return await handler(request)
        except ApiError as error:
            failure = error
        except web.HTTPException as error:
            failure = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception as error:
            logging.getLogger(__name__).exception("%s %s failed", request.method, request.path)
            failure = ApiError(500, f"the endpoint failed: {error!r}", code="internal_error")
            self._record_error(request, failure)
        body = anthropic.error(failure) if _is_anthropic(request) else failure.body()
        return web.json_response(body, status=failure.status)

    def _record_error(self, request: web.Request, error: ApiError) -> None:
        if trajectory := self._open.get(request.match_info.get("name", "")):
            trajectory[1].record_error(error)

    @asynccontextmanager
    async def _body_of(self, request: web.Request) -> AsyncGenerator[bytes]:
        """Receive the body of a request. Its bytes count towards the size limits until the context
        exits.

        Raises ApiError if the body is compressed, malformed, too large or too slow, or if too many
        large requests arrive at once.
        """
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            message = f"Content-Encoding {encoding[:50]} is not supported: send the body unencoded"
            raise ApiError(400, message, code="unsupported_encoding")
        place, chunks, size = request.match_info["name"], list[bytes](), 0
        try:
            try:
                async with asyncio.timeout(_READ_S):
                    async for chunk in request.content.iter_any():
                        chunks.append(chunk)
                        size += len(chunk)
                        self._receiving[place] += len(chunk)
                        self._check_size(place, max(size, request.content_length or 0))
            except TimeoutError as error:
                message = f"the request did not arrive within {_READ_S:g} s"
                raise ApiError(408, message, code="too_slow") from error
            except (HttpProcessingError, web.RequestPayloadError, OSError) as error:
                message = f"the request's body is malformed: {error}"
                raise ApiError(400, message, code="invalid_body") from error
            yield b"".join(chunks)
        finally:
            self._receiving[place] -= size
            if not self._receiving[place]:
                del self._receiving[place]

    def _check_size(self, place: str, size: int) -> None:
        if size > MAX_REQUEST_BYTES:
            limit = f"a request may have {MAX_REQUEST_BYTES >> 20} MiB"
            raise ApiError(413, limit, code="too_large")
        total = self._receiving.total()
        if self._receiving[place] > _MAX_TRAJECTORY_BYTES or total > _MAX_TOTAL_BYTES:
            message = "too many large requests at once; ask again later"
            raise ApiError(429, message, code="too_many_bytes")

    def _recorder(self, request: web.Request) -> TrajectoryRecorder:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")  # Anthropic's
        return self._authenticate(request, key.strip())[0]

    def _authenticate(
        self, request: web.Request, api_key: str
    ) -> tuple[TrajectoryRecorder, McpTools | None]:
        place = request.match_info["name"]
        if place not in self._open:
            message = "there is no such trajectory, or it is over"
            raise ApiError(404, message, code="trajectory_over")
        key, recorder, tools = self._open[place]
        if not hmac.compare_digest(api_key.encode(errors="replace"), key.encode()):
            message = "wrong API key: send the trajectory's OPENAI_API_KEY"
            raise ApiError(401, message, code="invalid_api_key")
        recorder.over = tools is not None and tools.over  # a client may not wait for its call
        return recorder, tools

    async def _tools(self, request: web.Request) -> web.StreamResponse:
        """Handle a JSON-RPC message. The key is in the URL, because MCP clients send no API key."""
        recorder, tools = self._authenticate(request, request.match_info["key"])
        if tools is None:
            raise ApiError(404, "there are no tools", code="unknown_url")
        async with self._body_of(request) as body:
            try:
                answer = await tools.answer(body)
            except (ValueError, RecursionError) as error:
                raise ApiError(400, f"not a JSON-RPC message: {error}") from error
        recorder.over = tools.over
        if answer is None:
            return web.Response(status=202)
        return web.json_response(answer)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._recorder(request)
        return web.json_response({"object": "list", "data": [replies.model(replies.MODEL)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._recorder(request)
        return web.json_response(replies.model(request.match_info["model"]))

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        error = ApiError(
            404,
            f"{request.method} {request.path.rpartition('/v1/')[2]}: the endpoint serves "
            "chat/completions, messages and models. Set the program's client to chat completions",
            code="unknown_url",
        )
        self._record_error(request, error)
        raise error

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        recorder = self._recorder(request)
        # OpenAI's and Anthropic's own clients count their retries.
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            async with self._body_of(request) as body:
                chat = anthropic.as_chat_request(body) if _is_anthropic(request) else body
                chat_request = read_request(chat, self._ignored, is_retry=is_retry)
        except ApiError as error:
            recorder.record_error(error)
            raise
        reply = await recorder.turn(chat_request)
        try:
            for _ in range(_DISCONNECT_ROUNDS):  # lets a disconnect cancel this request
                await asyncio.sleep(0)
            async with asyncio.timeout(_READ_S):
                return await _send(request, chat_request, reply)
        except (TimeoutError, ConnectionError):
            recorder.mark_lost(reply)
            if request.transport is not None:
                request.transport.abort()
            return web.Response()  # the client is gone
        except asyncio.CancelledError:
            recorder.mark_lost(reply)
            raise


async def _send(
    request: web.Request, chat_request: ChatRequest, reply: replies.Reply
) -> web.StreamResponse:
    """Send a response, and return once the connection has taken all of it."""
    model = chat_request.model
    if chat_request.stream:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        events = (
            anthropic.events(reply, model)
            if _is_anthropic(request)
            else replies.events(reply, model, include_usage=chat_request.include_usage)
        )
        for event in events:
            await response.write(event)
    else:
        answer = anthropic.answer if _is_anthropic(request) else replies.completion
        response = web.json_response(answer(reply, model))
        await response.prepare(request)
    await response.write_eof()
    return response


def _is_anthropic(request: web.Request) -> bool:
    return request.path.endswith("/v1/messages")


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Filter out aiohttp's log messages about malformed requests from clients."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


async def _post_only(request: web.Request) -> web.StreamResponse:
    raise web.HTTPMethodNotAllowed(request.method, ["POST"])
