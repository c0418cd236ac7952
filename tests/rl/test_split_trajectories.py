"""Trajectories of more windows than a micro-batch holds: what they teach and what is written down
of them depends on no packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keel.rl.losses import grpo_loss
from keel.rl.offpolicy import GapTotals, off_policy_sequence_mask
from keel.rl.packing import pack
from keel.rl.types import ScoredGroup, Segment
from tests.rl.packed import fresh_table, gradient, micro_batches, oracle, trained
from tests.rl.rollouts import scored, segment, trajectory


def many_windows(seed: int, *, groups: int = 3, size: int = 3, most: int = 7) -> list[ScoredGroup]:
    """Groups of trajectories of up to `most` windows, each of 2 to 6 tokens. About half are as far
    from the policy of `tests.rl.packed` as the mask wants it, and a part of those in some of their
    windows alone."""
    random = np.random.default_rng(seed)
    first = 500  # where that policy's log-probabilities leave room above them
    made: list[ScoredGroup] = []
    for index in range(groups):
        answers = []
        for sibling in range(size):
            windows: list[Segment] = []
            drift = random.normal(0.5, 0.5)
            for _ in range(random.integers(1, most + 1)):
                tokens = int(random.integers(2, 7))
                context = int(random.integers(1, tokens))
                window = segment(first, tokens, name=f"p{index}", context=context)
                logp = -np.exp(np.sin(np.linspace(-1, 1, 1000)))[window.token_ids_T]
                logp_old = np.minimum(logp + drift + random.normal(0, 0.7, tokens), 0)
                window.logp_old_T[:] = np.where(window.trainable_T, logp_old, 0)
                windows.append(window)
                first += tokens
            answers.append(trajectory(*windows, sibling=sibling))
        rewards = random.permutation(size).astype(float).tolist()
        made.append(scored(answers, rewards, kl_coef=0.1 * float(index % 2)))
    return made


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    capacity=st.integers(1, 25),
    ranks=st.integers(1, 4),
    delta=st.none() | st.floats(0, 1),
)
@example(seed=1, capacity=6, ranks=2, delta=0.5)
def test_loss_gradient_and_metrics_are_those_of_one_large_micro_batch_and_of_the_oracle(
    seed: int, capacity: int, ranks: int, delta: float | None
) -> None:
    groups = many_windows(seed)
    tables = [fresh_table(torch.float32) for _ in range(3)]
    whole = pack(groups, ranks=1, micro_batch_tokens=10**6)
    tiny = pack(groups, ranks=ranks, micro_batch_tokens=capacity, sequence_mask=delta is not None)
    assert delta is not None or not any(batch.scored_first for batch in tiny)
    assert whole[0].split_sequences == 0 and not whole[0].scored_first
    expected = trained(whole, tables[0], mask_delta=delta)
    found = trained(tiny, tables[1], mask_delta=delta)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(tables[1].grad, tables[0].grad, rtol=1e-6, atol=1e-7)
    naive = oracle(groups, tables[2], mask_delta=delta)
    naive.loss.backward()
    assert found == pytest.approx(naive.metrics, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(tables[1].grad, tables[2].grad, rtol=1e-5, atol=1e-7)


def test_the_examples_reach_the_mask() -> None:
    """Trajectories are split, some are masked and others not, and for some a part of them alone
    would have said otherwise."""
    split = masked = otherwise = 0
    for seed in range(5):
        (batch,) = pack(many_windows(seed), ranks=1, micro_batch_tokens=6)
        split += batch.split_sequences
        whole = trained([batch], fresh_table())["mask/sequence_fraction"]
        masked += 0.05 < whole < 0.95
        totals = GapTotals(batch.split_sequences)
        parts: dict[int, set[bool]] = {}
        for one in batch.scored_first:
            assert one.split_S is not None and (one.split_S >= 0).all()
            assert (one.advantage_N < 0).all(), "nothing that the mask never drops"
            for row in np.flatnonzero(one.trainable_N):
                owner = int(one.split_S[one.sequence_N[row]])
                logp = -fresh_table()[int(one.token_ids_N[row])].exp()
                logp_old = torch.tensor(one.logp_old_N[row])
                totals.add(logp[None], logp_old[None], torch.tensor([owner]))
                parts.setdefault(owner, set()).add((logp_old - logp).item() > 0.5)
        otherwise += sum(len(both) == 2 for both in parts.values())
        assert (~totals.means().isnan()).sum() == len(parts)
    assert split > 15 and masked > 2 and otherwise > 5


def test_scoring_is_for_those_that_the_mask_may_drop_and_equal_on_all_ranks() -> None:
    """One long trajectory of two, and enough ranks that some only keep the others company."""
    long = [trajectory(*(segment(20 * s + 5 * w, 5) for w in range(4)), sibling=s) for s in (0, 1)]
    batches = pack([scored(long, [0.0, 1.0])], ranks=3, micro_batch_tokens=7)
    assert {len(batch.micro_batches) for batch in batches} == {3}
    assert {len(batch.scored_first) for batch in batches} == {2}
    ids = [int(t) for b in batches for one in b.scored_first for t in one.token_ids_N]
    assert sorted(ids) == sorted([*range(20), 0, 0]), "the first's windows, and padding"
    winners = pack([scored(long, [0.0, 0.0])], ranks=3, micro_batch_tokens=7)
    assert {len(batch.scored_first) for batch in winners} == {0}


def test_windows_of_one_trajectory_in_one_micro_batch_are_one_sequence() -> None:
    long = trajectory(*(segment(5 * w, 5) for w in range(4)))
    (batch,) = pack([scored([long], [0.0])], ranks=1, micro_batch_tokens=10)
    assert [one.sequence_tokens_S.tolist() for one in batch.micro_batches] == [[16], [16]]
    assert [one.split_S is not None and one.split_S.tolist() for one in batch.micro_batches] == [
        [0],
        [0],
    ]
    assert [len(set(one.segment_N)) for one in batch.micro_batches] == [2, 2]


def test_a_window_of_a_split_trajectory_that_sampled_nothing_is_left_out() -> None:
    silent = segment(10, 4, context=4)
    long = trajectory(segment(0, 5), silent, segment(20, 5))
    (batch,) = pack([scored([long], [0.0])], ranks=1, micro_batch_tokens=5)
    assert [one.token_ids_N[0] for one in batch.micro_batches] == [0, 20]
    (batch,) = pack([scored([long], [0.0])], ranks=1, micro_batch_tokens=10)
    assert [len(one.token_ids_N) for one in batch.micro_batches] == [10], "then the rest fits"
    assert batch.split_sequences == 0
    (batch,) = pack([scored([long], [0.0])], ranks=1, micro_batch_tokens=14)
    assert [len(one.token_ids_N) for one in batch.micro_batches] == [14], "as ever, where all fits"


def test_a_window_longer_than_a_micro_batch_has_one_of_its_own() -> None:
    long = trajectory(segment(0, 9), segment(20, 3), segment(30, 3))
    groups = [scored([long, trajectory(segment(40, 3), sibling=1)], [0.0, 1.0])]
    batches = pack(groups, ranks=1, micro_batch_tokens=6)
    assert sorted(len(one.token_ids_N) for one in micro_batches(batches)) == [3, 6, 9]
    loss, found = gradient(batches)
    whole, expected = gradient(pack(groups, ranks=1, micro_batch_tokens=99))
    assert loss == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(found, expected)


def test_part_of_a_sequence_that_the_mask_may_drop_is_refused_without_its_mean() -> None:
    logp, sequence = torch.tensor([-1.0, -1.0]), torch.tensor([0, 1])
    knobs = {"sequence_tokens": torch.tensor([1, 2]), "total_sequences": 2, "mask_delta": 0.1}
    advantage = torch.tensor([-1.0, -1.0])
    with pytest.raises(
        ValueError, match=r"sequence\[1\] = 1: has tokens in other calls .* its seq"
    ):
        grpo_loss(logp, logp, advantage, sequence, **knobs)
    gap = torch.tensor([torch.nan, 0.2], dtype=torch.float64)
    output = grpo_loss(logp, logp, advantage, sequence, **knobs, sequence_gap=gap)
    assert output.metrics["mask/sequence_fraction"].value == pytest.approx(0.5 / 1.5)
    assert output.metrics["mask/logp_gap_max"].value == 0, "of what is all here"
    grpo_loss(logp, logp, -advantage, sequence, **knobs)
    grpo_loss(logp, logp, advantage, sequence, **{**knobs, "mask_delta": None})
    with pytest.raises(ValueError, match=r"sequence_gap is torch.float32 \[2\]: must be float64"):
        grpo_loss(logp, logp, advantage, sequence, **knobs, sequence_gap=gap.float())


def test_the_given_mean_decides_as_the_tokens_themselves_would() -> None:
    """Rounded to their type before it is compared, and a NaN never drops."""
    logp, advantage = torch.tensor([-1.0, -1.5]), torch.tensor([-1.0, -1.0])
    logp_old, sequence = torch.tensor([-0.9, -1.5]), torch.tensor([0, 0])
    rest = GapTotals(1).add(logp, logp_old, sequence)
    for delta in (float(np.float32(0.05)), 0.0499, 0.0501):
        want = off_policy_sequence_mask(
            logp, logp_old, advantage, sequence, num_sequences=1, delta=delta
        )
        for row in ([0], [1]):
            part = (logp[row], logp_old[row], advantage[row], sequence[row])
            found = off_policy_sequence_mask(
                *part, num_sequences=1, delta=delta, sequence_gap=rest.means()
            )
            assert found.tolist() == want[row].tolist()
