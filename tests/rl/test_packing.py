"""Packing keeps tokens aligned with their data, is balanced, and does not change the gradient."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.rl import prefix_sharing
from keel.rl.packing import MicroBatch, TrainBatch, split_optimizer_steps
from keel.rl.recordings import NO_ROUTE
from keel.rl.types import ScoredGroup, Segment
from tests.rl.packed import fresh_table, gradient, micro_batches, oracle, pack
from tests.rl.rollouts import (
    EXPERTS,
    LAYERS,
    finished,
    kept_of,
    logp_old_of,
    random_groups,
    scored,
    segment,
    segments_of,
    trajectory,
)

SEEDS = st.integers(0, 2**31)


@given(SEEDS, st.integers(1, 4), st.integers(1, 60))
def test_every_token_arrives_once_with_its_data(seed, replicas, capacity) -> None:
    groups = random_groups(seed)
    batches = pack(groups, replicas=replicas, micro_batch_tokens=capacity)
    expected = {int(token) for one in segments_of(groups) for token in one.token_ids_T}
    seen: list[int] = []
    for micro_batch in micro_batches(batches):
        if len(micro_batch.sequence_tokens_S) == 0:
            continue
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


@given(SEEDS, st.integers(1, 4), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_groups_have_equal_weight(seed, replicas, capacity, updates, skip) -> None:
    groups = with_losses(random_groups(seed), Random(seed))
    for part in split_optimizer_steps(groups, updates):
        table = fresh_table()
        expected = oracle(part, table).loss
        expected.backward()
        packed = pack(
            part, replicas=replicas, micro_batch_tokens=capacity, skip_uniform_groups=skip
        )
        loss, actual = gradient(packed)
        np.testing.assert_allclose(actual, table.grad, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5, atol=1e-9)
        batches = pack(part, replicas=replicas, micro_batch_tokens=capacity)
        weights = [
            (one.sequence_weight_S / one.sequence_tokens_S)[one.sequence_N[one.trainable_N]].sum()
            for one in micro_batches(batches)
        ]
        assert sum(weights) == pytest.approx(batches[0].total_sequences)


@given(SEEDS, st.integers(1, 4), st.integers(1, 60))
def test_trajectories_stay_whole_within_capacity(seed, replicas, capacity) -> None:
    groups = random_groups(seed)
    batches = pack(groups, replicas=replicas, micro_batch_tokens=capacity)
    assert len(batches) == replicas
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    assert len({len(batch.mask_pass) for batch in batches}) == 1
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


def test_skipping_omits_only_idle_groups() -> None:
    def group(first: int, rewards: list[float], kl_coef: float) -> ScoredGroup:
        both = [trajectory(segment(first + 4 * i), sibling=i) for i in range(2)]
        return scored(both, rewards, kl_coef=kl_coef)

    groups = [group(0, [1, 1], 0.0), group(10, [1, 1], 0.1), group(20, [0, 1], 0.0)]
    (batch,) = pack(groups, replicas=1, micro_batch_tokens=100, skip_uniform_groups=True)
    assert min(batch.micro_batches[0].token_ids_N) == 10
    assert len(batch.micro_batches[0].sequence_tokens_S) == 4
    assert batch.total_sequences == 6
    assert gradient([batch])[1][20:28].any()

    batches = pack(groups[:1], replicas=2, micro_batch_tokens=100, skip_uniform_groups=True)
    assert [len(b.micro_batches) for b in batches] == [1, 1]
    assert gradient(batches)[0] == 0


def test_signal() -> None:
    uniform = scored([trajectory(segment(4 * i), sibling=i) for i in range(2)], [1, 1])
    better = scored([trajectory(segment(8 + 4 * i), sibling=i) for i in range(2)], [0, 1])
    for groups, signal in (([uniform, scored([], [])], False), ([uniform, better], True)):
        (batch,) = pack(groups, replicas=1, micro_batch_tokens=100)
        assert batch.signal is signal


def test_idle_replicas_get_padding_with_zero_loss() -> None:
    group = scored([trajectory(segment(0, 9, routes=True, kept=True))], [1.0], kl_coef=0.1)
    batches = pack([group], replicas=3, micro_batch_tokens=4)
    assert [len(b.micro_batches) for b in batches] == [1, 1, 1]
    (padding,) = batches[2].micro_batches
    assert len(padding.token_ids_N) == 1
    assert len(padding.sequence_tokens_S) == 0
    assert not padding.trainable_N.any()
    assert padding.routes_NLK.tolist() == [[[NO_ROUTE] * EXPERTS] * LAYERS]
    assert padding.sampling_mask.sizes().tolist() == [0]
    loss, grad = gradient([batches[2]])
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 13])
def test_idle_groups_are_spread_over_updates(count: int) -> None:
    same = finished("same", (1.0, 1.0))
    taught = [finished(f"g{index}") for index in range(count)]
    assert same.idle and not any(group.idle for group in taught)
    for idle, updates in product(range(14), range(1, 9)):
        parts = split_optimizer_steps([same] * idle + taught, updates)
        assert len(parts) == min(updates, count)
        sizes = [len(part) for part in parts]
        assert sum(sizes) == count + idle and max(sizes) - min(sizes) <= 1
        with_signal = [sum(not group.idle for group in part) for part in parts]
        assert min(with_signal) >= 1 and max(with_signal) - min(with_signal) <= 1
    assert split_optimizer_steps([same] * 2, 3) == [[same] * 2]


def test_empty_groups_make_no_updates() -> None:
    first, second = random_groups(0, groups=2)
    lost = scored([], [], dropped=("late",))
    assert split_optimizer_steps([lost, first, lost, second], 3) == [[first], [second]]
    assert split_optimizer_steps([lost], 2) == []


def balance(tokens: list[int], *, replicas: int, capacity: int) -> list[list[list[int]]]:
    groups: Any = [SimpleNamespace(tokens=count, size=count) for count in tokens]
    return prefix_sharing._balance(groups, replicas, capacity)


def test_balance_is_even() -> None:
    random = np.random.default_rng(0)
    tokens = random.lognormal(6, 0.8, 512).astype(int).clip(1, 4096).tolist()
    plan = balance(tokens, replicas=8, capacity=8192)
    loads = np.array([[sum(tokens[i] for i in chosen) for chosen in bins] for bins in plan])
    assert loads.shape[1] == -(-sum(tokens) // (8 * 8192))
    assert np.ptp(loads.sum(1)) < 0.01 * loads.sum(1).mean()
    assert np.ptp(loads, axis=0).max() < 0.05 * loads.mean()


def test_uneven_bins_alternate_over_replicas() -> None:
    plan = balance([10, 9, 8, 7], replicas=2, capacity=10)
    assert plan == [[[0], [3]], [[1], [2]]]


def test_full_and_oversized_bins() -> None:
    assert balance([6, 4], replicas=1, capacity=10) == [[[0, 1]]]
    assert balance([3, 100, 3, 3], replicas=1, capacity=10) == [[[1], [0, 2, 3]]]


def recorded(first: int, tokens: int, width: int) -> Segment:
    """Build a segment whose bitmaps repeat the token id, to expose misalignment."""
    plain = segment(first, tokens)
    rows = np.tile(plain.token_ids_T[:, None, None], (1, 2, width)).astype(np.uint8)
    return replace(plain, selected_TLb=rows)


def test_selections_stay_aligned_and_padded() -> None:
    longer, shorter, none = recorded(10, 6, 4), recorded(30, 5, 3), segment(50, 3)
    group = scored([trajectory(longer, none), trajectory(shorter, sibling=1)], [1.0, 0.0])
    for capacity in (100, 9):
        batches = pack([group], replicas=1, micro_batch_tokens=capacity)
        seen = 0
        for row in batches[0].micro_batches:
            assert row.selected_NLb.shape == (len(row.token_ids_N), 2, 4)
            for token, rows in zip(row.token_ids_N, row.selected_NLb, strict=True):
                width = 4 if token < 30 else 3 if token < 50 else 0
                assert (rows[:, :width] == token).all() and (rows[:, width:] == 0).all()
                seen += 1
        assert seen == batches[0].total_tokens == 14
    (plain,) = pack([scored([trajectory(none)], [1.0])], replicas=1, micro_batch_tokens=9)
    assert plain.micro_batches[0].selected_NLb is None


def test_invalid_selections_are_refused() -> None:
    one = recorded(0, 4, 2)
    other = replace(one, selected_TLb=np.zeros((4, 3, 2), np.uint8))
    group = scored([trajectory(one), trajectory(other, sibling=1)], [1.0, 0.0])
    with pytest.raises(ValueError, match="selected_TLb"):
        pack([group], replicas=1, micro_batch_tokens=9)
    for shape in ((3, 2, 2), (4, 2)):
        with pytest.raises(ValueError, match="selected_TLb"):
            replace(one, selected_TLb=np.zeros(shape, np.uint8))


def test_invalid_arguments_are_named() -> None:
    for knob in ("replicas", "micro_batch_tokens"):
        with pytest.raises(ValueError, match=knob):
            pack(random_groups(0), **{"replicas": 1, "micro_batch_tokens": 8, knob: 0})
    with pytest.raises(ValueError, match="trajectory"):
        pack([scored([], [], dropped=("late",))], replicas=1, micro_batch_tokens=8)


def test_missing_or_different_routes_name_the_prompt() -> None:
    recorded = segment(routes=True, name="yes")
    missing = segment(10, name="odd")
    narrow = replace(missing, routes_TLK=recorded.routes_TLK[:, :1])
    for other in (missing, narrow):
        both = [trajectory(recorded), trajectory(other)]
        with pytest.raises(ValueError, match=r"segment of odd: routes_TLK"):
            pack([scored(both, [0, 1])], replicas=1, micro_batch_tokens=8)
    groups = [scored([trajectory(missing)], [1.0]), scored([trajectory(recorded)], [1.0])]
    with pytest.raises(ValueError, match=r"segment of odd: routes_TLK"):
        pack(groups, replicas=1, micro_batch_tokens=8)


GOOD: dict[str, Any] = {
    "token_ids_N": np.arange(5, dtype=np.int32),
    "position_N": np.array([0, 1, 2, 0, 1], np.int32),
    "segment_N": np.array([0, 0, 0, 1, 1], np.int32),
    "sequence_N": np.array([0, 0, 0, 1, 1], np.int64),
    "trainable_N": np.array([False, True, True, False, True]),
    "logp_old_N": np.zeros(5, np.float32),
    "advantage_N": np.array([1, 1, 1, -1, -1], np.float32),
    "kl_coef_N": np.zeros(5, np.float32),
    "sequence_tokens_S": np.array([2, 1], np.int64),
    "sequence_weight_S": np.ones(2, np.float32),
}
EMPTY = {name: values[:0] for name, values in GOOD.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp_old_N": np.zeros(4, np.float32)}, "logp_old_N"),
        ({"routes_NLK": np.zeros((4, 1, 1), np.int16)}, "routes_NLK"),
        ({"position_N": np.arange(5, dtype=np.int32)}, "position_N"),
        ({"trainable_N": np.ones(5, np.bool_)}, "trainable_N"),
        ({"sequence_N": np.array([0, 0, 0, 2, 2])}, "sequence_N"),
        ({"sequence_tokens_S": np.array([1, 1])}, "sequence_tokens_S"),
        ({"sequence_tokens_S": np.array([2, 2])}, "split_S"),
        ({"split_S": np.array([-1])}, "split_S"),
        ({"sequence_weight_S": np.zeros(2, np.float32)}, "sequence_weight_S"),
        ({"advantage_N": np.array([1, 1, 2, 0, 0], np.float32)}, "advantage_N"),
        ({"kl_coef_N": np.array([0, 0, 1, 0, 0], np.float32)}, "kl_coef_N"),
        ({"kl_coef_N": np.full(5, -1, np.float32)}, "kl_coef_N"),
        (EMPTY, "no tokens"),
    ],
)
def test_invalid_micro_batches_name_the_field(change: dict[str, Any], message: str) -> None:
    MicroBatch(**GOOD)
    with pytest.raises(ValueError, match=message):
        MicroBatch(**{**GOOD, **change})


def test_invalid_train_batches_name_the_field() -> None:
    micro_batch = MicroBatch(**GOOD)
    TrainBatch(micro_batches=(micro_batch,), total_sequences=2)
    with pytest.raises(ValueError, match="total_sequences"):
        TrainBatch(micro_batches=(micro_batch,), total_sequences=1)
    split = MicroBatch(**{**GOOD, "split_S": np.array([-1, 1])})
    TrainBatch(micro_batches=(split, split), total_sequences=3, split_sequences=2)
    with pytest.raises(ValueError, match="total_sequences"):
        TrainBatch(micro_batches=(split, split), total_sequences=2, split_sequences=2)
    with pytest.raises(ValueError, match="split_sequences"):
        TrainBatch(micro_batches=(split,), total_sequences=3, split_sequences=1)
    with pytest.raises(ValueError, match="micro_batches"):
        TrainBatch(micro_batches=(), total_sequences=1)
