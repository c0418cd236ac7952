"""From packed rows to the head: the shift, sampling masks and their mass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.model.head.support import support_head
from keel.model.logprobs import head_inputs, kept_mass, policy_logprobs, trainable_rows
from keel.rl.packing import MicroBatch
from keel.rl.types import SamplingMasks
from tests.model.head.dense import close, dense


def micro_batch(seed: int = 0, vocab: int = 12, kept: bool = True) -> MicroBatch:
    """Two segments of 5 and 4 tokens; trainable tokens 2, 4, 6 and 7."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocab, size=9).astype(np.int32)
    trainable = np.zeros(9, np.bool_)
    trainable[[2, 4, 6, 7]] = True
    spans = [
        np.union1d(rng.permutation(vocab)[:3], tokens[t]) if trainable[t] and t != 6 else []
        for t in range(9)
    ]
    position = np.r_[np.arange(5), np.arange(4)].astype(np.int32)
    return MicroBatch(
        token_ids_N=tokens,
        position_N=position,
        segment_N=np.repeat([0, 1], [5, 4]).astype(np.int32),
        sequence_N=np.repeat([0, 1], [5, 4]).astype(np.int64),
        trainable_N=trainable,
        logp_old_N=np.zeros(9, np.float32),
        advantage_N=np.ones(9, np.float32),
        kl_coef_N=np.zeros(9, np.float32),
        sequence_tokens_S=np.array([2, 2]),
        sequence_weight_S=np.ones(2, np.float32),
        sampling_mask=SamplingMasks.from_lists(spans) if kept else None,
    )


def head_of(weight: Tensor):
    return lambda hidden, *rest, **options: support_head(hidden, weight, *rest, **options)


@pytest.mark.parametrize("kept", [True, False])
def test_token_t_is_scored_from_position_t_minus_1(kept):
    batch = micro_batch(kept=kept)
    hidden, weight = torch.randn(9, 6, requires_grad=True), torch.randn(12, 6)
    logp, entropy = policy_logprobs(hidden, head_of(weight), batch, temperature=0.8)
    assert trainable_rows(batch).tolist() == [2, 4, 6, 7]
    spans = [
        batch.sampling_mask[t] if batch.sampling_mask is not None else [] for t in (2, 4, 6, 7)
    ]
    targets = torch.from_numpy(batch.token_ids_N[[2, 4, 6, 7]]).long()
    expected, expected_entropy = dense(
        hidden[[1, 3, 5, 6]], weight, targets, SamplingMasks.from_lists(spans), 0.8
    )
    close(logp, expected, 1e-5)
    close(entropy, expected_entropy, 1e-5)
    logp.sum().backward()
    assert hidden.grad.any(-1).nonzero()[:, 0].tolist() == [1, 3, 5, 6]


@pytest.mark.parametrize("most", [1, 2, 64])
def test_mask_mass_matches_a_dense_softmax(most: int):
    torch.manual_seed(0)
    batch = micro_batch()
    hidden = torch.randn(9, 6, requires_grad=True)
    weight = torch.randn(12, 6, requires_grad=True)
    inputs, head = head_inputs(batch, probes=most), head_of(weight)
    logp, _ = policy_logprobs(hidden, head, inputs, temperature=0.8)
    log_mass = kept_mass(hidden, head, inputs, logp, temperature=0.8)
    tokens = inputs.rows[inputs.probes].tolist()
    whole = (hidden.double() @ weight.double().t() / 0.8).log_softmax(-1)
    spans = [torch.as_tensor(batch.sampling_mask[t]).long() for t in tokens]
    expected = torch.stack(
        [
            whole[t - 1, span].logsumexp(-1) if len(span) else whole.new_zeros(())
            for t, span in zip(tokens, spans, strict=True)
        ]
    )
    assert -9 < expected.min().item() < -0.1
    close(log_mass, expected, 1e-5)
    factors = torch.randn(len(tokens))
    for actual, exact in zip(
        torch.autograd.grad((factors * log_mass).sum(), (hidden, weight)),
        torch.autograd.grad((factors * expected).sum(), (hidden, weight)),
        strict=True,
    ):
        close(actual, exact, 1e-4)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_probes_depend_on_their_segment_only(most: int):
    batch = micro_batch()
    whole = head_inputs(batch, probes=most)
    tokens = whole.rows[whole.probes]
    halves = [head_inputs(batch, start, stop, probes=most) for start, stop in ((0, 4), (4, 9))]
    assert torch.equal(torch.cat([half.rows[half.probes] for half in halves]), tokens)
    assert torch.equal(torch.cat([half.probe_weight for half in halves]), whole.probe_weight)
    sampled = trainable_rows(batch)
    for segment in np.unique(batch.segment_N[sampled]):
        members = sampled[batch.segment_N[sampled] == segment]
        stride = -(-len(members) // most)
        probed = batch.segment_N[tokens.numpy()] == segment
        places = np.searchsorted(members, tokens[probed].numpy())
        assert (
            len(places) in (len(members) // stride, -(-len(members) // stride))
            and len(places) <= most
        )
        assert (np.diff(places) == stride).all()
        owner = batch.sequence_N[members[0]]
        each = batch.sequence_weight_S[owner] / batch.sequence_tokens_S[owner]
        assert float(whole.probe_weight[probed].sum()) == pytest.approx(len(members) * each)


def test_empty_mass_is_differentiable():
    batch = micro_batch()
    nothing = replace(batch, trainable_N=np.zeros(9, np.bool_), split_S=np.arange(2))
    weight = torch.randn(12, 6, requires_grad=True)
    inputs, head = head_inputs(nothing, probes=2), head_of(weight)
    hidden = torch.randn(9, 6, requires_grad=True)
    log_mass = kept_mass(hidden, head, inputs, torch.zeros(0))
    assert log_mass.tolist() == []
    log_mass.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_empty_micro_batches_reach_all_parameters():
    batch = replace(
        micro_batch(),
        trainable_N=np.zeros(9, np.bool_),
        sampling_mask=SamplingMasks.empty(9),
        split_S=np.arange(2),
    )
    hidden = torch.randn(9, 6, requires_grad=True)
    weight = torch.randn(12, 6, requires_grad=True)
    logp, entropy = policy_logprobs(hidden, head_of(weight), batch)
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,)
    assert not hidden.grad.any() and not weight.grad.any()
