"""Scored groups whose per-token data is a function of the token id, to expose misalignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import NO_ROUTE, Group, Prompt, SamplingMasks, ScoredGroup, Segment, Trajectory

LAYERS, EXPERTS = 2, 3


def logp_old_of(token: int) -> float:
    return -(token % 97 + 1) / 100


def kept_of(token: int) -> list[int]:
    return [token, *range(token % 3)]


def prompt(name: str = "p", **fields: Any) -> Prompt:
    message = {"role": "user", "content": name}
    return Prompt(**{"prompt_id": name, "domain": "d", "messages": (message,), **fields})


def segment(
    first: int = 0,
    tokens: int = 4,
    *,
    name: str = "p",
    context: int = 1,
    routes: bool = False,
    kept: bool = False,
    version: int = 0,
) -> Segment:
    """Build ids `first`, `first + 1`, …; all but the first `context` are sampled."""
    ids = np.arange(first, first + tokens, dtype=np.int32)
    trainable = np.arange(tokens) >= context
    routes_TLK = np.full((tokens, LAYERS, EXPERTS), NO_ROUTE, np.int16)
    routes_TLK[:-1] = ids[:-1, None, None] % 8
    spans = [kept_of(t) if sampled else [] for t, sampled in zip(ids, trainable, strict=True)]
    return Segment(
        prompt_id=name,
        token_ids_T=ids,
        trainable_T=trainable,
        logp_old_T=np.where(trainable, [logp_old_of(t) for t in ids], 0).astype(np.float32),
        version_T=np.where(trainable, version, -1).astype(np.int32),
        routes_TLK=routes_TLK if routes else None,
        sampling_mask=SamplingMasks.from_lists(spans) if kept else None,
    )


def trajectory(*segments: Segment, sibling: int = 0, finish: Any = "stop") -> Trajectory:
    return Trajectory(
        prompt_id=segments[0].prompt_id,
        sibling=sibling,
        segments=segments,
        finish_reason=finish,
        messages=(),
    )


def scored(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    *,
    parts: Sequence[dict[str, float]] | None = None,
    dropped: tuple[str, ...] = (),
    **fields: Any,
) -> ScoredGroup:
    rewards_G = np.asarray(rewards, np.float32)
    name = trajectories[0].prompt_id if trajectories else "p"
    return ScoredGroup(
        group=Group(
            prompt=prompt(name, **fields), trajectories=tuple(trajectories), dropped=dropped
        ),
        rewards_G=rewards_G,
        parts_G=tuple(parts or [{} for _ in rewards]),
        advantages_G=rewards_G - rewards_G.mean() if len(rewards) else rewards_G,
    )


def finished(
    name: str,
    correct: tuple[float, ...] = (1.0, 0.0),
    versions: tuple[int, ...] = (0,),
    rewards: tuple[float, ...] | None = None,
) -> ScoredGroup:
    """Build a group of completions with one token per version."""
    tokens = len(versions)
    segment = Segment(
        prompt_id=name,
        token_ids_T=np.arange(tokens + 1, dtype=np.int32),
        trainable_T=np.array([False] + [True] * tokens),
        logp_old_T=np.array([0.0] + [-1.0] * tokens, np.float32),
        version_T=np.array([-1, *versions], np.int32),
    )
    trajectories = tuple(
        Trajectory(
            prompt_id=name, sibling=i, segments=(segment,), finish_reason="stop", messages=({},)
        )
        for i in range(len(correct))
    )
    values = np.array(correct if rewards is None else rewards, np.float32)
    return ScoredGroup(
        group=Group(prompt=prompt(name), trajectories=trajectories),
        rewards_G=values,
        parts_G=tuple({"correct": value} for value in correct),
        advantages_G=values - values.mean() if len(values) else values,
    )


def random_groups(
    seed: int,
    *,
    groups: int = 4,
    size: int = 3,
    longest: int = 12,
    uniform: float = 0.3,
    routes: bool = True,
    kept: bool = True,
) -> list[ScoredGroup]:
    """Draw groups with one or two segments per answer and unique token ids.

    A fraction `uniform` of the groups have equal rewards, and about half a KL coefficient.
    """
    random = np.random.default_rng(seed)
    result: list[ScoredGroup] = []
    first = 0
    for index in range(groups):
        answers: list[Trajectory] = []
        for sibling in range(size):
            segments: list[Segment] = []
            for _ in range(random.integers(1, 3)):
                tokens = int(random.integers(2, longest + 1))
                context = int(random.integers(1, tokens))
                segments.append(
                    segment(
                        *(first, tokens),
                        name=f"p{index}",
                        context=context,
                        routes=routes,
                        kept=kept,
                    )
                )
                first += tokens
            answers.append(trajectory(*segments, sibling=sibling))
        rewards = np.arange(size) * float(random.random() > uniform)
        kl_coef = 0.25 * float(random.random() > 0.5)
        result.append(scored(answers, rewards.tolist(), kl_coef=kl_coef))
    return result


def prompted_groups(
    seed: int, *, groups: int = 3, size: int = 5, routes: bool = True, kept: bool = True
) -> list[ScoredGroup]:
    """Draw groups with a common prompt of up to 60 tokens and otherwise unique token ids.

    About one answer in six has a second segment.
    """
    random = np.random.default_rng(seed)
    result: list[ScoredGroup] = []
    first = 0
    for index in range(groups):
        prefix = np.arange(first, first := first + int(random.integers(1, 60)), dtype=np.int32)
        answers: list[Trajectory] = []
        for sibling in range(size):
            segments: list[Segment] = []
            for _ in range(1 + (random.random() < 1 / 6)):
                own = int(random.integers(1, 30))
                whole = segment(
                    *(first - len(prefix), len(prefix) + own),
                    name=f"p{index}",
                    context=len(prefix),
                    routes=routes,
                    kept=kept,
                )
                first += own
                segments.append(with_prefix(whole, prefix))
            answers.append(trajectory(*segments, sibling=sibling))
        rewards = random.integers(0, 2, size).tolist()
        result.append(scored(answers, rewards, kl_coef=0.25 * float(random.random() > 0.5)))
    return result


def with_prefix(whole: Segment, prefix: NDArray[np.int32]) -> Segment:
    """Replace the first ids of a segment and their routes."""
    ids = np.concatenate([prefix, whole.token_ids_T[len(prefix) :]])
    routes_TLK = whole.routes_TLK
    if routes_TLK is not None:
        rows = np.broadcast_to(ids[:, None, None] % 8, routes_TLK.shape).astype(np.int16)
        routes_TLK = np.where(routes_TLK == NO_ROUTE, routes_TLK, rows)
    return replace(whole, token_ids_T=ids, routes_TLK=routes_TLK)
