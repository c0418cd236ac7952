"""Runs Model Context Protocol servers as environments, one process or HTTP session per episode."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from keel.agents.env_process.launch import (
    MAX_MESSAGE_BYTES,
    ChildProcess,
    EnvironmentProgram,
    launch,
    with_deadline,
)
from keel.agents.types import ArgumentValidator, EnvironmentLost, Opening, ToolResult
from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import Prompt, Verdict


class McpEnvironment:
    """An episode that uses an MCP server's tools. It has no user messages and no grading, because
    MCP supports neither."""

    def __init__(
        self, server: EnvironmentProgram, *, starting: asyncio.Semaphore | None = None
    ) -> None:
        self._server = server
        self._starting = starting
        self._process: ChildProcess | None = None
        self._channel_error: str | None = None
        """Why no more messages can be received, or "" if the process has closed its channel."""
        self._session: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._client: Any = None
        self._arguments: ArgumentValidator | None = None
        self._lost: EnvironmentLost | None = None
        self.grades = False

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        server, timeout_s = self._server, self._server.open_s
        async with self._starting or nullcontext():
            transport: Any = server.url
            if server.command:
                self._process = await launch(
                    [word.replace("{seed}", str(seed)) for word in server.command],
                    server,
                    env={"PYTHONHASHSEED": str(seed % 2**32)},
                    readable=[server.folder] if server.folder else (),
                ).connect()
                transport = self._streams(self._process)
            try:
                tools = await with_deadline(timeout_s, self._connect(transport))
                self._arguments = ArgumentValidator(tools)
            except asyncio.CancelledError:
                await self.close()
                raise
            except Exception as error:  # the client raises groups of many kinds
                raise await self._lose("open", error, timeout_s) from error
        return Opening(messages=task.messages, tools=tuple(tools))

    async def _connect(self, transport: Any) -> list[ToolSpec]:
        from mcp import Client  # noqa: PLC0415  (takes a second, and is rarely needed)

        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def run_session() -> None:
            async with Client(transport) as client:
                ready.set_result(client)
                await self._closing.wait()

        # The client and its transport must be left by the task that entered them.
        self._session = asyncio.create_task(run_session())
        await asyncio.wait({ready, self._session}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._session.result()
        self._client = ready.result()
        tools: list[ToolSpec] = []
        cursor: str | None = ""
        while cursor is not None:
            page = await self._client.list_tools(cursor=cursor or None)
            tools += [
                ToolSpec(
                    name=tool.name, description=tool.description or "", parameters=tool.input_schema
                )
                for tool in page.tools
            ]
            cursor = page.next_cursor
        return tools

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        if self._lost is not None or self._arguments is None or self._closing.is_set():
            reason = f"lost before this: {self._lost}" if self._lost else "is not open"
            raise EnvironmentLost("call", reason)
        if complaint := self._arguments.explain_error(call):
            return ToolResult(text=complaint, failed=True)
        from mcp import MCPError  # noqa: PLC0415

        try:
            request = self._client.call_tool(call.name, dict(call.arguments))
            result = await with_deadline(timeout_s, request)
        except MCPError as error:
            try:  # the client raises the same error if the server refuses the call or is gone
                listing = self._client.list_tools(cache_mode="bypass")
                await with_deadline(self._server.reply_s, listing)
            except Exception:
                raise await self._lose("call", error, timeout_s) from error
            return ToolResult(text=f"{call.name}: {error}", failed=True)
        except Exception as error:
            raise await self._lose("call", error, timeout_s) from error
        return ToolResult(text=_text_of(result), failed=result.is_error)

    async def reply(self, turn: Message) -> Message | None:
        return None

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict | str:
        if self._lost is not None:
            return f"lost before this: {self._lost}"
        return Verdict(parts={})

    async def close(self) -> None:
        self._closing.set()
        session = self._session
        try:
            if session is not None and self._lost is None:
                await asyncio.wait({session}, timeout=self._server.close_s)
        finally:
            if self._process is not None:
                await self._process.end()
            if session is not None:
                session.cancel()
                with suppress(BaseException):  # reported before, or irrelevant now
                    await asyncio.wait({session}, timeout=self._server.close_s)
                    session.exception()

    async def _lose(self, during: str, error: Exception, timeout_s: float) -> EnvironmentLost:
        message, output = _flatten(error), ""
        if self._channel_error is not None:
            message = self._channel_error
        elif isinstance(error, TimeoutError):
            message = f"did not answer within {timeout_s:g} s"
        if self._process is not None:
            lost = await self._process.lost(during, message)
            message, output = lost.detail, lost.output
        self._lost = EnvironmentLost(during, f"{self._server.name}: {message}", output)
        await self.close()
        return self._lost

    @asynccontextmanager
    async def _streams(self, process: ChildProcess) -> AsyncGenerator[Any]:
        import anyio  # noqa: PLC0415  (a dependency of mcp)
        from mcp.shared.message import SessionMessage  # noqa: PLC0415
        from mcp_types import jsonrpc_message_adapter  # noqa: PLC0415

        to_client, from_server = anyio.create_memory_object_stream[Any](0)
        to_server, from_client = anyio.create_memory_object_stream[Any](0)

        async def receive() -> None:
            async with to_client:
                while True:
                    try:
                        message = await process.receive()
                    except (EOFError, OSError):
                        self._channel_error = ""
                        return
                    except ValueError:
                        self._channel_error = f"a message over {MAX_MESSAGE_BYTES >> 20} MiB"
                        return
                    # Many servers print a greeting to standard output.
                    with suppress(ValueError, anyio.BrokenResourceError):
                        parsed = jsonrpc_message_adapter.validate_python(message)
                        await to_client.send(SessionMessage(parsed))

        async def send() -> None:
            async with from_client:
                async for one in from_client:
                    text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                    with suppress(OSError):  # `receive` reports it
                        await process.send(text.encode() + b"\n")

        async with anyio.create_task_group() as group:
            group.start_soon(receive)
            group.start_soon(send)
            try:
                yield from_server, to_server
            finally:
                group.cancel_scope.cancel()
                to_server.close()
                from_server.close()


def _text_of(result: Any) -> str:
    texts = [
        one.text if one.type == "text" else f"[{one.type}: not shown]" for one in result.content
    ]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _flatten(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        messages = [_flatten(one) for one in error.exceptions]  # pyright: ignore
        return "; ".join(dict.fromkeys(messages))
    return f"{type(error).__name__}: {error}"
