"""A rubric, and judges that are asked by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from keel.configs.schema import JudgeConfig
from keel.rewards.judge.judge import Judge
from keel.rewards.judge.results import Failed, Judged
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
    chosen: JudgeConfig, answers: Sequence[str], prompt: Prompt = PROMPT
) -> list[Judged | Failed]:
    async def all_of_them() -> list[Judged | Failed]:
        judge = Judge(chosen, backoff_s=0.005)
        try:
            return await asyncio.gather(*(judge.judge(prompt, answer) for answer in answers))
        finally:
            await judge.close()

    return asyncio.run(all_of_them())


def scripted(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    """One reply after the other, then good ones."""
    left = list(replies)
    return lambda request: left.pop(0) if left else good(request)
