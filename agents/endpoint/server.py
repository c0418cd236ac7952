"""The server: one port for all trajectories of a process, a base URL and a key for each."""

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
from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.record import Finished, TrajectoryRecorder
from keel.agents.endpoint.requests import ChatRequest, Warnings, read_request
from keel.agents.endpoint.tools import Tools
from keel.agents.env_runtime.sockets import socket_folder

MOST_BYTES = 16 << 20
"""Bytes of one request: twelve are enough for a window of 131,072 tokens, however it is escaped."""
MOST_OF_ONE, MOST_OF_ALL = 2 * MOST_BYTES, 16 * MOST_BYTES
"""Bytes of requests that are being received at once, of one trajectory and of all."""
READ_S = 60.0
"""Seconds to wait for the rest of a request, and for a client to read an answer."""
ENDING_S = 5.0
ROUNDS = 4
"""Iterations of the event loop after which a closed connection has cancelled its request."""
SOCKET = "keel.sock"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address and key of one trajectory's endpoint."""

    base_url: str
    api_key: str
    socket: Path
    """Unix socket of the same server, for a sandbox that has no network."""
    tools_url: str = ""
    """URL of the environment's tools for an MCP client. Empty: there are none."""

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


class Connections:
    """Limits a server's connections to what this process has files for, whatever one program opens:
    a new connection beyond `most` closes another. `accept` is the listening sockets' factory.
    on_abort: called with the trajectory of each request whose connection was closed."""

    def __init__(self, server: web.Server, most: int, on_abort: Callable[[str], None]) -> None:
        self._server, self._most, self._on_abort = server, most, on_abort
        self._coming = 0
        """Accepted connections that the server does not list yet."""
        self._busy: dict[web.RequestHandler, str] = {}
        """Connections with a request in flight, oldest first, and their trajectories."""

    def accept(self) -> web.RequestHandler:
        open_ = [one for one in self._server.connections if one.transport is not None]
        while open_ and len(open_) + self._coming >= self._most:
            open_.remove(gone := self._least_needed(open_))
            if (whose := self._busy.pop(gone, None)) is not None:
                self._on_abort(whose)
            assert gone.transport is not None
            gone.transport.abort()  # `close` waits for a client to read what it was sent
            gone.force_close()
        self._coming += 1
        asyncio.get_running_loop().call_soon(self._has_come)
        return self._server()

    def _has_come(self) -> None:
        self._coming -= 1

    @contextmanager
    def request(self, connection: web.RequestHandler, whose: str) -> Generator[None]:
        """Mark a connection as having a request in flight."""
        self._busy[connection] = whose
        try:
            yield
        finally:
            self._busy.pop(connection, None)

    def _least_needed(self, open_: list[web.RequestHandler]) -> web.RequestHandler:
        """Return the oldest idle connection, which its client will open again; else the newest of
        the trajectory with the most, whose turn is then cancelled."""
        for connection in open_:
            if connection not in self._busy:
                return connection
        busy = {one: whose for one, whose in self._busy.items() if one.transport is not None}
        (most, _), *_ = Counter(busy.values()).most_common(1)
        return next(one for one, whose in reversed(busy.items()) if whose == most)


