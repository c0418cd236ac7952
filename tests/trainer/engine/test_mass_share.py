"""The penalty on mass outside sampling masks, against its definition by enumeration."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keel.configs.schema import Config, SamplingConfig
from keel.model.head.module import SupportHead
from keel.model.logprobs import kept_mass, policy_logprobs
from keel.rl.offpolicy import kept_mass_shortfall
from keel.rl.packing import TrainBatch, pack
from keel.trainer.engine.objectives import CUT, mass_share
from keel.trainer.engine.policy import Inputs
from tests.trainer.engine.batches import MOST_KEPT, VOCABULARY, Rollouts
from tests.trainer.engine.ranks import ROOMY, make_config

WIDTH, TOP_P, COEF = 16, 0.6, 0.7
CPU = torch.device("cpu")


def settings(*, coef: float = COEF, top_k: int = CUT * MOST_KEPT, top_p: float = TOP_P) -> Config:
    config = make_config(1, 0, kept_mass_coef=coef)
    sampling = SamplingConfig(top_p=top_p, top_k=top_k)
    return replace(config, rollout=replace(config.rollout, sampling=sampling))


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(VOCABULARY, WIDTH, requires_grad=True)


def head_of(weight: Tensor) -> SupportHead:
    linear = nn.Linear(WIDTH, VOCABULARY, bias=False)
    linear.weight = nn.Parameter(weight)
    return SupportHead(linear)


def batch_of(tokens: int) -> TrainBatch:
    groups = Rollouts(5).groups(3, 4)
    (batch,) = pack(groups, ranks=1, micro_batch_tokens=tokens)
    return batch


def hidden_of(token_ids: np.ndarray, positions: np.ndarray, embedding: Tensor) -> Tensor:
    """Hidden states that depend on a token and the one before it."""
    here = embedding[torch.from_numpy(token_ids).long()]
    before = here.roll(1, 0) * torch.from_numpy(positions > 0)[:, None]
    return (here + before).tanh() * 2


def penalty(
    batch: TrainBatch, config: Config, weight: Tensor, most: int = 64
) -> tuple[Tensor, Tensor]:
    """Penalty and [4] totals of a step, summed over micro-batches."""
    embedding = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))
    losses, seen = [], []
    head = head_of(weight)
    for row in batch.micro_batches:
        inputs = Inputs.of(row, CPU, probes=most)
        hidden = hidden_of(row.token_ids_N, row.position_N, embedding)
        logp, _ = policy_logprobs(hidden, head, inputs.head)
        log_mass = kept_mass(hidden, head, inputs.head, logp)
        loss, masses = mass_share(inputs, log_mass, batch.total_sequences, config)
        losses.append(loss)
        seen.append(masses)
    total = torch.stack(losses).sum()
    if total.requires_grad:
        (weight.grad,) = torch.autograd.grad(total, head.weight)
    return total.detach(), torch.stack(seen).sum(0)


def by_enumeration(batch: TrainBatch, config: Config, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Penalty and gradient over every token, by definition."""
    embedding = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))
    exact = weight.detach().double().requires_grad_()
    total = exact.new_zeros(())
    sampling = config.rollout.sampling
    for row in batch.micro_batches:
        hidden = hidden_of(row.token_ids_N, row.position_N, embedding).double()
        probs = (hidden @ exact.t()).softmax(-1)
        assert row.sampling_mask is not None
        for t in np.flatnonzero(row.trainable_N):
            selected = torch.from_numpy(row.sampling_mask[t]).long()
            if not len(selected) or CUT * len(selected) > sampling.top_k:
                continue
            mass, owner = probs[t - 1, selected].sum(), row.sequence_N[t]
            each = row.sequence_weight_S[owner] / row.sequence_tokens_S[owner]
            short = torch.log(sampling.top_p**2 / mass).clamp(min=0)
            total = total + float(each) * short
    total = config.algorithm.kept_mass_coef / batch.total_sequences * total
    (gradient,) = torch.autograd.grad(total, exact)
    return total.detach(), gradient


@pytest.mark.parametrize("top_k", [CUT * MOST_KEPT, CUT * 3])
def test_penalty_matches_its_definition(weight: Tensor, top_k: int) -> None:
    batch, config = batch_of(ROOMY), settings(top_k=top_k)
    total, _ = penalty(batch, config, weight)
    expected, gradient = by_enumeration(batch, config, weight)
    assert float(expected) > 0.05
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), gradient, rtol=1e-4, atol=1e-6)


def test_probes_are_unbiased(weight: Tensor) -> None:
    config, some, every = settings(), [], []
    for seed in range(40):
        groups = Rollouts(seed).groups(3, 4)
        (batch,) = pack(groups, ranks=1, micro_batch_tokens=ROOMY)
        some.append(float(penalty(batch, config, weight, most=2)[0]))
        every.append(float(penalty(batch, config, weight)[0]))
    error = np.subtract(some, every)
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(len(error))
    assert error.std() < np.mean(every)


@pytest.mark.parametrize("sharpness", [1.0, 3.0, 6.0, 9.0])
@pytest.mark.parametrize("top_k", [64, 512])
def test_fresh_samples_are_not_penalised(sharpness: float, top_k: int) -> None:
    """Top-k comes first, so a flat policy keeps less than top-p of its mass."""
    generator = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn(60, 20_000, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1)
    likeliest = probs.topk(top_k).values
    share = likeliest / likeliest.sum(-1, keepdim=True)
    selected = share.cumsum(-1) - share < 0.95
    log_mass = (likeliest * selected).sum(-1).log()
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), selected.sum(-1).cumsum(0)])
    head: Any = SimpleNamespace(
        probes=torch.arange(60), kept_offsets=offsets, probe_weight=torch.ones(60)
    )
    inputs: Any = SimpleNamespace(head=head, truncated=True)
    loss, (_, tokens, short, counted) = mass_share(
        inputs, log_mass, 60, settings(top_k=top_k, top_p=0.95)
    )
    everything = kept_mass_shortfall(log_mass, top_p=0.95).mean()
    assert loss <= 0.02 * max(everything, 0.01), (loss, everything)
    assert tokens == 60
    if sharpness == 1:
        assert everything > 0.3 and counted == 0
    if sharpness == 9:
        assert counted > 50 and short == 0
