"""Groups of answers to score."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keel.configs.sections.rewards import CodeConfig
from keel.rewards.pool import WorkerPool
from keel.rewards.scorer import Scorer
from keel.rl.types import (
    FinishReason,
    Group,
    Prompt,
    Purpose,
    ScoredGroup,
    Segment,
    Trajectory,
)

PROMPT = Prompt(
    prompt_id="file/1",
    domain="maths",
    messages=({"role": "user", "content": "1+2?"},),
    reward={"kind": "answer", "answer": "3", "match": "exact"},
)
"""Matched exactly, because loading the math library takes each worker half a second."""


def with_message(
    message: Mapping[str, Any], *, sibling: int = 0, finish: FinishReason = "stop", tokens: int = 1
) -> Trajectory:
    """A trajectory with one message and this many sampled tokens."""
    segment = Segment(
        prompt_id="file/1",
        token_ids_T=np.zeros(tokens + 1, np.int32),
        trainable_T=np.arange(tokens + 1) > 0,
        logp_old_T=np.zeros(tokens + 1, np.float32),
        version_T=np.zeros(tokens + 1, np.int32),
    )
    return Trajectory(
        prompt_id="file/1",
        sibling=sibling,
        segments=(segment,),
        finish_reason=finish,
        messages=(message,),
    )


def trajectory(
    sibling: int, raw: str, finish: FinishReason = "stop", tokens: int = 1
) -> Trajectory:
    message = {"role": "assistant", "content": "", "raw": raw}
    return with_message(message, sibling=sibling, finish=finish, tokens=tokens)


def group(*raws: str, prompt: Prompt = PROMPT) -> Group:
    return Group(prompt=prompt, trajectories=tuple(trajectory(i, r) for i, r in enumerate(raws)))


def new_scorer(
    weights: Mapping[str, Mapping[str, float]],
    *,
    workers: int = 0,
    timeout_s: float = 3.0,
    code: CodeConfig | None = None,
    log: Path | None = None,
    **options: Any,
) -> Scorer:
    pool = WorkerPool(workers, timeout_s=timeout_s, code=code, log=log)
    return Scorer(weights, pool=pool, **options)


def score(scorer: Scorer, groups: Iterable[Group], purpose: Purpose = "train") -> list[ScoredGroup]:
    futures = [scorer.submit(group, purpose) for group in groups]
    return [future.result() for future in futures]
