"""Sends requests to the judge's endpoint and caches the responses. Limits the number, duration and
size of requests."""

import asyncio
import importlib
import json
import logging
import os
import random
import re
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import openai
from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

from keel.configs.sections.rewards import JudgeConfig
from keel.rewards.failures import RewardStopped
from keel.rewards.judge.prompts import BadReply, Question, new_fence
from keel.rewards.judge.specs import Counts, FailureKind, JudgeError, ServedJudge
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
_CACHE_FILE = "judge.sqlite"
_BUSY_TIMEOUT_S = 5.0
_MAX_REPLIES = 250_000  # kept in memory. Typical replies take about 256 MiB in total.

T = TypeVar("T")
log = logging.getLogger(__name__)


class _ReplyCache:
    """Caches responses in memory or in a SQLite file on local disk, which several runs can share.
    Errors are logged and treated as cache misses."""

    def __init__(self, folder: str) -> None:
        self._in_memory = not folder
        path = Path(folder).expanduser() / _CACHE_FILE if folder else ":memory:"
        try:
            if isinstance(path, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
            # Opened by the driver, then used by the judge's thread alone.
            self._db = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
            )
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"rewards.judge.cache_dir = {folder!r} cannot be used: {error}; name another folder"
            ) from error

    def get(self, key: str) -> str | None:
        row = self._execute("SELECT reply FROM replies WHERE key = ?", key)
        return str(row[0]) if row else None

    def put(self, key: str, reply: str) -> None:
        self._execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, reply)
        if self._in_memory:
            newest = "SELECT max(rowid) FROM replies"
            self._execute(f"DELETE FROM replies WHERE rowid <= ({newest}) - {_MAX_REPLIES}")

    def close(self) -> None:
        self._db.close()

    def _execute(self, statement: str, *values: str) -> tuple[str] | None:
        try:
            return self._db.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            log.warning("the judge's cache fails and is bypassed: %s", error)
            return None


@dataclass(slots=True, eq=False)
class _Backend:
    """A server to send requests to: the configured endpoint or one of the run's own servers."""

    key: str
    server: ServedJudge | None = None
    url: str = ""
    client: AsyncOpenAI | None = None
    calls: int = 0
    failures: int = 0  # failed calls since the last successful one
    rests_until: float = 0.0
    lost: str = ""  # why the server could not be restarted
    lookup: asyncio.Task[None] | None = None  # finds the URL; calls wait for it

    @property
    def failing(self) -> bool:
        return self.failures >= _MAX_FAILURES


