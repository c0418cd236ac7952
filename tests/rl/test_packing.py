"""Packing: nothing is lost, shifted, torn apart or counted twice, nor is the gradient changed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.rl.losses import grpo_loss
from keel.rl.packing import MicroBatch, TrainBatch, balance, pack, split_updates
from keel.rl.types import NO_ROUTE, ScoredGroup
from tests.rl.reference_grpo import Answer, Token, reference_grpo
from tests.rl.rollouts import (
    EXPERTS,
    LAYERS,
    kept_of,
    logp_old_of,
    random_groups,
    scored,
    segment,
    trajectory,
)

SEEDS = st.integers(0, 2**31)


def micro_batches(batches: Sequence[TrainBatch]) -> list[MicroBatch]:
    return [micro_batch for batch in batches for micro_batch in batch.micro_batches]


def gradient(batches: Sequence[TrainBatch]) -> tuple[float, Tensor]:
    """Loss and gradient of a policy that is a table of logits by token id, under every term of the
    loss."""
    table = torch.linspace(-1, 1, 1000, dtype=torch.float64).sin().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for micro_batch in batch.micro_batches:
            rows = torch.from_numpy(np.flatnonzero(micro_batch.trainable_N))
            ids = torch.from_numpy(micro_batch.token_ids_N).long()[rows]
            total = (
                total
                + grpo_loss(
                    -table[ids].exp(),
                    torch.from_numpy(micro_batch.logp_old_N)[rows],
                    torch.from_numpy(micro_batch.advantage_N)[rows],
                    torch.from_numpy(micro_batch.sequence_N)[rows],
                    sequence_tokens=torch.from_numpy(micro_batch.sequence_tokens_S),
                    total_sequences=batch.total_sequences,
                    sequence_weight=torch.from_numpy(micro_batch.sequence_weight_S),
                    logp_ref=torch.full((len(rows),), -1.0),
                    kl_coef=torch.from_numpy(micro_batch.kl_coef_N)[rows],
                    mask_delta=0.5,
                ).loss
            )
    total.backward()
    assert table.grad is not None
    return total.item(), table.grad


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.integers(1, 4), st.integers(1, 60))
def test_every_token_arrives_once_with_all_that_was_recorded_of_it(seed, ranks, capacity) -> None:
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
        assert micro_batch.kept is not None
        assert micro_batch.routes_NLK.dtype == np.int16
        last = np.append(np.diff(micro_batch.segment_N) != 0, True)
        for t, token in enumerate(micro_batch.token_ids_N.tolist()):
            sampled = bool(micro_batch.trainable_N[t])
            seen.append(token)
            assert micro_batch.logp_old_N[t] == np.float32(logp_old_of(token) if sampled else 0)
            assert micro_batch.kept[t].tolist() == (kept_of(token) if sampled else [])
            assert (micro_batch.routes_NLK[t] == (NO_ROUTE if last[t] else token % 8)).all()
    assert sorted(seen) == sorted(expected)


def thinned(groups: Sequence[ScoredGroup], random: Random) -> list[ScoredGroup]:
    """Groups that have lost some of their trajectories, or all; the first keeps one at least."""
    made: list[ScoredGroup] = []
    for index, group in enumerate(groups):
        size = len(group.rewards_G)
        kept = sorted(random.sample(range(size), random.randint(index == 0, size)))
        answers = [group.group.trajectories[i] for i in kept]
        coefficient = group.group.prompt.kl_coef
        made.append(scored(answers, [float(i) for i in kept], kl_coef=coefficient))
    return made


def oracle(groups: Sequence[ScoredGroup], table: Tensor) -> Tensor:
    """The loss of the policy of `gradient`, from the definition alone."""
    answers: list[Answer] = []
    owners: list[int] = []
    for index, group in enumerate(groups):
        for answer, advantage in zip(group.group.trajectories, group.advantages_G, strict=True):
            tokens = [
                Token(
                    logp=-table[int(segment.token_ids_T[t])].exp(),
                    logp_old=float(segment.logp_old_T[t]),
                    logp_ref=-1.0,
                    kl_coef=group.group.prompt.kl_coef,
                )
                for segment in answer.segments
                for t in np.flatnonzero(segment.trainable_T)
            ]
            answers.append(Answer(tokens=tokens, advantage=float(advantage)))
            owners.append(index)
    return reference_grpo(answers, groups=owners, mask_delta=0.5).loss


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.integers(1, 4), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_each_group_counts_alike_over_ranks_micro_batches_and_updates(
    seed, ranks, capacity, updates, skip
) -> None:
    groups = thinned(random_groups(seed), Random(seed))
    for part in split_updates(groups, updates):
        table = torch.linspace(-1, 1, 1000, dtype=torch.float64).sin().requires_grad_()
        expected = oracle(part, table)
        expected.backward()
        packed = pack(part, ranks=ranks, micro_batch_tokens=capacity, skip_uniform_groups=skip)
        loss, found = gradient(packed)
        assert table.grad is not None
        np.testing.assert_allclose(found, table.grad, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5, atol=1e-9)
        batches = pack(part, ranks=ranks, micro_batch_tokens=capacity)
        weights = [w for one in micro_batches(batches) for w in one.sequence_weight_S.tolist()]
        assert sum(weights) == pytest.approx(batches[0].total_sequences)


def test_a_lone_survivor_counts_as_a_group_and_has_no_advantage() -> None:
    """Of 4 + 1 trajectories it has half of the weight; a group that lost all has none."""
    whole = random_groups(1, groups=1, size=4, uniform=0.0)[0]
    alone = thinned(random_groups(2, groups=1, size=1), Random(0))[0]
    gone = scored([], [])
    assert alone.advantages_G.tolist() == [0.0]
    (batch,) = pack([whole, gone, alone], ranks=1, micro_batch_tokens=10_000)
    (micro_batch,) = batch.micro_batches
    assert sorted(micro_batch.sequence_weight_S.tolist()) == [0.625] * 4 + [2.5]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40))
def test_equal_groups_have_a_weight_of_exactly_one(groups, size) -> None:
    """So that their loss has the bits that it had without weights."""
    answer = trajectory(segment())
    made = [scored([answer] * size, [0.0] * size) for _ in range(groups)]
    for batch in pack(made, ranks=1, micro_batch_tokens=10_000):
        for micro_batch in batch.micro_batches:
            assert (micro_batch.sequence_weight_S == 1).all()


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.integers(1, 4), st.integers(1, 60))
def test_trajectories_stay_whole_and_micro_batches_within_bounds(seed, ranks, capacity) -> None:
    groups = random_groups(seed)
    batches = pack(groups, ranks=ranks, micro_batch_tokens=capacity)
    assert len(batches) == ranks
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    assert {batch.total_sequences for batch in batches} == {12}
    packed = {
        tuple(micro_batch.token_ids_N[micro_batch.sequence_N == index].tolist()): (
            float(micro_batch.advantage_N[micro_batch.sequence_N == index][0]),
            float(micro_batch.kl_coef_N[micro_batch.sequence_N == index][-1]),
            int(tokens),
        )
        for micro_batch in micro_batches(batches)
        for index, tokens in enumerate(micro_batch.sequence_tokens_S)
    }
    assert packed == {
        tuple(int(t) for s in answer.segments for t in s.token_ids_T): (
            float(advantage),
            group.group.prompt.kl_coef,
            answer.sampled_tokens,
        )
        for group in groups
        for answer, advantage in zip(group.group.trajectories, group.advantages_G, strict=True)
    }
    for micro_batch in micro_batches(batches):
        alone = len(micro_batch.sequence_tokens_S) <= 1
        assert alone or len(micro_batch.token_ids_N) <= capacity


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.integers(1, 5), st.integers(1, 80), st.booleans())
def test_ranks_capacity_and_skipping_do_not_change_the_gradient(
    seed, ranks, capacity, skip
) -> None:
    groups = random_groups(seed)
    loss, expected = gradient(pack(groups, ranks=1, micro_batch_tokens=10**6))
    batches = pack(groups, ranks=ranks, micro_batch_tokens=capacity, skip_uniform_groups=skip)
    found_loss, found = gradient(batches)
    assert found_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(found, expected)
    assert expected.any() or not any(g.advantages_G.any() for g in groups)


def test_skipping_leaves_out_only_groups_that_teach_nothing() -> None:
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


def test_ranks_without_work_get_padding_that_the_loss_survives() -> None:
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
    assert padding.kept is not None
    assert padding.kept.sizes().tolist() == [0]
    loss, grad = gradient([batches[2]])
    assert loss == 0
    assert not grad.any()


def test_packing_twice_gives_the_same_batches() -> None:
    first, second = (pack(random_groups(7), ranks=2, micro_batch_tokens=30) for _ in range(2))
    for a, b in zip(micro_batches(first), micro_batches(second), strict=True):
        assert a.token_ids_N.tolist() == b.token_ids_N.tolist()
        assert a.sequence_N.tolist() == b.sequence_N.tolist()


def test_positions_and_segments_count_from_zero() -> None:
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
    assert micro_batch.kept is None


# --- balance --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 4), st.integers(1, 100))
def test_balance_places_every_item_once(tokens, ranks, capacity) -> None:
    plan = balance(tokens, ranks=ranks, capacity=capacity)
    assert len(plan) == ranks
    assert len({len(bins) for bins in plan}) == 1
    placed = [item for bins in plan for chosen in bins for item in chosen]
    assert sorted(placed) == list(range(len(tokens)))
    for chosen in (chosen for bins in plan for chosen in bins):
        assert len(chosen) <= 1 or sum(tokens[i] for i in chosen) <= capacity


def test_balance_is_even_over_ranks_and_over_each_micro_batch() -> None:
    random = np.random.default_rng(0)
    tokens = random.lognormal(6, 0.8, 512).astype(int).clip(1, 4096).tolist()
    plan = balance(tokens, ranks=8, capacity=8192)
    loads = np.array([[sum(tokens[i] for i in chosen) for chosen in bins] for bins in plan])
    assert loads.shape[1] == -(-sum(tokens) // (8 * 8192))
    assert np.ptp(loads.sum(1)) < 0.01 * loads.sum(1).mean()
    assert np.ptp(loads, axis=0).max() < 0.05 * loads.mean()


def test_balance_deals_uneven_bins_back_and_forth() -> None:
    plan = balance([10, 9, 8, 7], ranks=2, capacity=10)
    assert plan == [[[0], [3]], [[1], [2]]]


def test_a_micro_batch_may_be_full_to_the_last_token() -> None:
    assert balance([6, 4], ranks=1, capacity=10) == [[[0, 1]]]


def test_a_long_trajectory_sits_alone() -> None:
    assert balance([3, 100, 3, 3], ranks=1, capacity=10) == [[[1], [0, 2, 3]]]


# --- optimizer steps ------------------------------------------------------------------------------


def test_updates_are_contiguous_and_even() -> None:
    groups = random_groups(0, groups=7)
    parts = split_updates(groups, 3)
    assert [len(part) for part in parts] == [2, 2, 3]
    assert [group for part in parts for group in part] == groups
    assert split_updates(groups, 1) == [groups]


def test_groups_without_answers_do_not_make_empty_updates() -> None:
    first, second = random_groups(0, groups=2)
    lost = scored([], [], dropped=("late",))
    assert split_updates([lost, first, lost, second], 3) == [[first], [second]]
    assert split_updates([lost], 2) == []


def test_updates_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="updates = 0: must be at least 1"):
        split_updates([], 0)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", ["ranks", "micro_batch_tokens"])
def test_no_ranks_and_no_room_are_refused(knob: str) -> None:
    knobs = {"ranks": 1, "micro_batch_tokens": 8, knob: 0}
    with pytest.raises(ValueError, match=f"{knob} = 0: must be at least 1"):
        pack(random_groups(0), **knobs)


def test_a_batch_without_trajectories_is_refused() -> None:
    with pytest.raises(ValueError, match="groups: none of 1 has a trajectory"):
        pack([scored([], [], dropped=("late",))], ranks=1, micro_batch_tokens=8)


@pytest.mark.parametrize("order", [1, -1])
def test_routes_missing_from_one_segment_name_its_prompt(order: int) -> None:
    with_routes = scored([trajectory(segment(routes=True, name="yes"))], [1.0])
    without = scored([trajectory(segment(10, name="no"))], [1.0])
    with pytest.raises(ValueError, match=r"segment of no: routes_TLK has \(L, K\) = None"):
        pack([with_routes, without][::order], ranks=1, micro_batch_tokens=8)


def test_routes_of_another_model_name_their_prompt() -> None:
    right = segment(routes=True)
    assert right.routes_TLK is not None
    wrong = segment_with(segment(10, name="odd"), routes_TLK=right.routes_TLK[:, :1])
    with pytest.raises(ValueError, match=r"segment of odd: .* = \(1, 3\), another .* \(2, 3\)"):
        pack(
            [scored([trajectory(right), trajectory(wrong)], [0, 1])],
            ranks=1,
            micro_batch_tokens=8,
        )


def test_narrow_routes_are_widened() -> None:
    narrow = segment_with(segment(), routes_TLK=np.full((4, 1, 1), 200, np.uint8))
    (batch,) = pack([scored([trajectory(narrow)], [1.0])], ranks=1, micro_batch_tokens=8)
    routes = batch.micro_batches[0].routes_NLK
    assert routes is not None
    assert routes.dtype == np.int16
    assert (routes == 200).all()


def test_untruncated_segments_among_truncated_ones_get_empty_spans() -> None:
    both = [trajectory(segment(0, 3)), trajectory(segment(10, 3, kept=True), sibling=1)]
    (batch,) = pack([scored(both, [0, 1])], ranks=1, micro_batch_tokens=20)
    kept = batch.micro_batches[0].kept
    assert kept is not None
    assert [kept[t].tolist() for t in range(6)] == [[], [], [], [], kept_of(11), kept_of(12)]


def segment_with(base: Any, **fields: Any) -> Any:
    return type(base)(**{**{name: getattr(base, name) for name in base.__slots__}, **fields})


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
        ({"logp_old_N": np.zeros(4, np.float32)}, "logp_old_N has 4 entries for 5 tokens"),
        ({"routes_NLK": np.zeros((4, 1, 1), np.int16)}, "routes_NLK has 4 entries"),
        ({"routes_NLK": np.zeros((5, 2), np.int16)}, r"routes_NLK must be \[N, L, K\]"),
        ({"position_N": np.arange(5, dtype=np.int32)}, "position_N must count from 0"),
        ({"trainable_N": np.ones(5, np.bool_)}, "trainable_N is True at the first token"),
        ({"sequence_N": np.array([0, 0, 0, 2, 2])}, "sequence_N is out of range for 2 sequences"),
        ({"sequence_N": np.array([0, 0, -1, 1, 1])}, "sequence_N is out of range"),
        ({"sequence_tokens_S": np.array([1, 1])}, "sequence_tokens_S must be above 0 and count"),
        ({"sequence_tokens_S": np.array([2, 1, 0])}, "sequence_tokens_S must be above 0"),
        ({"sequence_weight_S": np.ones(3, np.float32)}, "sequence_weight_S must be 2 finite"),
        ({"sequence_weight_S": np.zeros(2, np.float32)}, "sequence_weight_S must be 2 finite"),
        ({"advantage_N": np.array([1, 1, 2, 0, 0], np.float32)}, "advantage_N must be one finite"),
        ({"advantage_N": np.full(5, np.nan, np.float32)}, "advantage_N must be one finite"),
        ({"kl_coef_N": np.array([0, 0, 1, 0, 0], np.float32)}, "kl_coef_N must be one finite"),
        ({"kl_coef_N": np.full(5, -1, np.float32)}, "kl_coef_N must not be negative"),
        (EMPTY, "no tokens; pad with an untrainable one"),
    ],
)
def test_a_micro_batch_polices_itself(change: dict[str, Any], message: str) -> None:
    MicroBatch(**GOOD)
    with pytest.raises(ValueError, match=message):
        MicroBatch(**{**GOOD, **change})


def test_a_train_batch_polices_itself() -> None:
    micro_batch = MicroBatch(**GOOD)
    TrainBatch(micro_batches=(micro_batch,), total_sequences=2)
    with pytest.raises(ValueError, match="total_sequences = 1, but 2 are in it"):
        TrainBatch(micro_batches=(micro_batch,), total_sequences=1)
    with pytest.raises(ValueError, match="no micro-batches"):
        TrainBatch(micro_batches=(), total_sequences=1)
