"""Shared prefixes are packed once and do not change the gradient."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rl.packing import MicroBatch, pack
from keel.rl.packing.prefix_sharing import KV_COPIES_PER_TOKEN, estimate_packing
from keel.rl.types import NO_ROUTE, ScoredGroup, Segment
from tests.rl.packed import gradient, micro_batches
from tests.rl.rollouts import (
    kept_of,
    logp_old_of,
    prompted_groups,
    scored,
    segment,
    trajectory,
    with_prefix,
)

SEEDS = st.integers(0, 2**31)


def contexts_of(batch: MicroBatch) -> list[list[int]]:
    """Return the rows of each context, prefix included."""
    count = int(batch.segment_N[-1]) + 1
    rows = [np.flatnonzero(batch.segment_N == number) for number in range(count)]
    follows = np.full(count, -1) if batch.follows is None else batch.follows
    return [
        [*(rows[first] if first >= 0 else []), *rows[number]]
        for number, first in enumerate(follows)
        if number not in follows
    ]


def segments_of(groups: list[ScoredGroup]) -> list[Segment]:
    return [
        segment
        for group in groups
        for answer in group.group.trajectories
        for segment in answer.segments
    ]


@settings(deadline=None, max_examples=20)
@given(SEEDS, st.integers(1, 4), st.integers(1, 400))
def test_every_context_is_packed_once(seed: int, ranks: int, capacity: int) -> None:
    groups = prompted_groups(seed)
    batches = pack(groups, ranks=ranks, micro_batch_tokens=capacity, share_prompts=True)
    actual: list[tuple[int, ...]] = []
    for batch in micro_batches(batches):
        if not len(batch.sequence_tokens_S):
            continue
        for rows in contexts_of(batch):
            assert batch.position_N[rows].tolist() == list(range(len(rows)))
            actual.append(tuple(batch.token_ids_N[rows].tolist()))
            for place, row in enumerate(rows):
                token, sampled = int(batch.token_ids_N[row]), bool(batch.trainable_N[row])
                assert batch.logp_old_N[row] == np.float32(logp_old_of(token) if sampled else 0)
                assert batch.sampling_mask[row].tolist() == (kept_of(token) if sampled else [])
                expected = NO_ROUTE if place == len(rows) - 1 else token % 8
                assert (batch.routes_NLK[row] == expected).all()
    assert sorted(actual) == sorted(tuple(one.token_ids_T.tolist()) for one in segments_of(groups))


@settings(deadline=None, max_examples=20)
@given(SEEDS, st.integers(1, 4), st.integers(1, 400))
def test_capacity_includes_key_value_copies(seed: int, ranks: int, capacity: int) -> None:
    """Sharing also never packs more tokens than no sharing."""
    groups = prompted_groups(seed)
    plain, shared = (
        micro_batches(pack(groups, ranks=ranks, micro_batch_tokens=capacity, share_prompts=on))
        for on in (False, True)
    )
    for batch in shared:
        contexts = contexts_of(batch)
        copied = sum(map(len, contexts)) - len(batch.token_ids_N)
        if len(contexts) > 1 and batch.split_S is None and len(batch.sequence_tokens_S) > 1:
            assert len(batch.token_ids_N) + copied // KV_COPIES_PER_TOKEN <= capacity
    assert sum(len(b.token_ids_N) for b in shared) <= sum(len(b.token_ids_N) for b in plain)


@settings(deadline=None, max_examples=12)
@given(SEEDS, st.integers(1, 3), st.integers(20, 400))
def test_sharing_does_not_change_the_gradient(seed: int, ranks: int, capacity: int) -> None:
    groups = prompted_groups(seed)
    (loss, plain), (other, shared) = (
        gradient(pack(groups, ranks=ranks, micro_batch_tokens=capacity, share_prompts=on))
        for on in (False, True)
    )
    assert other == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(shared.numpy(), plain.numpy(), atol=1e-12)


def same_prompt(*, own: int = 10, prompt: int = 40, size: int = 4, **fields: Any) -> list[Segment]:
    prefix = np.arange(1000, 1000 + prompt, dtype=np.int32)
    return [
        with_prefix(segment(100 * i, prompt + own, context=prompt, **fields), prefix)
        for i in range(size)
    ]


def packed(segments: list[Segment], **options: Any) -> list[MicroBatch]:
    answers = [trajectory(one, sibling=i) for i, one in enumerate(segments)]
    group = scored(answers, [float(i % 2) for i in range(len(segments))])
    options = {"ranks": 1, "micro_batch_tokens": 400, "share_prompts": True, **options}
    return micro_batches(pack([group], **options))


def test_prefix_excludes_the_last_prompt_token() -> None:
    (batch,) = packed(same_prompt())
    assert np.bincount(batch.segment_N).tolist() == [39, 11, 11, 11, 11]
    assert batch.follows is not None and batch.follows.tolist() == [-1, 0, 0, 0, 0]
    assert batch.sequence_N[np.flatnonzero(batch.trainable_N)].tolist() == [
        i for i in range(4) for _ in range(10)
    ]


def changed(one: Segment, what: str, at: int) -> Segment:
    """Change the segment from position `at`: a token, an expert or the first sampled token."""
    if what == "token":
        ids = one.token_ids_T.copy()
        ids[at] += 1
        return replace(one, token_ids_T=ids)
    if what == "route":
        routes_TLK = one.routes_TLK.copy()
        routes_TLK[at, -1] += 1
        return replace(one, routes_TLK=routes_TLK)
    return replace(one, trainable_T=np.arange(len(one.token_ids_T)) > at)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("what", ["token", "route", "sampled"])
def test_prefix_ends_at_the_first_difference(what: str, place: int) -> None:
    """A late difference shortens the prefix; an early one excludes the segment."""
    for at, lengths in ((33, [33, 17, 17, 17, 17]), (25, [11, 11, 11, 39, 50])):
        segments = same_prompt(routes=True)
        segments[place] = changed(segments[place], what, at)
        (batch,) = packed(segments)
        assert sorted(np.bincount(batch.segment_N)) == sorted(lengths)


def test_two_kinds_of_routes_form_two_clusters() -> None:
    """As sampled by two engines or weight versions."""
    one, other = same_prompt(routes=True, size=6), same_prompt(routes=True, size=6)
    mixed = [changed(other[i], "route", 3) if i % 2 else one[i] for i in range(6)]
    (batch,) = packed(mixed)
    assert sorted(np.bincount(batch.segment_N)) == [11] * 6 + [39, 39]
    assert len(contexts_of(batch)) == 6


def test_recorded_selections_prevent_sharing() -> None:
    chosen = np.full((50, 2, 3), -1, np.int32)
    (batch,) = packed([replace(one, selected_TLk=chosen) for one in same_prompt()])
    assert batch.follows is None


def test_invalid_follows_are_refused() -> None:
    (batch,) = packed(same_prompt())
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    for follows, message in (
        ([-1, 0, 0, 0], "follows"),
        ([-1, 0, 2, 0, 0], "follows"),
        ([-1, 0, 0, 1, 0], "follows"),
        ([-1, -1, 0, 0, 0], "position_N"),
    ):
        with pytest.raises(ValueError, match=message):
            MicroBatch(**{**fields, "follows": np.array(follows)})


@pytest.mark.parametrize(
    ("groups", "size", "shared", "own", "ranks", "capacity"),
    [
        (8, 8, 800, 896, 1, 18_656),
        (8, 8, 800, 896, 2, 4_000),
        (16, 16, 64, 500, 4, 3_000),
        (2, 8, 200, 100, 8, 4_000),  # fewer groups than ranks
        (3, 2, 100, 100, 4, 150),  # longer than a micro-batch
        (4, 8, 0, 900, 2, 2_000),  # no sharing
    ],
)
def test_estimate_packing_matches_pack(
    groups: int, size: int, shared: int, own: int, ranks: int, capacity: int
) -> None:
    scored_groups: list[ScoredGroup] = []
    for number in range(groups):
        prefix = np.arange(shared, dtype=np.int32) + 10_000 * number
        group = [
            trajectory(
                with_prefix(
                    segment(200_000 * answer, shared + own, context=max(1, shared)), prefix
                ),
                sibling=answer,
            )
            for answer in range(1, size + 1)
        ]
        scored_groups.append(scored(group, [*range(size)]))
    batches = pack(
        scored_groups, ranks=ranks, micro_batch_tokens=capacity, share_prompts=shared > 0
    )
    count, tokens = estimate_packing(
        groups, size, shared=shared, own=own, ranks=ranks, capacity=capacity
    )
    assert len(batches[0].micro_batches) == count
    slowest = max(sum(len(one.token_ids_N) for one in batch.micro_batches) for batch in batches)
    assert slowest == pytest.approx(tokens, rel=0.005)
