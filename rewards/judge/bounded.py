"""HTTP to an endpoint that may send anything: replies up to a size, and from nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from openai import APIConnectionError, DefaultAsyncHttpxClient

MOST_BYTES = 16 << 20
"""Of a reply, as it comes over the wire."""

# httpx, or what openai has come to use in its place.
_BASE = next(kind for kind in DefaultAsyncHttpxClient.__mro__ if kind.__name__ == "AsyncClient")
_HTTPX: Any = importlib.import_module(_BASE.__module__.partition(".")[0])
_Stream: Any = _HTTPX.AsyncByteStream


class TooLarge(APIConnectionError):
    """A reply has more than `MOST_BYTES`, or could have once it is unpacked."""


class _Counted(_Stream):
    def __init__(self, response: Any) -> None:
        self._inside, self._request = response.stream, response.request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        had = 0
        async for chunk in self._inside:
            had += len(chunk)
            if had > MOST_BYTES:
                said = f"the reply has more than {MOST_BYTES >> 20} MiB"
                raise TooLarge(message=said, request=self._request)
            yield chunk

    async def aclose(self) -> None:
        await self._inside.aclose()


async def _count(response: Any) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        said = "the reply is compressed, which was not asked for"
        raise TooLarge(message=said, request=response.request)
    response.stream = _Counted(response)


@cache  # reading them takes 30 ms, and each server that is found anew gets a client
def _certificates(*, trust_env: bool) -> Any:
    return _HTTPX.create_ssl_context(trust_env=trust_env)


def bounded_http(*, trust_env: bool = True) -> DefaultAsyncHttpxClient:
    """For `AsyncOpenAI(http_client=…)`. Follows no redirect: a call would become many that nobody
    counts, at addresses that nobody named. trust_env: whether proxies of the environment count."""
    return DefaultAsyncHttpxClient(
        trust_env=trust_env,
        verify=_certificates(trust_env=trust_env),
        follow_redirects=False,
        headers={"accept-encoding": "identity"},
        event_hooks={"response": [_count]},
    )
