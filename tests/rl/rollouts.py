"""Scored groups whose per-token data is a function of the token id, to expose misalignment."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.rl.recordings import NO_ROUTE, Recordings, SamplingMasks, StoredRecordings
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory

LAYERS, EXPERTS = 2, 3


def logp_old_of(token: Any) -> Any:
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
    spans = [kept_of(t) if t >= first + context else [] for t in ids] if kept else []
    return Segment(
        prompt_id=name,
        token_ids_T=ids,
        trainable_T=trainable,
        logp_old_T=np.where(trainable, logp_old_of(ids), 0).astype(np.float32),
        version_T=np.where(trainable, version, -1).astype(np.int32),
        routes_TLK=routes_TLK if routes else None,
        sampling_mask=SamplingMasks.from_lists(spans) if spans else None,
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
    name: str = "p",
    **fields: Any,
) -> ScoredGroup:
    rewards_G = np.asarray(rewards, np.float32)
    name = trajectories[0].prompt_id if trajectories else name
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
    one = segment(0, len(versions) + 1, name=name)
    one = replace(one, version_T=np.array([-1, *versions], np.int32))
    return scored(
        [replace(trajectory(one, sibling=i), messages=({},)) for i in range(len(correct))],
        correct if rewards is None else rewards,
        parts=[{"correct": value} for value in correct],
        name=name,
    )


def random_groups(seed: int, *, groups: int = 4) -> list[ScoredGroup]:
    """Draw groups of three answers with one or two segments and unique token ids.

    A third of the groups have equal rewards, and about half a KL coefficient.
    """
    random = np.random.default_rng(seed)
    result: list[ScoredGroup] = []
    first = 0
    for index in range(groups):
        answers: list[Trajectory] = []
        for sibling in range(3):
            segments: list[Segment] = []
            for _ in range(random.integers(1, 3)):
                tokens = int(random.integers(2, 13))
                context = int(random.integers(1, tokens))
                how = {"name": f"p{index}", "context": context, "routes": True, "kept": True}
                segments.append(segment(first, tokens, **how))
                first += tokens
            answers.append(trajectory(*segments, sibling=sibling))
        rewards = np.arange(3) * float(random.random() > 0.3)
        kl_coef = 0.25 * float(random.random() > 0.5)
        result.append(scored(answers, rewards.tolist(), kl_coef=kl_coef))
    return result


def prompted_groups(seed: int) -> list[ScoredGroup]:
    """Draw groups of five answers with a common prompt of up to 60 tokens and otherwise unique ids.

    About one answer in six has a second segment.
    """
    random = np.random.default_rng(seed)
    result: list[ScoredGroup] = []
    first = 0
    for index in range(3):
        prefix = np.arange(first, first := first + int(random.integers(1, 60)), dtype=np.int32)
        answers: list[Trajectory] = []
        for sibling in range(5):
            segments: list[Segment] = []
            for _ in range(1 + (random.random() < 1 / 6)):
                own, context = int(random.integers(1, 30)), len(prefix)
                how = {"name": f"p{index}", "context": context, "routes": True, "kept": True}
                whole = segment(first - context, context + own, **how)
                first += own
                segments.append(with_prefix(whole, prefix))
            answers.append(trajectory(*segments, sibling=sibling))
        rewards = random.integers(0, 2, 5).tolist()
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


def as_stored(whole: Segment) -> Segment:
    """Store the recordings of a segment with one turn, as an engine does."""
    tokens, before = len(whole.token_ids_T), int(whole.trainable_T.argmax())
    routes, masks, selected = whole.routes_TLK, whole.sampling_mask, whole.selected_TLb
    recordings = Recordings(
        routes_TLK=None if routes is None else routes[:-1],
        sampling_mask=None if masks is None else masks.slice(before, tokens),
        selected_TLb=None if selected is None else selected[:-1],
    )
    stored = StoredRecordings.concat([(before, StoredRecordings.of(recordings, before))], tokens)
    return replace(whole, routes_TLK=None, sampling_mask=None, selected_TLb=None, stored=stored)


def with_segments(group: Group, change: Callable[[Segment], Segment]) -> Group:
    """Apply `change` to each segment of a group."""
    trajectories = [
        replace(one, segments=tuple(map(change, one.segments))) for one in group.trajectories
    ]
    return replace(group, trajectories=tuple(trajectories))


def segments_of(groups: Sequence[ScoredGroup]) -> list[Segment]:
    answers = [answer for group in groups for answer in group.group.trajectories]
    return [segment for answer in answers for segment in answer.segments]
