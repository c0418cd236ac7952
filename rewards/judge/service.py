"""Judges completions on a background thread, using the reward specs of their prompts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

from keel.configs.sections.rewards import JudgeConfig
from keel.rewards.failures import FailureRate
from keel.rewards.judge.prompts import json_length, rubric_question
from keel.rewards.judge.specs import CallError, Counts, Judgement, ServedJudge, judged_spec
from keel.rewards.text import is_blank, outside_think
from keel.rl.futures import LoopThread, cancel_tasks
from keel.rl.types import Prompt

_LONG = 0.1  # of `max_characters`; a longer one that exceeds the judge's context scores 0


class JudgeService:
    """Judges completions on an event loop in its own thread. Use it as a context manager."""

    def __init__(self, settings: JudgeConfig, servers: Sequence[ServedJudge] = ()) -> None:
        # Imported late: few runs have a judge, and openai takes more than a second to load.
        from keel.rewards.judge.client import JudgeEndpoint  # noqa: PLC0415

        self._settings = settings
        self._endpoint = JudgeEndpoint(settings, servers)
        self._rate = FailureRate(settings.max_failure_fraction)
        self._counts = self._endpoint.counts
        self._closed = False
        self._thread = LoopThread("judge")

    def submit(
        self, prompt: Prompt, answer: str, thinking: str = ""
    ) -> Future[Judgement | CallError]:
        """Start judging an answer based on the spec in `prompt.reward`. Thinking inside `answer` is
        removed. `thinking` is used only for criteria about the thinking.

        The future raises ValueError if the spec is malformed, and RewardStopped if the call limit
        is reached or too many completions couldn't be judged.
        """
        if self._closed:
            raise RuntimeError("the judge is closed")
        judgement = self._judge_completion(prompt, answer, thinking)
        return self._thread.submit(judgement)

    def check_reachable(self) -> None:
        """Send a test request to each server. Raises ValueError if a request fails, and
        RewardStopped if one of this run's own servers doesn't start."""
        task = [{"role": "user", "content": "Name a colour."}]
        criteria, material = {"c1": "The answer names a colour."}, {"answer": "Blue."}
        question = rubric_question(task, criteria, "", material)

        async def ask_each() -> None:
            ask, pool = partial(self._endpoint.ask, question), self._endpoint.pool
            await pool.locate_all()
            servers = enumerate(pool.servers)
            await asyncio.gather(*(ask(sample=number, only=one) for number, one in servers))

        try:
            self._thread.submit(ask_each()).result()
        except CallError as error:
            settings = self._settings
            where = f"base_url = {settings.base_url!r}" if settings.base_url else "serve = True"
            raise ValueError(
                f"rewards.judge.{where}: the judge {settings.model!r} gives no judgement: {error}"
            ) from error

    def counts(self) -> Counts:
        counts = self._counts
        return replace(counts, failed=Counter(counts.failed), retried=Counter(counts.retried))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True

        async def end() -> None:
            await cancel_tasks()
            await self._endpoint.close()

        self._thread.stop(end())

    def __enter__(self) -> JudgeService:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _judge_completion(
        self, prompt: Prompt, answer: str, thinking: str
    ) -> Judgement | CallError:
        try:
            spec = judged_spec(prompt.reward)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error
        limit, final = self._settings.max_characters, outside_think(answer)
        parsed, size = spec.read(final), json_length(final)
        reason = f"the answer {parsed}" if isinstance(parsed, str) else ""
        if size > limit:
            reason = f"the answer has {size} characters, above max_characters = {limit}"
        elif is_blank(final):
            reason = "there is no answer"
        if reason:
            self._counts.completions += 1
            self._counts.skipped += 1
            return spec.zero_result(reason)
        thinking = _json_tail(thinking, limit) if spec.sees_thinking else ""

        async def judge_sample(number: int) -> Any:
            ask = partial(self._endpoint.ask, sample=number)
            return await spec.sample(ask, prompt.messages, cast(Any, parsed), thinking, number)

        count = self._settings.samples
        results = await asyncio.gather(*map(judge_sample, range(count)), return_exceptions=True)
        samples = [result for result in results if not isinstance(result, BaseException)]
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, CallError):
                raise failure
        if 2 * len(samples) > count:
            return self._count_result(spec.combine(cast(Any, parsed), samples))
        error = cast(CallError, failures[0])
        if error.kind == "too_long" and size + json_length(thinking) > limit * _LONG:
            # The policy's fault, not the judge's.
            self._counts.skipped += 1
            return self._count_result(spec.zero_result(f"it exceeds the judge's context: {error}"))
        return self._count_result(error)

    def _count_result(self, result: Judgement | CallError) -> Judgement | CallError:
        excess = self._rate.add(isinstance(result, CallError))
        if not isinstance(result, CallError):
            self._counts.completions += 1
            return result
        self._counts.failed[result.kind] += 1
        if excess:
            settings = self._settings
            where = f"at {settings.base_url}" if settings.base_url else f"{settings.model!r}"
            raise self._endpoint.pool.stop(
                f"the judge {where} failed on {excess}, above rewards.judge.max_failure_fraction = "
                f"{settings.max_failure_fraction:g}; last error: {result.reason}"
            )
        return result


def _json_tail(text: str, max_size: int) -> str:
    """Drop the beginning of a text so that the rest takes up at most `max_size` characters of
    JSON."""
    text = text[-max_size:]
    while json_length(text) > max_size:
        text = text[len(text) // 4 + 1 :]
    return text
