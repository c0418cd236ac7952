"""Completions of a model behind an OpenAI-compatible endpoint, to be measured: text and a count of
tokens, nothing that could be trained on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from math import inf
from typing import Any, Self, TypeVar, cast

import numpy as np

from keel.configs.schema import EndpointConfig, SamplingConfig
from keel.rl.turns import THINK
from keel.rl.types import FinishReason, Group, Prompt, Segment, Trajectory
from keel.rollout.endpoint_reply import Said, read

T = TypeVar("T")
CONNECT_S = 10.0
CLOSING_S = 30.0
MOST_SAID = 300
LATER = "later: "
"""How the reason begins for a completion that the endpoint may give another time."""
FORBIDDEN = 403
"""HTTP status."""
FOR_ALL = frozenset({401, 402, 404})
"""HTTP status about key, balance or address, which all requests have in common."""
BUSY = frozenset({408, 409, 429, *range(500, 600)})
"""HTTP status that another time may not have."""
MOST_IN_A_ROW = 64
"""Requests forbidden or cut off that may be about the prompts; after more it is the key that is
refused, or nobody is there."""
UNKNOWN = -1
"""In the place of token ids, which an endpoint does not say."""
_status: ContextVar[int] = ContextVar("_status", default=0)
"""HTTP status of the last attempt of a request; 0: it has none yet."""


class EndpointCompletions:
    """On a thread of its own. A context manager."""

    def __init__(self, config: EndpointConfig) -> None:
        """Raises ValueError without its key."""
        key = os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
        if config.api_key_env and not key:
            raise ValueError(
                f"endpoint.api_key_env = {config.api_key_env}: no such environment variable"
            )
        self._config, self._key = config, key
        self._in_a_row = MOST_IN_A_ROW
        """Since the last answer. Before the first one the next is about all requests."""

    def __enter__(self) -> Self:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout  # noqa: PLC0415  half a second, for few commands

        config = self._config
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            # Never the library's own OPENAI_API_KEY: that key belongs to somebody else.
            api_key=self._key or "none",
            max_retries=config.retries,
            timeout=Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s)),
            http_client=DefaultAsyncHttpxClient(
                event_hooks={"request": [_attempted], "response": [_answered]}
            ),
        )
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="keel-endpoint", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSING_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSING_S)

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()

    def submit(self, prompt: Prompt, *, group_size: int, sampling: SamplingConfig) -> Future[Group]:
        """A completion that the endpoint does not give is dropped, with the reason. The future
        fails with RuntimeError where the endpoint refuses what every request has in common."""
        return self.later(self._group(prompt, group_size, sampling))

    async def _group(self, prompt: Prompt, size: int, sampling: SamplingConfig) -> Group:
        results = await asyncio.gather(*(self._one(prompt, n, sampling) for n in range(size)))
        return Group(
            prompt=prompt,
            trajectories=tuple(one for one in results if isinstance(one, Trajectory)),
            dropped=tuple(one for one in results if isinstance(one, str)),
        )

    async def _one(
        self, prompt: Prompt, sibling: int, sampling: SamplingConfig
    ) -> Trajectory | str:
        """Or why there is none."""
        said = await self.asked(
            prompt.messages,
            prompt.tools,
            sampling,
            max_tokens=sampling.max_tokens,
            thinking=prompt.thinking,
        )
        return said if isinstance(said, str) else _trajectory(prompt, sibling, said)

    def later(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """On this thread's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def asked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingConfig,
        *,
        max_tokens: int,
        thinking: bool,
        within_s: float = inf,
    ) -> Said | str:
        """What the endpoint says, or why it says nothing. Raises as `submit`'s future fails, and
        TimeoutError after `within_s`. Time begins with a free slot (`endpoint.max_concurrent`)."""
        import openai  # noqa: PLC0415  as above

        config = self._config
        extra = dict(config.extra)
        if sampling.top_k and not sampling.greedy:  # not every endpoint knows `top_k`
            extra["top_k"] = sampling.top_k
        if config.tells_thinking:
            told = {"enable_thinking": thinking, "thinking": thinking}
            extra["chat_template_kwargs"] = {**extra.get("chat_template_kwargs", {}), **told}
        most_s = min(within_s, config.timeout_s * (1 + config.retries))
        try:
            async with self._slots, asyncio.timeout(most_s):
                began = time.monotonic()
                response = await self._client.chat.completions.create(
                    model=config.model,
                    messages=cast(Any, [dict(message) for message in messages]),
                    tools=cast(Any, [dict(tool) for tool in tools] or openai.omit),
                    temperature=0.0 if sampling.greedy else sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=max_tokens,
                    stop=list(sampling.stop) or None,
                    extra_body=extra or None,
                )
                self._in_a_row = 0
                body = response.model_dump(warnings=False)
                return read(body, seconds=time.monotonic() - began)
        except TimeoutError:
            if (status := _status.get()) in BUSY:
                own = "endpoint.timeout_s and endpoint.retries"
                knobs = own if most_s < within_s else "rollout.timeout_s"
                return f"{LATER}the endpoint says HTTP {status} for all {most_s:g} s of {knobs}"
            if most_s == within_s:
                raise
            return self._late
        except openai.APITimeoutError:
            return self._late
        except openai.APIStatusError as error:
            status, said = error.status_code, f"the endpoint says HTTP {error.status_code}"
            if status in FOR_ALL or (status == FORBIDDEN and self._is_for_all()):
                raise self._unusable(f"{said}: {error.message}") from error
            return LATER * (status in BUSY) + self._public(f"{said}: {error.message}")
        except openai.APIConnectionError as error:
            why = str(error.__cause__ or error)
            if self._is_for_all():
                raise self._unusable(f"cannot be reached ({why})") from error
            return LATER + self._public(f"the connection to the endpoint was lost: {why}")
        except (openai.APIError, ValueError, AttributeError) as error:
            return self._public(f"the endpoint's reply is none: {error}")

    @property
    def _late(self) -> str:
        return f"no reply within endpoint.timeout_s = {self._config.timeout_s:g}"

    def _is_for_all(self) -> bool:
        """Whether one more request that got nothing says that none would."""
        self._in_a_row += 1
        return self._in_a_row > MOST_IN_A_ROW

    def _unusable(self, why: str) -> RuntimeError:
        return RuntimeError(f"endpoint.base_url = {self._config.base_url}: {self._public(why)}")

    def _public(self, text: str) -> str:
        text = (text.replace(self._key, "***") if self._key else text)[:MOST_SAID]
        return "".join(c if c.isprintable() else " " for c in text)


async def _attempted(_: object) -> None:
    _status.set(0)


async def _answered(response: Any) -> None:
    _status.set(response.status_code)


def _trajectory(prompt: Prompt, sibling: int, said: Said) -> Trajectory:
    content, reasoning = said.content, said.reasoning
    raw = f"{THINK.open}{reasoning}{THINK.close}{content}" if reasoning else content
    message = {"role": "assistant", "content": content.strip(), "raw": raw}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    finish: FinishReason = "length" if said.cut else "stop"
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sibling=sibling,
        segments=(_counted(prompt.prompt_id, said.tokens),),
        finish_reason=finish,
        messages=(message,),
    )


def _counted(prompt_id: str, tokens: int) -> Segment:
    """As many sampled tokens, of which nothing else is known."""
    return Segment(
        prompt_id=prompt_id,
        token_ids_T=np.full(tokens + 1, UNKNOWN, np.int32),
        trainable_T=np.arange(tokens + 1) > 0,
        logp_old_T=np.zeros(tokens + 1, np.float32),
        version_T=np.zeros(tokens + 1, np.int32),
    )
