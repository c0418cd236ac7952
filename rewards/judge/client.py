"""Calls to the judge's endpoint: bounded in number, in time and in cost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import openai
from openai import AsyncOpenAI, Timeout

from keel.rewards.judge.bounded import TooLarge, bounded_http
from keel.rewards.judge.cache import Cache, Chats, Memory
from keel.rewards.judge.prompts import Question
from keel.rewards.judge.replies import BadReply
from keel.rewards.judge.results import (
    NONE,
    Counts,
    FailureKind,
    JudgeSettings,
    JudgeStopped,
    Server,
    Unjudged,
)
from keel.rewards.judge.untrusted import new_fence, size
from keel.rl.metrics import Mean

CONNECT_S = 10.0
"""Longest wait for a connection: a host that is not there is found out before the deadline."""
LONGEST_PAUSE_S = 30.0
"""Between two attempts, whatever the endpoint asks for."""
RETRIED = frozenset({408, 409, 425})
"""Besides 429 and 5xx: HTTP statuses that may be another the next time."""
TOO_LONG = frozenset({400, 413, 422})
_TOO_LONG = re.compile(
    r"context|too (?:long|large|many tokens)|maximum.{0,40}(?:length|tokens)|reduce the length",
    re.IGNORECASE,
)
MOST_TOKENS = 1 << 32
"""Of one call. What an endpoint says may be no number that a metric can hold."""
MOST_DOUBLINGS = 10
"""Of the pause between attempts, which is bounded long before that."""

T = TypeVar("T")


class Endpoint:
    """An OpenAI-compatible endpoint with a cache before it. Belongs to one event loop."""

    def __init__(
        self, settings: JudgeSettings, *, server: Server | None = None, backoff_s: float = 0.5
    ) -> None:
        """server: takes the place of `settings.base_url`, and is asked for its URL before the
        first call and whenever it does not answer; backoff_s: the first pause before another
        attempt, which doubles each time.

        Raises ValueError without an endpoint, without its key, or for an unusable cache or file.
        """
        if not (settings.base_url or server) or not settings.model:
            raise ValueError(
                "rewards.judge.base_url is empty, and rewards by rubric need a judge; set it to an "
                "OpenAI-compatible endpoint and rewards.judge.model to its model"
            )
        self._settings = settings
        self._server = server
        self._backoff_s = backoff_s
        self._key = server.key if server else _api_key(settings.api_key_env)
        self._url: str = "" if server else settings.base_url
        self._client = None if server else self._connected(settings.base_url)
        self._finding = asyncio.Lock()
        self._cache = Cache(settings.cache_dir) if settings.cache_dir else Memory()
        self._chats = Chats(settings.chats)
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._under_way: dict[str, asyncio.Task[str]] = {}
        self._stopped = ""
        self._calls = self._cached = self._prompt_tokens = self._reply_tokens = 0
        self._retried: Counter[FailureKind] = Counter()
        self._call_s = self._queue_s = NONE

    def counts(self) -> Counts:
        """The calls so far, their tokens and their times."""
        return Counts(
            calls=self._calls,
            cached=self._cached,
            prompt_tokens=self._prompt_tokens,
            reply_tokens=self._reply_tokens,
            retried=dict(self._retried),
            call_s=self._call_s,
            queue_s=self._queue_s,
        )

    def stop(self, reason: str) -> JudgeStopped:
        """From now on every call raises the result."""
        self._stopped = self._stopped or reason
        return JudgeStopped(self._stopped)

    async def ask(self, question: Question[T], *, sample: int = 0, fresh: bool = False) -> T:
        """The judge's reply; equal questions of the same `sample` are asked once,
        unless `fresh`.

        Raises Unjudged when all attempts failed, and JudgeStopped when there must be no more.
        """
        chosen = self._settings
        key = question.key(
            chosen.model, chosen.temperature, chosen.max_reply_tokens, dict(chosen.extra), sample
        )
        kept = None if fresh else self._cache.get(key)
        if kept is not None:
            try:
                reply = question.read(kept)
            except BadReply:
                pass  # written by something else: asked again, and written over
            else:
                self._cached += 1
                return reply
        task = self._under_way.get(key)
        if task is not None:
            self._cached += 1
        else:
            task = asyncio.create_task(self._attempts(question, key))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key))
        # Shielded: others may be waiting for the same reply.
        return question.read(await asyncio.shield(task))

    async def close(self) -> None:
        """End the connections."""
        for task in self._under_way.values():
            task.cancel()
        if self._client:
            await self._client.close()
        self._cache.close()
        self._chats.close()

    def _connected(self, url: str) -> AsyncOpenAI:
        timeout_s = self._settings.timeout_s
        timeout = Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
        return AsyncOpenAI(
            base_url=url,
            # Never the library's own OPENAI_API_KEY: that key belongs to somebody else.
            api_key=self._key or "none",
            max_retries=0,
            timeout=timeout,
            # A server inside the cluster is not behind the proxy of the way out.
            http_client=bounded_http(trust_env=self._server is None),
        )

    async def _found(self) -> AsyncOpenAI:
        """A client of where the run's own server is now. Raises JudgeStopped if there is none."""
        assert self._server is not None
        async with self._finding:
            try:
                url = await asyncio.to_thread(self._server.url)
            except RuntimeError as error:
                raise self.stop(str(error)) from error
            if self._client is None or url != self._url:
                # The old one may still have calls under way; they fail by themselves.
                self._url, self._client = url, self._connected(url)
            return self._client

    async def _attempts(self, question: Question[Any], key: str) -> str:
        """The content of a valid reply, kept in the cache."""
        attempt, came = 0, time.monotonic()
        # The slot is held during the pauses too: that is what slows everything down together
        # when the endpoint has too much to do.
        async with self._slots:
            self._queue_s = self._queue_s.merge(Mean(time.monotonic() - came, 1))
            while True:
                try:
                    asked = question.messages(new_fence())
                    content = await self._once(question, asked)
                    self._cache.put(key, content)
                    self._chats.add(asked, content)
                    return content
                except Unjudged as error:
                    attempt += 1
                    if not error.retry or attempt > self._settings.retries:
                        raise
                    self._retried[error.kind] += 1
                    pause = self._backoff_s * 2 ** min(attempt - 1, MOST_DOUBLINGS)
                    pause *= random.uniform(0.5, 1.5)
                    await asyncio.sleep(min(max(pause, error.after_s), LONGEST_PAUSE_S))

    async def _once(self, question: Question[Any], asked: list[dict[str, str]]) -> str:
        settings = self._settings
        if self._stopped:
            raise JudgeStopped(self._stopped)
        # Before calls are counted: while it is looked for, others may make the last there are.
        client = self._client or await self._found()
        if 0 < settings.max_calls <= self._calls:
            raise self.stop(
                f"the judge has been called {self._calls} times, and rewards.judge.max_calls = "
                f"{settings.max_calls} is the ceiling; raise it and start again to resume from the "
                "last checkpoint"
            )
        self._calls += 1
        try:
            # The library's timeout is for each read; a server that drips bytes would outlast it.
            async with self._timed(), asyncio.timeout(settings.timeout_s):
                response = await client.chat.completions.with_raw_response.create(
                    model=settings.model,
                    messages=cast(Any, asked),
                    temperature=settings.temperature,
                    max_tokens=settings.max_reply_tokens,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {
                            "name": "judgement",
                            "strict": True,
                            "schema": dict(question.schema),
                        },
                    },
                    extra_body=dict(settings.extra) or None,
                )
        except (TimeoutError, openai.APITimeoutError) as error:
            if self._server:
                await self._found()  # its machine may be gone
            raise Unjudged(
                "timeout", f"no reply within {settings.timeout_s:g} s", retry=True
            ) from error
        except openai.APIStatusError as error:
            raise self._status(error, question) from error
        except openai.APIConnectionError as error:
            if self._server:
                await self._found()
            large = error if isinstance(error, TooLarge) else error.__cause__
            if isinstance(large, TooLarge):
                raise Unjudged("invalid", large.message, retry=True) from error
            why = f"cannot be reached ({error.__cause__ or error})"
            raise Unjudged("unreachable", self._public(why), retry=True) from error
        try:
            content = self._content(response.text)
            question.read(content)
        except BadReply as error:
            why = self._public(f"invalid reply: {error}")
            raise Unjudged("invalid", why, retry=True) from error
        return content

    @asynccontextmanager
    async def _timed(self) -> AsyncGenerator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._call_s = self._call_s.merge(Mean(time.monotonic() - began, 1))

    def _status(self, error: openai.APIStatusError, question: Question[Any]) -> Unjudged:
        code = error.status_code
        said = self._public(f"HTTP {code}: {error.message}")
        if code == 429:
            return Unjudged("busy", said, retry=True, after_s=_retry_after(error))
        if code >= 500:
            return Unjudged("server", said, retry=True, after_s=_retry_after(error))
        if code in TOO_LONG and _TOO_LONG.search(error.message):
            thinking = size(question.material.get("thinking", ""))
            return Unjudged("too_long", said, retry=False, thinking=thinking)
        return Unjudged("refused", said, retry=code in RETRIED)

    def _content(self, body: str) -> str:
        """The text of a chat completion's only choice."""
        try:
            completion = json.loads(body)
            choice = completion["choices"][0]
            content, finish = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise BadReply("not a chat completion") from error
        self._count_tokens(completion.get("usage"))
        if finish == "length":
            raise BadReply(
                f"cut off after rewards.judge.max_reply_tokens = {self._settings.max_reply_tokens}"
            )
        if not isinstance(content, str):
            raise BadReply("no text in it")
        try:
            content.encode()
        except UnicodeEncodeError as error:  # half a character: JSON can say it, the cache cannot
            raise BadReply("not text") from error
        return content

    def _count_tokens(self, usage: Any) -> None:
        if isinstance(usage, Mapping):
            counted = cast(Mapping[str, Any], usage)
            self._prompt_tokens += _tokens(counted.get("prompt_tokens"))
            self._reply_tokens += _tokens(counted.get("completion_tokens"))

    def _public(self, text: str) -> str:
        """`text` for a message: short, fit for a terminal, and without the key if the endpoint
        repeats it."""
        text = (text.replace(self._key, "***") if self._key else text)[:300]
        return "".join(c if c.isprintable() else " " for c in text)


def _tokens(said: Any) -> int:
    """0 where an endpoint says what no call can have taken."""
    return said if type(said) is int and 0 <= said <= MOST_TOKENS else 0


def _api_key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"rewards.judge.api_key_env = {variable!r}: that environment variable is not set; "
            "export the judge's key in it"
        )
    return key


def _retry_after(error: openai.APIStatusError) -> float:
    try:
        return max(0.0, float(error.response.headers.get("retry-after", "0")))
    except ValueError:  # a date; the usual pause has to do
        return 0.0