class Endpoint:
    """Serves all trajectories of a process, on the loopback and on a unix socket.

    `async with Endpoint() as endpoint`, then `add` for each trajectory and `finish` at its end.
    """

    def __init__(self, *, port: int = 0, most: int = 1024) -> None:
        """port: 0 lets the system choose. most: connections at once, over all trajectories."""
        self._port, self._most = port, most
        self._open: dict[str, tuple[str, TrajectoryRecorder, Tools | None]] = {}
        self._warnings = Warnings()
        self._receiving: Counter[str] = Counter()
        """Bytes of requests on their way, by trajectory."""
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None
        self._listening: list[asyncio.Server] = []
        self._folder = ""

    async def __aenter__(self) -> Endpoint:
        app = web.Application(middlewares=[self._counted, self._in_their_format])
        app.router.add_get("/t/{name}/v1/models", self._models)
        app.router.add_get("/t/{name}/v1/models/{model:.+}", self._model)
        app.router.add_post("/t/{name}/v1/chat/completions", self._chat)
        app.router.add_post("/t/{name}/v1/messages", self._chat)
        app.router.add_post("/t/{name}/mcp/{key}", self._tools)
        app.router.add_route("*", "/t/{name}/mcp/{key}", _no_stream)
        app.router.add_route("*", "/t/{name}/{path:.*}", self._unknown)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        logger = logging.getLogger(f"{__name__}.http")
        logger.addFilter(_of_ours)
        # A client that disconnects cancels its turn. Bodies are not decompressed: a small one may
        # hold gigabytes.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=logger,
            shutdown_timeout=ENDING_S,
        )
        self._folder = socket_folder("keel-endpoint-", SOCKET)
        try:
            await self._runner.setup()
            assert self._runner.server is not None
            self._connections = Connections(self._runner.server, self._most, self._aborted)
            made, loop = self._connections.accept, asyncio.get_running_loop()
            port = await loop.create_server(made, "127.0.0.1", self._port)
            self._listening.append(port)
            self._port = port.sockets[0].getsockname()[1]
            path = str(Path(self._folder) / SOCKET)
            self._listening.append(await loop.create_unix_server(made, path))
            # As open as the port is: a sandbox's user may be another. Each trajectory has its key.
            Path(self._folder).chmod(0o711)
            (Path(self._folder) / SOCKET).chmod(0o666)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        for name in list(self._open):
            await self.finish(name)
        for listening in self._listening:
            listening.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the socket's folder. Safe from any thread, even while `__aexit__` hangs."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, recording: TrajectoryRecorder, tools: Tools | None = None) -> Address:
        """Open the endpoint of a trajectory, and its tools. Raises ValueError if the name is open
        already."""
        if any(open_.name == recording.name for _, open_, _ in self._open.values()):
            raise ValueError(f"endpoint: {recording.name} is open already")
        place, key = secrets.token_urlsafe(12), f"keel-{secrets.token_urlsafe(24)}"
        self._open[place] = (key, recording, tools)
        here = f"http://127.0.0.1:{self._port}/t/{place}"
        return Address(
            base_url=f"{here}/v1",
            api_key=key,
            socket=Path(self._folder) / SOCKET,
            tools_url=f"{here}/mcp/{key}" if tools is not None else "",
        )

    async def finish(self, name: str) -> Finished:
        """Close the endpoint of the trajectory `name`. Raises KeyError if it is not open."""
        for place, (_, recording, _) in self._open.items():
            if name in (place, recording.name):
                del self._open[place]
                return await recording.finish()
        raise KeyError(name)

    def _aborted(self, place: str) -> None:
        if place in self._open:
            _, recording, _ = self._open[place]
            recording.failure = (
                f"the endpoint had more than {self._most} connections, and closed one"
            )

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self._connections is not None
        with self._connections.request(request.protocol, request.match_info.get("name", "")):
            return await handler(request)

    @web.middleware
    async def _in_their_format(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return errors as OpenAI or Anthropic does."""
        try:
            return await handler(request)
        except ApiError as error:
            refused = error
        except web.HTTPException as error:
            refused = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception as error:
            logging.getLogger(__name__).exception("%s %s failed", request.method, request.path)
            refused = ApiError(500, f"the endpoint failed: {error!r}", code="internal_error")
            if trajectory := self._open.get(request.match_info.get("name", "")):
                trajectory[1].refused(refused)
        body = anthropic.error(refused) if _is_anthropics(request) else refused.body()
        return web.json_response(body, status=refused.status)

    @asynccontextmanager
    async def _body_of(self, request: web.Request) -> AsyncGenerator[bytes]:
        """Receive a request; its bytes count as being received until they have been read. Raises
        ApiError for one that is too large, too slow, compressed, or one of too many."""
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            message = f"Content-Encoding {encoding[:50]} is not supported: send the body as it is"
            raise ApiError(400, message, code="unsupported_encoding")
        place, chunks, size = request.match_info["name"], list[bytes](), 0
        try:
            try:
                async with asyncio.timeout(READ_S):
                    async for chunk in request.content.iter_any():
                        chunks.append(chunk)
                        size += len(chunk)
                        self._receiving[place] += len(chunk)
                        self._check_size(place, max(size, request.content_length or 0))
            except TimeoutError as error:
                message = f"the request did not come within {READ_S:g} s"
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
        """Raise ApiError for a request of `size` bytes, or for one beside too many others."""
        if size > MOST_BYTES:
            raise ApiError(413, f"a request may have {MOST_BYTES >> 20} MiB", code="too_large")
        if self._receiving[place] > MOST_OF_ONE or self._receiving.total() > MOST_OF_ALL:
            message = "too many large requests at once; ask again later"
            raise ApiError(429, message, code="too_many_bytes")

    def _recording(self, request: web.Request) -> TrajectoryRecorder:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")  # Anthropic's
        return self._found(request, key.strip())[0]

    def _found(self, request: web.Request, given: str) -> tuple[TrajectoryRecorder, Tools | None]:
        place = request.match_info["name"]
        if place not in self._open:
            raise ApiError(
                404, "there is no such trajectory, or it is over", code="trajectory_over"
            )
        key, recording, tools = self._open[place]
        if not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
            raise ApiError(
                401, "wrong API key: send the trajectory's OPENAI_API_KEY", code="invalid_api_key"
            )
        recording.over = tools is not None and tools.over  # a client may not have waited for it
        return recording, tools

    async def _tools(self, request: web.Request) -> web.StreamResponse:
        """Answer a JSON-RPC message. The key is in the URL, since MCP clients have nothing else."""
        recording, tools = self._found(request, request.match_info["key"])
        if tools is None:
            raise ApiError(404, "there are no tools", code="unknown_url")
        async with self._body_of(request) as body:
            try:
                answer = await tools.answer(body)
            except (ValueError, RecursionError) as error:
                raise ApiError(400, f"no JSON-RPC message: {error}") from error
        recording.over = tools.over
        if answer is None:
            return web.Response(status=202)
        return web.json_response(answer)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._recording(request)
        return web.json_response(replies.models())

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._recording(request)
        return web.json_response(replies.model(request.match_info["model"]))

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        refused = ApiError(
            404,
            f"{request.method} {request.path.rpartition('/v1/')[2]}: the endpoint serves "
            "chat/completions, messages and models. Set the program's client to chat completions",
            code="unknown_url",
        )
        if trajectory := self._open.get(request.match_info.get("name", "")):
            trajectory[1].refused(refused)
        raise refused

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        recording = self._recording(request)
        # OpenAI's and Anthropic's own clients count.
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            async with self._body_of(request) as body:
                chat = anthropic.as_chat_request(body) if _is_anthropics(request) else body
                asked = read_request(chat, self._warnings, is_retry=is_retry)
        except ApiError as error:
            recording.refused(error)
            raise
        reply = await recording.turn(asked)
        try:
            for _ in range(ROUNDS):  # a client that went meanwhile is heard of now
                await asyncio.sleep(0)
            async with asyncio.timeout(READ_S):
                return await _answer(request, asked, reply)
        except (TimeoutError, ConnectionError):
            recording.lose(reply)
            if request.transport is not None:
                request.transport.abort()
            return web.Response()  # the client has gone
        except asyncio.CancelledError:
            recording.lose(reply)
            raise


async def _answer(
    request: web.Request, asked: ChatRequest, reply: replies.Reply
) -> web.StreamResponse:
    """Send an answer. Returns once the connection has taken all of it."""
    if asked.stream:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        events = (
            anthropic.events(reply, asked.model)
            if _is_anthropics(request)
            else replies.events(reply, asked.model, include_usage=asked.include_usage)
        )
        for event in events:
            await response.write(event)
    else:
        answer = anthropic.answer if _is_anthropics(request) else replies.completion
        response = web.json_response(answer(reply, asked.model))
        await response.prepare(request)
    await response.write_eof()
    return response


def _is_anthropics(request: web.Request) -> bool:
    return request.path.endswith("/v1/messages")


def _of_ours(record: logging.LogRecord) -> bool:
    """Return False for aiohttp's log messages about a client's malformed HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


async def _no_stream(request: web.Request) -> web.StreamResponse:
    raise web.HTTPMethodNotAllowed(request.method, ["POST"])
