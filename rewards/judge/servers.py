"""Spreads calls over the OpenAI-compatible servers of a model, such as a judge or an author."""

import asyncio
import importlib
import logging
import os
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import openai
from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

from keel.rewards.failures import RewardStopped
from keel.rewards.judge.prompts import BadReply
from keel.rewards.judge.specs import CallError, Counts, FailureKind, ServedJudge
from keel.rl.metrics import Mean

_CONNECT_TIMEOUT_S = 10.0
_BACKOFF_S = 0.5  # delay before the first retry. It doubles with every further retry.
_MAX_PAUSE_S = 30.0
_MAX_FAILURES = 8
"""Number of calls in a row that a server may fail before the other servers take its requests."""
_REST_S = 300.0
"""Seconds until such a server gets another request, to find out whether it works again."""
_RETRIED = frozenset({408, 409, 425})  # HTTP statuses that are retried, in addition to 429 and 5xx
_TOO_LONG_STATUSES = frozenset({400, 413, 422})
_TOO_LONG = re.compile(
    r"context|too (?:long|large|many tokens)|maximum.{0,40}(?:length|tokens)|reduce the length",
    re.IGNORECASE,
)
_MAX_REPLY_BYTES = 16 << 20

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Server:
    """A server to send requests to: one of the recipe's URLs, or one of the run's own servers."""

    key: str
    served: ServedJudge | None = None
    url: str = ""
    client: AsyncOpenAI | None = None
    calls: int = 0
    failures: int = 0  # failed calls since the last successful one
    rests_until: float = 0.0
    busy_until: float = 0.0
    lost: str = ""  # why the server could not be restarted
    lookup: asyncio.Task[None] | None = None  # finds the URL; calls wait for it

    @property
    def failing(self) -> bool:
        return self.failures >= _MAX_FAILURES

    @property
    def works(self) -> bool:
        running = bool(self.url) and not self.lookup
        return running and not self.failing and time.monotonic() >= self.busy_until


