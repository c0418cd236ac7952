"""Sends requests to the judge's endpoint and caches the responses. Limits the number, duration and
size of requests."""

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import openai

from keel.configs.sections.rewards import JudgeConfig
from keel.rewards.failures import RewardStopped
from keel.rewards.judge.prompts import BadReply, Question, new_fence
from keel.rewards.judge.servers import Server, ServerPool
from keel.rewards.judge.specs import CallError, Counts, ServedJudge
from keel.rl.metrics import Mean

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
        self.counts = Counts()
        self.pool = ServerPool(
            settings.base_url,
            servers,
            section="rewards.judge",
            api_key_env=settings.api_key_env,
            max_concurrent=settings.max_concurrent,
            timeout_s=settings.timeout_s,
            counts=self.counts,
        )
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

    async def ask(self, question: Question[T], *, sample: int = 0, only: Server | None = None) -> T:
        """Return the judge's response to a question. Later calls with the same `sample` return the
        cached response. If `only` is given, only this server receives the question, and the cache
        is not read.

        Raises CallError if all attempts fail, and RewardStopped if the endpoint no longer accepts
        calls.
        """
        s = self._settings
        key = question.key(s.model, s.temperature, s.max_reply_tokens, dict(s.extra), sample)
        cached = None if only else self._cache.get(key)
        if cached is not None:
            with suppress(BadReply):  # ask again and overwrite a corrupt entry
                reply = question.read(cached)
                self.counts.cache_hits += 1
                return reply
        task = self._in_flight.get(key)
        if task is not None:
            self.counts.cache_hits += 1
        else:
            task = asyncio.create_task(self._attempts(question, key, only))
            self._in_flight[key] = task
            task.add_done_callback(lambda _: self._in_flight.pop(key))
        # Shielded: others may await the same reply.
        return question.read(await asyncio.shield(task))

    async def close(self) -> None:
        for task in self._in_flight.values():
            task.cancel()
        await self.pool.close()
        self._cache.close()
        if self._chats:
            self._chats.close()

    async def _attempts(self, question: Question[Any], key: str, only: Server | None) -> str:
        attempt, server = 0, None
        while True:
            async with self.pool.acquire(server, only) as server:
                client = server.client
                try:
                    messages = question.messages(new_fence())
                    content = await self._call(server, question, messages)
                    server.failures = 0
                    self._cache.put(key, content)
                    self._log_chat(messages, content)
                    return content
                except CallError as error:
                    self.pool.count_failure(server, client, error)
                    attempt += 1
                    if not error.retry or attempt > self._settings.retries:
                        raise
                    self.counts.retried[error.kind] += 1
                    await self.pool.pause(attempt, error, only)

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
        self, server: Server, question: Question[Any], messages: list[dict[str, str]]
    ) -> str:
        settings, client = self._settings, server.client
        assert client is not None
        if self.pool.stopped:
            raise RewardStopped(self.pool.stopped)
        if 0 < settings.max_calls <= self.counts.calls:
            raise self.pool.stop(
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
            raise self.pool.failure_of(error, server) from error
        finally:
            self.counts.call_s = self.counts.call_s.merge(Mean(time.monotonic() - started, 1))

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
