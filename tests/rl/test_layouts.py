"""Shared prefixes are packed once, long trajectories are split; neither changes the gradient."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from keel.rl.losses import grpo_loss
from keel.rl.offpolicy import GapTotals, off_policy_sequence_mask
from keel.rl.packing import MicroBatch
from keel.rl.prefix_sharing import _KV_COPIES_PER_TOKEN, estimate_packing
from keel.rl.recordings import NO_ROUTE
from keel.rl.types import ScoredGroup, Segment
from tests.rl.packed import fresh_table, gradient, micro_batches, oracle, pack, trained
from tests.rl.rollouts import (
    kept_of,
    logp_old_of,
    prompted_groups,
    scored,
    segment,
    segments_of,
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


@given(SEEDS, st.integers(1, 4), st.integers(1, 400))
def test_every_context_is_packed_once(seed: int, replicas: int, capacity: int) -> None:
    groups = prompted_groups(seed)
    batches = pack(groups, replicas=replicas, micro_batch_tokens=capacity, share_prompts=True)
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


@given(SEEDS, st.integers(1, 4), st.integers(1, 400))
def test_capacity_includes_key_value_copies(seed: int, replicas: int, capacity: int) -> None:
    groups = prompted_groups(seed)
    plain, shared = (
        micro_batches(
            pack(groups, replicas=replicas, micro_batch_tokens=capacity, share_prompts=on)
        )
        for on in (False, True)
    )
    for batch in shared:
        contexts = contexts_of(batch)
        copied = sum(map(len, contexts)) - len(batch.token_ids_N)
        if len(contexts) > 1 and batch.split_S is None and len(batch.sequence_tokens_S) > 1:
            assert len(batch.token_ids_N) + copied // _KV_COPIES_PER_TOKEN <= capacity
    assert sum(len(b.token_ids_N) for b in shared) <= sum(len(b.token_ids_N) for b in plain)


@given(SEEDS, st.integers(1, 3), st.integers(20, 400))
def test_sharing_does_not_change_the_gradient(seed: int, replicas: int, capacity: int) -> None:
    groups = prompted_groups(seed)
    (loss, plain), (other, shared) = (
        gradient(pack(groups, replicas=replicas, micro_batch_tokens=capacity, share_prompts=on))
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
    options = {"replicas": 1, "micro_batch_tokens": 400, "share_prompts": True, **options}
    return micro_batches(pack([group], **options))


def test_prefix_excludes_the_last_prompt_token() -> None:
    (batch,) = packed(same_prompt())
    assert np.bincount(batch.segment_N).tolist() == [39, 11, 11, 11, 11]
    assert batch.follows is not None and batch.follows.tolist() == [-1, 0, 0, 0, 0]
    assert batch.sequence_N[batch.trainable_N].tolist() == np.repeat(range(4), 10).tolist()


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
    for at, lengths in ((33, [33, 17, 17, 17, 17]), (25, [11, 11, 11, 39, 50])):
        segments = same_prompt(routes=True)
        segments[place] = changed(segments[place], what, at)
        (batch,) = packed(segments)
        assert sorted(np.bincount(batch.segment_N)) == sorted(lengths)


def test_two_kinds_of_routes_form_two_clusters() -> None:
    one, other = same_prompt(routes=True, size=6), same_prompt(routes=True, size=6)
    mixed = [changed(other[i], "route", 3) if i % 2 else one[i] for i in range(6)]
    (batch,) = packed(mixed)
    assert sorted(np.bincount(batch.segment_N)) == [11] * 6 + [39, 39]
    assert len(contexts_of(batch)) == 6


def test_recorded_selections_prevent_sharing() -> None:
    chosen = np.zeros((50, 2, 7), np.uint8)
    (batch,) = packed([replace(one, selected_TLb=chosen) for one in same_prompt()])
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
    ("groups", "size", "shared", "own", "replicas", "capacity"),
    [
        (8, 8, 800, 896, 1, 18_656),
        (8, 8, 800, 896, 2, 4_000),
        (16, 16, 64, 500, 4, 3_000),
        (2, 8, 200, 100, 8, 4_000),  # fewer groups than replicas
        (3, 2, 100, 100, 4, 150),  # longer than a micro-batch
        (4, 8, 0, 900, 2, 2_000),  # no sharing
    ],
)
def test_estimate_packing_matches_pack(
    groups: int, size: int, shared: int, own: int, replicas: int, capacity: int
) -> None:
    scored_groups: list[ScoredGroup] = []
    for number in range(groups):
        prefix = np.arange(shared, dtype=np.int32) + 10_000 * number
        context = max(1, shared)
        group = [
            trajectory(with_prefix(segment(200_000 * i, shared + own, context=context), prefix))
            for i in range(1, size + 1)
        ]
        scored_groups.append(scored(group, [*range(size)]))
    share = shared > 0
    batches = pack(
        scored_groups, replicas=replicas, micro_batch_tokens=capacity, share_prompts=share
    )
    sizes = {"shared": shared, "own": own, "replicas": replicas, "capacity": capacity}
    count, tokens = estimate_packing(groups, size, **sizes)
    assert len(batches[0].micro_batches) == count
    slowest = max(sum(len(one.token_ids_N) for one in batch.micro_batches) for batch in batches)
    assert slowest == pytest.approx(tokens, rel=0.005)


def long_groups(seed: int, *, groups: int = 3, size: int = 3, most: int = 7) -> list[ScoredGroup]:
    """Draw trajectories of up to `most` segments of 2 to 6 tokens.

    About half differ from the policy of `tests.rl.packed` by more than the mask's δ, some of them
    only in some segments.
    """
    random = np.random.default_rng(seed)
    first = 500  # ids with log-probabilities well below 0
    result: list[ScoredGroup] = []
    for index in range(groups):
        answers = []
        for sibling in range(size):
            segments: list[Segment] = []
            drift = random.normal(0.5, 0.5)
            for _ in range(random.integers(1, most + 1)):
                tokens = int(random.integers(2, 7))
                context = int(random.integers(1, tokens))
                one = segment(first, tokens, name=f"p{index}", context=context)
                logp = -np.exp(np.sin(np.linspace(-1, 1, 1000)))[one.token_ids_T]
                logp_old = np.minimum(logp + drift + random.normal(0, 0.7, tokens), 0)
                one.logp_old_T[:] = np.where(one.trainable_T, logp_old, 0)
                segments.append(one)
                first += tokens
            answers.append(trajectory(*segments, sibling=sibling))
        rewards = random.permutation(size).astype(float).tolist()
        result.append(scored(answers, rewards, kl_coef=0.1 * float(index % 2)))
    return result


@given(SEEDS, st.integers(1, 25), st.integers(1, 4), st.none() | st.floats(0, 1))
@example(1, 6, 2, 0.5)
def test_splitting_changes_neither_loss_nor_metrics(seed, capacity, replicas, delta) -> None:
    groups = long_groups(seed)
    tables = [fresh_table(torch.float32) for _ in range(3)]
    whole = pack(groups, replicas=1, micro_batch_tokens=10**6)
    tiny = pack(groups, replicas=replicas, micro_batch_tokens=capacity, mask_delta=delta)
    assert delta is not None or not any(batch.mask_pass for batch in tiny)
    assert whole[0].split_sequences == 0 and not whole[0].mask_pass
    expected = trained(whole, tables[0], mask_delta=delta)
    actual = trained(tiny, tables[1], mask_delta=delta)
    assert actual == pytest.approx(expected, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(tables[1].grad, tables[0].grad, rtol=1e-6, atol=1e-7)
    naive = oracle(groups, tables[2], mask_delta=delta)
    naive.loss.backward()
    assert actual == pytest.approx(naive.metrics, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(tables[1].grad, tables[2].grad, rtol=1e-5, atol=1e-7)


def test_only_maskable_segments_join_the_mask_pass() -> None:
    long = [trajectory(*(segment(20 * s + 5 * w, 5) for w in range(4)), sibling=s) for s in (0, 1)]
    batches = pack([scored(long, [0.0, 1.0])], replicas=3, micro_batch_tokens=7)
    assert {len(batch.micro_batches) for batch in batches} == {3}
    assert {len(batch.mask_pass) for batch in batches} == {2}
    ids = [int(t) for b in batches for one in b.mask_pass for t in one.token_ids_N]
    assert sorted(ids) == sorted([*range(20), 0, 0])
    winners = pack([scored(long, [0.0, 0.0])], replicas=3, micro_batch_tokens=7)
    assert {len(batch.mask_pass) for batch in winners} == {0}


def test_split_trajectories_drop_segments_without_samples() -> None:
    unsampled = segment(10, 4, context=4)
    long = trajectory(segment(0, 5), unsampled, segment(20, 5))
    (batch,) = pack([scored([long], [0.0])], replicas=1, micro_batch_tokens=5)
    assert [one.token_ids_N[0] for one in batch.micro_batches] == [0, 20]
    for capacity in (10, 14):
        (batch,) = pack([scored([long], [0.0])], replicas=1, micro_batch_tokens=capacity)
        assert [len(one.token_ids_N) for one in batch.micro_batches] == [capacity]
        assert batch.split_sequences == 0


def test_incomplete_maskable_sequences_need_a_gap() -> None:
    logp, sequence = torch.tensor([-1.0, -1.0]), torch.tensor([0, 1])
    knobs = {"sequence_tokens": torch.tensor([1, 2]), "total_sequences": 2, "mask_delta": 0.1}
    advantage = torch.tensor([-1.0, -1.0])
    with pytest.raises(ValueError, match=r"sequence\[1\]"):
        grpo_loss(logp, logp, advantage, sequence, **knobs)
    gap = torch.tensor([torch.nan, 0.2], dtype=torch.float64)
    output = grpo_loss(logp, logp, advantage, sequence, **knobs, sequence_gap=gap)
    assert output.metrics["mask/sequence_fraction"].value == pytest.approx(0.5 / 1.5)
    assert output.metrics["mask/logp_gap_max"].value == 0
    grpo_loss(logp, logp, -advantage, sequence, **knobs)
    grpo_loss(logp, logp, advantage, sequence, **{**knobs, "mask_delta": None})
    with pytest.raises(ValueError, match="sequence_gap"):
        grpo_loss(logp, logp, advantage, sequence, **knobs, sequence_gap=gap.float())


def test_sequence_gap_decides_like_the_tokens() -> None:
    logp, advantage = torch.tensor([-1.0, -1.5]), torch.tensor([-1.0, -1.0])
    logp_old, sequence = torch.tensor([-0.9, -1.5]), torch.tensor([0, 0])
    rest = GapTotals(1).add(logp, logp_old, sequence)
    for delta in (float(np.float32(0.05)), 0.0499, 0.0501):
        rows, knobs = (logp, logp_old, advantage, sequence), {"num_sequences": 1, "delta": delta}
        expected = off_policy_sequence_mask(*rows, **knobs)
        for row in ([0], [1]):
            part = [each[row] for each in rows]
            actual = off_policy_sequence_mask(*part, **knobs, sequence_gap=rest.means())
            assert actual.tolist() == expected[row].tolist()