class ServerPool:
    """Gives each call to the server with the fewest calls in flight, and lets failing servers rest.
    Must be used from a single event loop."""

    def __init__(
        self,
        urls: str,
        served: Sequence[ServedJudge] = (),
        *,
        section: str,
        api_key_env: str,
        max_concurrent: int,
        timeout_s: float,
        counts: Counts,
    ) -> None:
        """Create the HTTP clients. `urls` are separated by spaces, and ignored if the run has its
        own servers. `max_concurrent` is for each server. Raises ValueError, which names the
        recipe's `section`, if `api_key_env` isn't set."""
        key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
        if api_key_env and not key:
            raise ValueError(f"{section}.api_key_env: export the API key in {api_key_env}")
        self._section, self._timeout_s = section, timeout_s
        self._max_concurrent, self._counts = max_concurrent, counts
        self._changed = asyncio.Condition()
        self.stopped = ""
        self.servers = [Server(one.key, one) for one in served]
        for url in () if served else urls.split():
            self.servers.append(Server(key))
            self._connect(self.servers[-1], url)

    def stop(self, reason: str) -> RewardStopped:
        """Reject all further calls. Returns the error they will raise."""
        self.stopped = self.stopped or reason
        return RewardStopped(self.stopped)

    async def close(self) -> None:
        for server in self.servers:
            if server.client:
                await server.client.close()

    async def locate_all(self) -> None:
        """Wait until all servers are up. Raises RewardStopped if a server fails."""
        await asyncio.gather(*(self._start_lookup(server) for server in self.servers))
        lost = (server.lost for server in self.servers if server.lost)
        if reason := self.stopped or next(lost, ""):
            raise self.stop(reason)

    @asynccontextmanager
    async def acquire(
        self, avoided: Server | None, only: Server | None = None
    ) -> AsyncGenerator[Server]:
        """Wait for a server with a free slot, preferring servers other than `avoided`, or for
        `only`. The wait ends with a call in flight or the lookup of a URL, and both have deadlines.
        Raises RewardStopped once the pool has been stopped, or if `only` is
        lost."""
        started, server = time.monotonic(), None
        async with self._changed:
            while not self.stopped and (server := self._choose(avoided, only)) is None:
                if only and only.lost:
                    raise self.stop(only.lost)
                await self._changed.wait()
            if server is None:
                raise RewardStopped(self.stopped)
            server.calls += 1
            if self._choose(None):  # a server that works again has several free slots
                self._changed.notify()
        self._counts.queue_s = self._counts.queue_s.merge(Mean(time.monotonic() - started, 1))
        try:
            yield server
        finally:
            server.calls -= 1
            async with self._changed:
                if self.stopped or server.failing or server.lookup:
                    self._changed.notify_all()
                else:
                    self._changed.notify()

    def failure_of(self, error: Exception, server: Server) -> CallError:
        """Classify the error of a call to `server`. API keys are removed from the reason."""
        kind: FailureKind
        retry, after_s = True, 0.0
        cause = error if isinstance(error, _ReplyTooLarge) else error.__cause__
        if isinstance(error, BadReply):
            kind, reason = "invalid", f"invalid reply: {error}"
        elif isinstance(error, openai.APIStatusError):
            code, reason = error.status_code, f"HTTP {error.status_code}: {error.message}"
            if code == 429 or code >= 500:
                kind = "busy" if code == 429 else "server"
                with suppress(ValueError):  # a date
                    after_s = max(0.0, float(error.response.headers.get("retry-after", "0")))
            elif code in _TOO_LONG_STATUSES and _TOO_LONG.search(error.message):
                kind, retry = "too_long", False
            else:
                # Another server may be configured correctly.
                kind, retry = "refused", code in _RETRIED or len(self.servers) > 1
        elif isinstance(error, TimeoutError | openai.APITimeoutError):
            limit = f"{self._section}.timeout_s = {self._timeout_s:g}"
            kind, reason = "timeout", f"no reply within {limit}"
        elif isinstance(cause, _ReplyTooLarge):
            kind, reason = "invalid", cause.message
        else:
            kind, reason = "unreachable", f"cannot be reached ({cause or error})"
        reason = f"{server.url}: {reason}"
        for each in self.servers:
            reason = reason.replace(each.key, "***") if each.key else reason
        reason = "".join(c if c.isprintable() else " " for c in reason[:300])
        return CallError(kind, reason, retry=retry, after_s=after_s)

    def count_failure(self, server: Server, client: AsyncOpenAI | None, failure: CallError) -> None:
        """Count the failure of a call that used `client`, and let the server rest after several in
        a row. One of the run's own servers is restarted if it has died or hangs."""
        if server.client is not client:  # it has been restarted in the meantime
            return
        if server.served and not server.lost and failure.kind in ("timeout", "unreachable"):
            self._start_lookup(server)  # its machine may be gone
        if failure.kind == "busy":
            rest_s = max(failure.after_s, _BACKOFF_S)
            server.busy_until = max(server.busy_until, time.monotonic() + rest_s)
            return
        if not failure.retry:  # the server works
            return
        server.failures += 1
        if server.failing and len(self.servers) > 1:
            if time.monotonic() >= server.rests_until:
                log.warning(
                    "%d calls in a row failed, so their server gets no requests for %.0f s: %s",
                    server.failures,
                    _REST_S,
                    failure,
                )
            server.rests_until = time.monotonic() + _REST_S

    async def pause(self, attempt: int, failure: CallError, only: Server | None = None) -> None:
        """Sleep before retry number `attempt`, unless the server was busy and others work. The call
        keeps its slot, which slows all calls down if all servers are busy."""
        servers = [only] if only else self.servers
        if failure.kind == "busy" and any(server.works for server in servers):
            return
        pause = _BACKOFF_S * 2 ** min(attempt - 1, 10) * random.uniform(0.5, 1.5)
        await asyncio.sleep(min(max(pause, failure.after_s), _MAX_PAUSE_S))

    def _connect(self, server: Server, url: str) -> None:
        timeout_s = self._timeout_s
        server.url, server.failures, server.rests_until = url, 0, 0.0
        server.client = AsyncOpenAI(
            base_url=url,
            # Never the library's default OPENAI_API_KEY, which is meant for another service.
            api_key=server.key or "none",
            max_retries=0,  # retries may go to another server
            timeout=Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
            # A server inside the cluster is not behind the proxy.
            http_client=_bounded_http(trust_env=server.served is None),
        )

    def _start_lookup(self, server: Server) -> asyncio.Task[None]:
        """Start looking up a server's URL. Restarts the server if it has died."""
        if server.lookup is None:
            server.lookup = asyncio.create_task(self._update_url(server))
        return server.lookup

    async def _update_url(self, server: Server) -> None:
        try:
            url = await asyncio.to_thread(server.served.url) if server.served else server.url
            if url != server.url:  # calls in flight on the old client fail
                self._counts.restarts += bool(server.url)
                self._connect(server, url)
        except Exception as error:  # Ray's errors and timeouts as well
            url, server.url, server.lost = server.url, "", str(error) or repr(error)
            if all(each.lost for each in self.servers):
                self.stop(server.lost)
            else:
                log.warning(
                    "judge server %s gets no more requests; the other servers take them: %s",
                    url or "without a URL",
                    server.lost,
                )
        server.lookup = None
        async with self._changed:
            self._changed.notify_all()

    def _choose(self, avoided: Server | None, only: Server | None = None) -> Server | None:
        """Return the server with the fewest calls in flight, or None if all servers are full or
        down. `avoided` is chosen only if no other server is free. Failing servers get one call at a
        time after a rest, unless all servers are failing. Busy servers get none, unless all others
        are busy or failing."""
        running: list[Server] = []
        for server in [only] if only else self.servers:
            if server.url and not server.lookup:
                running.append(server)
            elif not server.url and not server.lost:
                self._start_lookup(server)
        if not all(server.failing for server in running):
            now = time.monotonic()
            running = [
                server
                for server in running
                if not server.failing or (not server.calls and now >= server.rests_until)
            ]
            running = [server for server in running if now >= server.busy_until] or running
        free = [server for server in running if server.calls < self._max_concurrent]
        return min(free, key=lambda one: (one is avoided, one.calls), default=None)


