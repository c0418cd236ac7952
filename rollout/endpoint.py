"""Completions of a model behind an OpenAI-compatible endpoint, to be measured: text and a count of
tokens, nothing that could be trained on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar, cast

import numpy as np

from keel.configs.schema import EndpointConfig, SamplingConfig
from keel.rl.types import FinishReason, Group, Prompt, Segment, Trajectory
from keel.rollout.engine.conversion import THINK_END, THINK_START

T = TypeVar("T")
CONNECT_S = 10.0
CLOSING_S = 30.0
MOST_SAID = 300
LATER = "later: "
"""How the reason begins for a completion that the endpoint may give another time."""
BUSY, FORBIDDEN = 429, 403
"""HTTP status."""
MOST_FORBIDDEN = 64
"""Refusals in a row that may be about the prompts; after more it is the key that is refused."""
UNKNOWN = -1
"""In the place of token ids, which an endpoint does not say."""


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
        self._forbidden = MOST_FORBIDDEN
        """Since the last answer. Before the first one a refusal is about all requests."""

    def __enter__(self) -> Self:
        from openai import AsyncOpenAI, Timeout  # noqa: PLC0415  half a second, for few commands

        config = self._config
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            # Never the library's own OPENAI_API_KEY: that key belongs to somebody else.
            api_key=self._key or "none",
            max_retries=config.retries,
            timeout=Timeout(config.deadline_s, connect=min(CONNECT_S, config.deadline_s)),
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
        body = await self.asked(
            prompt.messages,
            prompt.tools,
            sampling,
            max_tokens=sampling.max_tokens,
            thinking=prompt.thinking,
        )
        return body if isinstance(body, str) else _trajectory(prompt, sibling, body)

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
    ) -> Mapping[str, Any] | str:
        """What the endpoint says, or why it says nothing. Raises as `submit`'s future fails."""
        import openai  # noqa: PLC0415  as above

        config = self._config
        extra = dict(config.extra)
        if sampling.top_k:
            extra["top_k"] = sampling.top_k
        if config.tells_thinking:
            told = {"enable_thinking": thinking, "thinking": thinking}
            extra["chat_template_kwargs"] = {**extra.get("chat_template_kwargs", {}), **told}
        try:
            async with self._slots, asyncio.timeout(config.deadline_s * (1 + config.retries)):
                response = await self._client.chat.completions.create(
                    model=config.model,
                    messages=cast(Any, [dict(message) for message in messages]),
                    tools=cast(Any, [dict(tool) for tool in tools] or openai.omit),
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=max_tokens,
                    stop=list(sampling.stop) or None,
                    extra_body=extra or None,
                )
                self._forbidden = 0
                return response.model_dump()
        except (TimeoutError, openai.APITimeoutError):
            return f"no reply within endpoint.deadline_s = {config.deadline_s:g}"
        except (
            openai.AuthenticationError,
            openai.PermissionDeniedError,
            openai.NotFoundError,
        ) as error:
            self._forbidden += error.status_code == FORBIDDEN
            if error.status_code == FORBIDDEN and self._forbidden <= MOST_FORBIDDEN:
                return self._public(f"the endpoint says HTTP {FORBIDDEN}: {error.message}")
            raise RuntimeError(
                f"endpoint.base_url = {config.base_url}: {self._public(str(error))}"
            ) from error
        except openai.APIStatusError as error:
            busy = error.status_code == BUSY or error.status_code >= 500
            said = f"the endpoint says HTTP {error.status_code}: {error.message}"
            return LATER * busy + self._public(said)
        except openai.APIConnectionError as error:
            raise RuntimeError(
                f"endpoint.base_url = {config.base_url}: cannot be reached "
                f"({self._public(str(error.__cause__ or error))})"
            ) from error
        except (openai.APIError, ValueError, AttributeError) as error:
            return self._public(f"the endpoint's reply is none: {error}")

    def _public(self, text: str) -> str:
        text = (text.replace(self._key, "***") if self._key else text)[:MOST_SAID]
        return "".join(c if c.isprintable() else " " for c in text)


def _trajectory(prompt: Prompt, sibling: int, body: Mapping[str, Any]) -> Trajectory | str:
    """Or why there is none."""
    choice: Any = (body.get("choices") or [None])[0]
    tokens: Any = (body.get("usage") or {}).get("completion_tokens")
    if not choice or not isinstance(choice.get("message"), Mapping):
        return "the endpoint's reply is no chat completion"
    if not isinstance(tokens, int) or tokens < 1:
        return "the endpoint does not count the tokens of its completions"
    message = cast(Mapping[str, Any], choice["message"])
    content = str(message.get("content") or "")
    reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
    raw = f"{THINK_START}{reasoning}{THINK_END}{content}" if reasoning else content
    said = {"role": "assistant", "content": content.strip(), "raw": raw}
    if reasoning.strip():
        said["reasoning_content"] = reasoning.strip()
    finish: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sibling=sibling,
        segments=(_counted(prompt.prompt_id, tokens),),
        finish_reason=finish,
        messages=(said,),
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