class JudgeEndpoint:
    """Sends questions to one or more OpenAI-compatible servers and caches the responses. Must be
    used from a single event loop."""

    def __init__(self, settings: JudgeConfig, servers: Sequence[ServedJudge] = ()) -> None:
        """Open the cache and the HTTP client. Raises ValueError if the endpoint, its API key or a
        file can't be used.

        If `servers` is given, their URLs replace `settings.base_url`.
        """
        if not (settings.base_url or servers) or not settings.model:
            raise ValueError("a rubric needs a judge; set rewards.judge.base_url and model")
        self._settings = settings
        variable = settings.api_key_env
        key = os.environ.get(variable, "").strip()
        if variable and not key:
            raise ValueError(f"rewards.judge.api_key_env: export the judge's key in {variable}")
        self._backends = [_Backend(server.key, server) for server in servers]
        if not servers:
            self._backends = [_Backend(key)]
            self._connect(self._backends[0], settings.base_url)
        self._changed = asyncio.Condition()
        self._cache = _ReplyCache(settings.cache_dir)
        self._chats = None
        if settings.chats:
            try:
                file = Path(settings.chats).expanduser()
                file.parent.mkdir(parents=True, exist_ok=True)
                self._chats = file.open("ab", buffering=0)
            except OSError as error:
                raise ValueError(f"rewards.judge.chats cannot be written: {error}") from error
        self._in_flight: dict[str, asyncio.Task[str]] = {}
        self._stopped = ""
        self.counts = Counts()

    def stop(self, reason: str) -> RewardStopped:
        """Reject all further calls. Returns the error they will raise."""
        self._stopped = self._stopped or reason
        return RewardStopped(self._stopped)

    async def ask(self, question: Question[T], *, sample: int = 0, fresh: bool = False) -> T:
        """Return the judge's response to a question. Later calls with the same `sample` return the
        cached response, unless `fresh` is set.

        Raises JudgeError if all attempts fail, and RewardStopped if the endpoint no longer accepts
        calls.
        """
        s = self._settings
        key = question.key(s.model, s.temperature, s.max_reply_tokens, dict(s.extra), sample)
        cached = None if fresh else self._cache.get(key)
        if cached is not None:
            with suppress(BadReply):  # ask again and overwrite a corrupt entry
                reply = question.read(cached)
                self.counts.cache_hits += 1
                return reply
        task = self._in_flight.get(key)
        if task is not None:
            self.counts.cache_hits += 1
        else:
            task = asyncio.create_task(self._attempts(question, key))
            self._in_flight[key] = task
            task.add_done_callback(lambda _: self._in_flight.pop(key))
        # Shielded: others may await the same reply.
        return question.read(await asyncio.shield(task))

    async def close(self) -> None:
        for task in self._in_flight.values():
            task.cancel()
        for backend in self._backends:
            if backend.client:
                await backend.client.close()
        self._cache.close()
        if self._chats:
            self._chats.close()

    async def locate_all(self) -> int:
        """Wait until all servers are up, and return how many there are. Raises RewardStopped if a
        server fails."""
        await asyncio.gather(*(self._start_lookup(backend) for backend in self._backends))
        lost = (backend.lost for backend in self._backends if backend.lost)
        if reason := self._stopped or next(lost, ""):
            raise self.stop(reason)
        return len(self._backends)

    def _connect(self, backend: _Backend, url: str) -> None:
        timeout_s = self._settings.timeout_s
        backend.url, backend.failures, backend.rests_until = url, 0, 0.0
        backend.client = AsyncOpenAI(
            base_url=url,
            # Never the library's default OPENAI_API_KEY, which is meant for another service.
            api_key=backend.key or "none",
            max_retries=0,  # retries are counted by reason and against `max_calls`
            timeout=Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
            # A server inside the cluster is not behind the proxy.
            http_client=bounded_http(trust_env=backend.server is None),
        )

    def _start_lookup(self, backend: _Backend) -> asyncio.Task[None]:
        """Start looking up a server's URL. Restarts the server if it has died."""
        if backend.lookup is None:
            backend.lookup = asyncio.create_task(self._update_url(backend))
        return backend.lookup

    async def _update_url(self, backend: _Backend) -> None:
        try:
            url = await asyncio.to_thread(backend.server.url) if backend.server else backend.url
            if url != backend.url:  # calls in flight on the old client fail
                self.counts.restarts += bool(backend.url)
                self._connect(backend, url)
        except Exception as error:  # Ray's errors and timeouts as well
            url, backend.url, backend.lost = backend.url, "", str(error) or repr(error)
            if all(each.lost for each in self._backends):
                self.stop(backend.lost)
            else:
                log.warning(
                    "judge server %s gets no more requests; the other servers take them: %s",
                    url or "without a URL",
                    backend.lost,
                )
        backend.lookup = None
        async with self._changed:
            self._changed.notify_all()

    def _choose(self, avoided: _Backend | None) -> _Backend | None:
        """Return the server with the fewest calls in flight, or None if all servers are full or
        down. `avoided` is chosen only if no other server is free. Failing servers get one call at a
        time after a rest, unless all servers are failing."""
        running: list[_Backend] = []
        for backend in self._backends:
            if backend.url and not backend.lookup:
                running.append(backend)
            elif not backend.url and not backend.lost:
                self._start_lookup(backend)
        if not all(backend.failing for backend in running):
            now = time.monotonic()
            running = [
                backend
                for backend in running
                if not backend.failing or (not backend.calls and now >= backend.rests_until)
            ]
        free = [backend for backend in running if backend.calls < self._settings.max_concurrent]
        return min(free, key=lambda one: (one is avoided, one.calls), default=None)

    @asynccontextmanager
    async def _acquire_server(self, avoided: _Backend | None) -> AsyncGenerator[_Backend]:
        """Wait for a server with a free slot, preferring servers other than `avoided`. The calls in
        flight and the lookups of URLs, one of which has to end first, have their own deadlines."""
        started, backend = time.monotonic(), None
        async with self._changed:
            while not self._stopped and (backend := self._choose(avoided)) is None:
                await self._changed.wait()
        if backend is None:
            raise RewardStopped(self._stopped)
        self.counts.queue_s = self.counts.queue_s.merge(Mean(time.monotonic() - started, 1))
        backend.calls += 1
        try:
            yield backend
        finally:
            backend.calls -= 1
            everyone = self._stopped or backend.failing or backend.lookup
            async with self._changed:
                self._changed.notify(len(self._in_flight) if everyone else 1)

    async def _attempts(self, question: Question[Any], key: str) -> str:
        attempt, backend = 0, None
        while True:
            # The slot is held during the pause, which slows all calls down if the server is busy.
            async with self._acquire_server(backend) as backend:
                client = backend.client
                try:
                    messages = question.messages(new_fence())
                    content = await self._call(backend, question, messages)
                    backend.failures = 0
                    self._cache.put(key, content)
                    self._log_chat(messages, content)
                    return content
                except JudgeError as error:
                    if backend.client is client:  # otherwise the server has been restarted
                        self._count_failure(backend, error)
                    attempt += 1
                    if not error.retry or attempt > self._settings.retries:
                        raise
                    self.counts.retried[error.kind] += 1
                    pause = _BACKOFF_S * 2 ** min(attempt - 1, 10)
                    pause *= random.uniform(0.5, 1.5)
                    await asyncio.sleep(min(max(pause, error.after_s), _MAX_PAUSE_S))

    def _count_failure(self, backend: _Backend, error: JudgeError) -> None:
        if not error.retry or error.kind == "busy":  # the server works
            return
        backend.failures += 1
        if backend.failing and len(self._backends) > 1:
            if time.monotonic() >= backend.rests_until:
                log.warning(
                    "judge server %s failed %d calls in a row and gets no requests for %.0f s: %s",
                    backend.url,
                    backend.failures,
                    _REST_S,
                    error,
                )
            backend.rests_until = time.monotonic() + _REST_S

    def _log_chat(self, messages: list[dict[str, str]], reply: str) -> None:
        """Append a chat in the format of `keel sft`. Each chat is appended in a single write,
        because several runs can share the file."""
        if self._chats is None:
            return
        chat = {"messages": [*messages, {"role": "assistant", "content": reply}]}
        try:
            self._chats.write(f"{json.dumps(chat, ensure_ascii=False)}\n".encode())
        except OSError as error:
            log.warning("rewards.judge.chats cannot be written: %s", error)

    async def _call(
        self, backend: _Backend, question: Question[Any], messages: list[dict[str, str]]
    ) -> str:
        settings, client = self._settings, backend.client
        assert client is not None
        if self._stopped:
            raise RewardStopped(self._stopped)
        if 0 < settings.max_calls <= self.counts.calls:
            raise self.stop(
                f"the judge has been called rewards.judge.max_calls = {settings.max_calls} times; "
                "raise it and rerun to resume from the last checkpoint"
            )
        self.counts.calls += 1
        schema = {"name": "judgement", "strict": True, "schema": dict(question.schema)}
        started = time.monotonic()
        try:
            # The library's timeout applies to each read, so a slow trickle would outlast it.
            async with asyncio.timeout(settings.timeout_s):
                response = await client.chat.completions.with_raw_response.create(
                    model=settings.model,
                    messages=cast(Any, messages),
                    temperature=settings.temperature,
                    max_tokens=settings.max_reply_tokens,
                    response_format=cast(Any, {"type": "json_schema", "json_schema": schema}),
                    extra_body=dict(settings.extra) or None,
                )
            content = self._read_content(response.text)
            question.read(content)
            return content
        except (TimeoutError, openai.APIError, BadReply) as error:
            failure = self._failure(error)
            if backend.server and not backend.lost and failure.kind in ("timeout", "unreachable"):
                self._start_lookup(backend)  # its machine may be gone
            raise failure from error
        finally:
            self.counts.call_s = self.counts.call_s.merge(Mean(time.monotonic() - started, 1))

    def _failure(self, error: Exception) -> JudgeError:
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
                kind, retry = "refused", code in _RETRIED
        elif isinstance(error, TimeoutError | openai.APITimeoutError):
            kind, reason = "timeout", f"no reply within {self._settings.timeout_s:g} s"
        elif isinstance(cause, _ReplyTooLarge):
            kind, reason = "invalid", cause.message
        else:
            kind, reason = "unreachable", f"cannot be reached ({cause or error})"
        for backend in self._backends:
            reason = reason.replace(backend.key, "***") if backend.key else reason
        reason = "".join(c if c.isprintable() else " " for c in reason[:300])
        return JudgeError(kind, reason, retry=retry, after_s=after_s)

    def _read_content(self, body: str) -> str:
        try:
            completion = json.loads(body)
            choice = completion["choices"][0]
            usage: Any = completion.get("usage") or {}
            content, finish = choice["message"]["content"], choice.get("finish_reason")
            self.counts.prompt_tokens += usage.get("prompt_tokens") or 0
            self.counts.reply_tokens += usage.get("completion_tokens") or 0
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise BadReply("not a chat completion") from error
        if finish == "length":
            limit = self._settings.max_reply_tokens
            raise BadReply(f"cut off after rewards.judge.max_reply_tokens = {limit}")
        # The cache cannot store a lone surrogate.
        if not isinstance(content, str) or any("\ud800" <= c <= "\udfff" for c in content):
            raise BadReply("no text in it")
        return content


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


def bounded_http(*, trust_env: bool = True) -> DefaultAsyncHttpxClient:
    """Return an HTTP client that caps the size of responses, for `AsyncOpenAI(http_client=…)`.

    It never follows redirects, because they could lead to hosts that aren't in the recipe. If
    `trust_env` is set, it uses the proxies configured in the environment.
    """
    return DefaultAsyncHttpxClient(
        trust_env=trust_env,
        follow_redirects=False,
        headers={"accept-encoding": "identity"},
        event_hooks={"response": [_check_response_size]},
    )