# --- HTTP with bounded replies ---

# httpx, or the package that replaces it in newer releases of openai.
_BASE = next(kind for kind in DefaultAsyncHttpxClient.__mro__ if kind.__name__ == "AsyncClient")
_ByteStream: Any = importlib.import_module(_BASE.__module__.partition(".")[0]).AsyncByteStream


class _ReplyTooLarge(APIConnectionError):
    """Raised if a response is compressed or exceeds the size limit."""


class _BoundedStream(_ByteStream):
    def __init__(self, response: Any) -> None:
        self._stream, self._request = response.stream, response.request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = 0
        async for chunk in self._stream:
            total += len(chunk)
            if total > _MAX_REPLY_BYTES:
                message = f"the reply has more than {_MAX_REPLY_BYTES >> 20} MiB"
                raise _ReplyTooLarge(message=message, request=self._request)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _check_response_size(response: Any) -> None:
    if response.headers.get("content-encoding", "identity") != "identity":
        message = "the reply is compressed, although only identity encoding was accepted"
        raise _ReplyTooLarge(message=message, request=response.request)
    response.stream = _BoundedStream(response)


def _bounded_http(*, trust_env: bool = True) -> DefaultAsyncHttpxClient:
    """Return an HTTP client that caps the size of responses.

    It never follows redirects, because they could lead to hosts that aren't in the recipe. If
    `trust_env` is set, it uses the proxies configured in the environment.
    """
    return DefaultAsyncHttpxClient(
        trust_env=trust_env,
        follow_redirects=False,
        headers={"accept-encoding": "identity"},
        event_hooks={"response": [_check_response_size]},
    )
