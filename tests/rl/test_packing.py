"""Packing keeps every token aligned with its data and does not change the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rl.buffer import split_updates
from keel.rl.packing import pack
from keel.rl.types import NO_ROUTE, ScoredGroup
from tests.rl.packed import fresh_table, gradient, micro_batches, oracle
from tests.rl.rollouts import (
    EXPERTS,
    LAYERS,
    finished,
    kept_of,
    logp_old_of,
    random_groups,
    scored,
    segment,
    trajectory,
)

SEEDS = st.integers(0, 2**31)


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.integers(1, 4), st.integers(1, 60))
def test_every_token_arrives_once_with_its_data(seed, ranks, capacity) -> None:
    groups = random_groups(seed)
    batches = pack(groups, ranks=ranks, micro_batch_tokens=capacity)
    expected = {
        int(first)
        for group in groups
        for answer in group.group.trajectories
        for s in answer.segments
        for first in s.token_ids_T
    }
    seen: list[int] = []
    for micro_batch in micro_batches(batches):
        if len(micro_batch.sequence_tokens_S) == 0:
            continue
        assert micro_batch.routes_NLK is not None
        assert micro_batch.sampling_mask is not None
        assert micro_batch.routes_NLK.dtype == np.int16
        last = np.append(np.diff(micro_batch.segment_N) != 0, True)
        for t, token in enumerate(micro_batch.token_ids_N.tolist()):
            sampled = bool(micro_batch.trainable_N[t])
            seen.append(token)
            assert micro_batch.logp_old_N[t] == np.float32(logp_old_of(token) if sampled else 0)
            assert micro_batch.sampling_mask[t].tolist() == (kept_of(token) if sampled else [])
            assert (micro_batch.routes_NLK[t] == (NO_ROUTE if last[t] else token % 8)).all()
    assert sorted(seen) == sorted(expected)


def with_losses(groups: Sequence[ScoredGroup], random: Random) -> list[ScoredGroup]:
    """Drop some or all trajectories of each group; the first group keeps at least one."""
    made: list[ScoredGroup] = []
    for index, group in enumerate(groups):
        size = len(group.rewards_G)
        kept = sorted(random.sample(range(size), random.randint(index == 0, size)))
        answers = [group.group.trajectories[i] for i in kept]
        coefficient = group.group.prompt.kl_coef
        made.append(scored(answers, [float(i) for i in kept], kl_coef=coefficient))
    return made


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.integers(1, 4), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_groups_have_equal_weight(seed, ranks, capacity, updates, skip) -> None:
    groups = with_losses(random_groups(seed), Random(seed))
    for part in split_updates(groups, updates):
        table = fresh_table()
        expected = oracle(part, table).loss
        expected.backward()
        packed = pack(part, ranks=ranks, micro_batch_tokens=capacity, skip_uniform_groups=skip)
        loss, actual = gradient(packed)
        assert table.grad is not None
        np.testing.assert_allclose(actual, table.grad, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5, atol=1e-9)
        batches = pack(part, ranks=ranks, micro_batch_tokens=capacity)
        weights = [
            float(weight) * np.count_nonzero(one.sequence_N[one.trainable_N] == index) / int(tokens)
            for one in micro_batches(batches)
            for index, (weight, tokens) in enumerate(
                zip(one.sequence_weight_S, one.sequence_tokens_S, strict=True)
            )
        ]
        assert sum(weights) == pytest.approx(batches[0].total_sequences)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 40), st.integers(1, 40))
def test_equal_groups_have_weight_one(groups, size) -> None:
    """Their loss is then bit-identical to one without weights."""
    answer = trajectory(segment())
    made = [scored([answer] * size, [0.0] * size) for _ in range(groups)]
    for batch in pack(made, ranks=1, micro_batch_tokens=10_000):
        for micro_batch in batch.micro_batches:
            assert (micro_batch.sequence_weight_S == 1).all()


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.integers(1, 4), st.integers(1, 60))
def test_trajectories_stay_whole_within_capacity(seed, ranks, capacity) -> None:
    groups = random_groups(seed)
    batches = pack(groups, ranks=ranks, micro_batch_tokens=capacity)
    assert len(batches) == ranks
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    assert len({len(batch.scored_first) for batch in batches}) == 1
    assert {batch.total_sequences for batch in batches} == {12}
    owner = {
        int(token): (index, float(advantage), group.group.prompt.kl_coef, answer.sampled_tokens)
        for group in groups
        for index, (answer, advantage) in enumerate(
            zip(group.group.trajectories, group.advantages_G, strict=True), id(group)
        )
        for s in answer.segments
        for token in s.token_ids_T
    }
    pieces: dict[int, list[int]] = {}
    for one in micro_batches(batches):
        for index, tokens in enumerate(one.sequence_tokens_S):
            mine = one.sequence_N == index
            (who,) = {owner[int(token)] for token in one.token_ids_N[mine]}
            assert who[1:] == (one.advantage_N[mine][0], one.kl_coef_N[mine][-1], tokens)
            split = one.split_S is not None and one.split_S[index] >= 0
            pieces.setdefault(who[0], []).append(int(mine.sum()) if split else 0)
        alone = len(set(one.segment_N.tolist())) == 1
        assert alone or len(one.token_ids_N) <= capacity
    for sizes in pieces.values():
        assert sizes == [0] or (len(sizes) > 1 and sum(sizes) > capacity)
    assert batches[0].split_sequences == sum(sizes != [0] for sizes in pieces.values())


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.integers(1, 5), st.integers(1, 80), st.booleans())
def test_packing_does_not_change_the_gradient(seed, ranks, capacity, skip) -> None:
    groups = random_groups(seed)
    loss, expected = gradient(pack(groups, ranks=1, micro_batch_tokens=10**6))
    batches = pack(groups, ranks=ranks, micro_batch_tokens=capacity, skip_uniform_groups=skip)
    found_loss, actual = gradient(batches)
    assert found_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(actual, expected)
    assert expected.any() or not any(g.advantages_G.any() for g in groups)


def test_skipping_omits_only_idle_groups() -> None:
    def group(first: int, rewards: list[float], kl_coef: float) -> ScoredGroup:
        both = [trajectory(segment(first + 4 * i), sibling=i) for i in range(2)]
        return scored(both, rewards, kl_coef=kl_coef)

    groups = [group(0, [1, 1], 0.0), group(10, [1, 1], 0.1), group(20, [0, 1], 0.0)]
    (batch,) = pack(groups, ranks=1, micro_batch_tokens=100, skip_uniform_groups=True)
    assert min(batch.micro_batches[0].token_ids_N) == 10
    assert len(batch.micro_batches[0].sequence_tokens_S) == 4
    assert batch.total_sequences == 6
    assert gradient([batch])[1][20:28].any()

    batches = pack(groups[:1], ranks=2, micro_batch_tokens=100, skip_uniform_groups=True)
    assert [len(b.micro_batches) for b in batches] == [1, 1]
    assert gradient(batches)[0] == 0


def test_signal() -> None:
    uniform = scored([trajectory(segment(4 * i), sibling=i) for i in range(2)], [1, 1])
    better = scored([trajectory(segment(8 + 4 * i), sibling=i) for i in range(2)], [0, 1])
    for groups, signal in (([uniform, scored([], [])], False), ([uniform, better], True)):
        (batch,) = pack(groups, ranks=1, micro_batch_tokens=100)
        assert batch.signal is signal


def test_idle_ranks_get_padding_with_zero_loss() -> None:
    group = scored([trajectory(segment(0, 9, routes=True, kept=True))], [1.0], kl_coef=0.1)
    batches = pack([group], ranks=3, micro_batch_tokens=4)
    assert [len(b.micro_batches) for b in batches] == [1, 1, 1]
    (padding,) = batches[2].micro_batches
    assert len(padding.token_ids_N) == 1
    assert len(padding.sequence_tokens_S) == 0
    assert not padding.trainable_N.any()
    assert padding.routes_NLK is not None
    assert padding.routes_NLK.shape == (1, LAYERS, EXPERTS)
    assert (padding.routes_NLK == NO_ROUTE).all()
    assert padding.sampling_mask is not None
    assert padding.sampling_mask.sizes().tolist() == [0]
    loss, grad = gradient([batches[2]])
    assert loss == 0
    assert not grad.any()


def test_positions_and_segments() -> None:
    two = trajectory(segment(0, 3), segment(10, 2))
    (batch,) = pack(
        [scored([two, trajectory(segment(20, 2), sibling=1)], [0, 1])],
        ranks=1,
        micro_batch_tokens=50,
    )
    (micro_batch,) = batch.micro_batches
    assert micro_batch.token_ids_N.tolist() == [0, 1, 2, 10, 11, 20, 21]
    assert micro_batch.position_N.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert micro_batch.segment_N.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert micro_batch.sequence_N.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert micro_batch.sequence_tokens_S.tolist() == [3, 1]
    assert micro_batch.routes_NLK is None
    assert micro_batch.sampling_mask is None


@pytest.mark.parametrize("count", range(1, 14))
def test_idle_groups_are_spread_over_updates(count: int) -> None:
    same = finished("same", (1.0, 1.0))
    taught = [finished(f"g{index}") for index in range(count)]
    assert same.idle and not any(group.idle for group in taught)
    for idle, updates in product(range(14), range(1, 9)):
        parts = split_updates([same] * idle + taught, updates)
        assert len(parts) == min(updates, count)
        sizes = [len(part) for part in parts]
        assert sum(sizes) == count + idle and max(sizes) - min(sizes) <= 1
        teaching = [sum(not group.idle for group in part) for part in parts]
        assert min(teaching) >= 1 and max(teaching) - min(teaching) <= 1
    assert split_updates([same] * 2, 3) == [[same] * 2]


def test_empty_groups_make_no_updates() -> None:
    first, second = random_groups(0, groups=2)
    lost = scored([], [], dropped=("late",))
    assert split_updates([lost, first, lost, second], 3) == [[first], [second]]
    assert split_updates([lost], 2) == []
