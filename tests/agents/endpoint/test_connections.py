"""One program's connections leave the others theirs, and this process its files."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

import pytest
from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient

from keel.agents.endpoint.server import Address, Endpoint
from tests.agents.endpoint.kit import Policy, check_law, play, recording, user
from tests.waiting import PATIENCE_S

MOST, MANY = 8, 40


def client_of(address: Address) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=False)  # plain HTTP needs no certificates
    where: dict[str, Any] = {"base_url": address.base_url, "api_key": address.api_key}
    return AsyncOpenAI(**where, max_retries=0, timeout=PATIENCE_S, http_client=http)


async def asked(client: AsyncOpenAI) -> str | None:
    reply = await client.chat.completions.create(model="m", messages=[user("?")])  # type: ignore[list-item]
    return reply.choices[0].message.content


@pytest.mark.parametrize("place", ["port", "socket"])
def test_those_that_ask_nothing_go_first(place: str) -> None:
    async def work() -> None:
        async with Endpoint(most=MOST) as endpoint:
            address = endpoint.add(recording(Policy(["yes"])))
            port = int(address.base_url.split("/")[2].rpartition(":")[2])
            idle = [
                await (
                    asyncio.open_connection("127.0.0.1", port)
                    if place == "port"
                    else asyncio.open_unix_connection(str(address.socket))
                )
                for _ in range(MANY)
            ]
            async with client_of(address) as client:
                assert await asked(client) == "yes"
            async with asyncio.timeout(PATIENCE_S):
                for reader, _ in idle[: MANY - MOST]:
                    with suppress(ConnectionError):
                        assert await reader.read() == b"", "it is closed"
            for _, writer in idle:
                writer.close()

    play(work())


def test_many_at_once_and_clients_that_do_not_read_hold_no_more_files() -> None:
    """Closing waits for those to read; and of many that come at once none is there yet."""

    async def here(*, at_most: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(os.listdir("/proc/self/fd")) > at_most:
                await asyncio.sleep(0.01)

    async def work() -> None:
        async with Endpoint(most=MOST) as endpoint:
            address = endpoint.add(recording(Policy([])))
            place = address.base_url.removesuffix("/v1").rpartition("/")[2]
            ask = f"GET /t/{place}/v1/models/{'x' * 7000} HTTP/1.1\r\nHost: a\r\n"
            asks = f"{ask}Authorization: Bearer {address.api_key}\r\n\r\n".encode() * 400
            before = len(os.listdir("/proc/self/fd"))
            for words in (b"", asks):
                clients: list[socket.socket] = []
                for _ in range(MANY):
                    client = socket.socket(socket.AF_UNIX)
                    client.setblocking(False)
                    client.connect(str(address.socket))
                    clients.append(client)
                    with suppress(BlockingIOError):
                        client.send(words)
                    if words:
                        await asyncio.sleep(0.01)
                await here(at_most=before + MANY + MOST)
                for client in clients:
                    client.close()
                await here(at_most=before + MOST)

    play(work())


def test_of_those_that_wait_for_turns_whoever_has_most_loses_the_newest() -> None:
    held, other = Policy(["late"]), Policy(["at once"])

    async def work() -> None:
        held.hold = asyncio.Event()
        async with Endpoint(most=MOST) as endpoint:
            busy = endpoint.add(recording(held, name="busy"))
            few = endpoint.add(recording(other, name="few"))
            async with client_of(busy) as client, client_of(few) as another:
                waiting = [asyncio.create_task(asked(client)) for _ in range(MOST)]
                while len(held.requests) < MOST:
                    await asyncio.sleep(0.01)
                assert await asked(another) == "at once"
                held.hold.set()
                said = await asyncio.gather(*waiting, return_exceptions=True)
            assert said.count("late") == MOST - 1
            assert sum(isinstance(one, APIConnectionError) for one in said) == 1
            finished = await endpoint.finish("busy")
            assert finished.counts.given_up == 1 and "connections" in finished.failure
            assert not (await endpoint.finish("few")).failure
            check_law(held, finished)

    play(work())
