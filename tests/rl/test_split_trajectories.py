"""Trajectories that span several micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keel.rl.losses import grpo_loss
from keel.rl.offpolicy import GapTotals, off_policy_sequence_mask
from keel.rl.packing import pack
from keel.rl.types import ScoredGroup, Segment
from tests.rl.packed import fresh_table, oracle, trained
from tests.rl.rollouts import scored, segment, trajectory


def long_groups(seed: int, *, groups: int = 3, size: int = 3, most: int = 7) -> list[ScoredGroup]:
    """Draw trajectories of up to `most` segments of 2 to 6 tokens.

    About half exceed the mask's δ from the policy of `tests.rl.packed`, some of them only in some
    segments.
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


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    capacity=st.integers(1, 25),
    ranks=st.integers(1, 4),
    delta=st.none() | st.floats(0, 1),
)
@example(seed=1, capacity=6, ranks=2, delta=0.5)
def test_splitting_changes_neither_loss_nor_metrics(
    seed: int, capacity: int, ranks: int, delta: float | None
) -> None:
    groups = long_groups(seed)
    tables = [fresh_table(torch.float32) for _ in range(3)]
    whole = pack(groups, ranks=1, micro_batch_tokens=10**6)
    tiny = pack(groups, ranks=ranks, micro_batch_tokens=capacity, sequence_mask=delta is not None)
    assert delta is not None or not any(batch.scored_first for batch in tiny)
    assert whole[0].split_sequences == 0 and not whole[0].scored_first
    expected = trained(whole, tables[0], mask_delta=delta)
    actual = trained(tiny, tables[1], mask_delta=delta)
    assert actual == pytest.approx(expected, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(tables[1].grad, tables[0].grad, rtol=1e-6, atol=1e-7)
    naive = oracle(groups, tables[2], mask_delta=delta)
    naive.loss.backward()
    assert actual == pytest.approx(naive.metrics, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(tables[1].grad, tables[2].grad, rtol=1e-5, atol=1e-7)


def test_only_maskable_segments_are_scored_first() -> None:
    """Some ranks have only padding."""
    long = [trajectory(*(segment(20 * s + 5 * w, 5) for w in range(4)), sibling=s) for s in (0, 1)]
    batches = pack([scored(long, [0.0, 1.0])], ranks=3, micro_batch_tokens=7)
    assert {len(batch.micro_batches) for batch in batches} == {3}
    assert {len(batch.scored_first) for batch in batches} == {2}
    ids = [int(t) for b in batches for one in b.scored_first for t in one.token_ids_N]
    assert sorted(ids) == sorted([*range(20), 0, 0])
    winners = pack([scored(long, [0.0, 0.0])], ranks=3, micro_batch_tokens=7)
    assert {len(batch.scored_first) for batch in winners} == {0}


def test_split_trajectories_drop_segments_without_samples() -> None:
    unsampled = segment(10, 4, context=4)
    long = trajectory(segment(0, 5), unsampled, segment(20, 5))
    (batch,) = pack([scored([long], [0.0])], ranks=1, micro_batch_tokens=5)
    assert [one.token_ids_N[0] for one in batch.micro_batches] == [0, 20]
    (batch,) = pack([scored([long], [0.0])], ranks=1, micro_batch_tokens=10)
    assert [len(one.token_ids_N) for one in batch.micro_batches] == [10]
    assert batch.split_sequences == 0
    (batch,) = pack([scored([long], [0.0])], ranks=1, micro_batch_tokens=14)
    assert [len(one.token_ids_N) for one in batch.micro_batches] == [14]


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
        expected = off_policy_sequence_mask(
            logp, logp_old, advantage, sequence, num_sequences=1, delta=delta
        )
        for row in ([0], [1]):
            part = (logp[row], logp_old[row], advantage[row], sequence[row])
            actual = off_policy_sequence_mask(
                *part, num_sequences=1, delta=delta, sequence_gap=rest.means()
            )
            assert actual.tolist() == expected[row].tolist()
