"""Runs a judge on answers with a common rubric."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from keel.configs.schema import JudgeConfig
from keel.rewards.judge.results import Failed, Judged
from keel.rewards.judge.service import Judge
from keel.rl.types import Prompt
from tests.rewards.judge.judge_server import Reply, good
from tests.waiting import PATIENCE_S

CRITERIA = (
    {"name": "blue", "text": "says blue", "weight": 0.75},
    {"name": "sky", "text": "half sky", "weight": 0.25},
)

PROMPT = Prompt(
    prompt_id="file/1",
    domain="chat",
    messages=({"role": "user", "content": "What colour is it? {braces}"},),
    reward={"kind": "rubric", "criteria": CRITERIA},
)


def settings(url: str, **changes: Any) -> JudgeConfig:
    return replace(
        JudgeConfig(
            base_url=url, model="m", timeout_s=PATIENCE_S, retries=2, max_failure_fraction=1.0
        ),
        **changes,
    )


def judge(
    config: JudgeConfig, answers: Sequence[str], prompt: Prompt = PROMPT
) -> list[Judged | Failed]:
    async def judge_all() -> list[Judged | Failed]:
        judge = Judge(config, backoff_s=0.005)
        try:
            return await asyncio.gather(*(judge.judge(prompt, answer) for answer in answers))
        finally:
            await judge.close()

    return asyncio.run(judge_all())


def scripted(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    """The given replies in order, then good ones."""
    remaining = list(replies)
    return lambda request: remaining.pop(0) if remaining else good(request)
