"""Bias and variance of the gradient of the KL term, measured by enumeration.

The states are the contexts of a batch that the engine sampled. At each state the whole vocabulary
is enumerated, so the exact gradient of KL(π_θ ‖ π_ref) and the expectation of an estimator over
what π_old might have sampled there are sums, without sampling noise: their difference is the bias.
The variance is that of redrawing every token of the batch from π_old with the states held fixed.
The estimators are those of `keel.rl.kl`, differentiated by autograd through the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.load import load_policy
from keel.rl.kl import k3, unbiased_k3
from keel.rl.types import ScoredGroup
from keel.trainer.engine.engine import TrainerEngine

BEHIND = 4
"""Optimizer steps that the policy is ahead of π_old in the second case."""
AT = (6, 16, 32)
"""Steps whose batches are looked at: drawn by the weights after the step before."""
REDRAWS = 16

ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "unbiased_k3": unbiased_k3,
    "k3": lambda logp, logp_old, logp_ref: k3(logp, logp_ref),
}


@dataclass
class Probe:
    """Keeps what is needed during a run, measures after it."""

    folder: Path
    reference: str
    batches: dict[int, Sequence[ScoredGroup]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def record(self, step: int, engine: TrainerEngine, sample: Sequence[ScoredGroup]) -> None:
        """To be told of every step; one batch is one optimizer step here."""
        if any(step in (at - 1, at - 1 + BEHIND) for at in AT):
            path = self.folder / str(step)
            path.mkdir(parents=True, exist_ok=True)
            engine.export(path)
        if step in AT:
            self.batches[step] = sample

    def measure(self) -> list[dict[str, Any]]:
        """One row for each batch, case and estimator."""
        reference = load_policy(self.reference, torch.float32)
        rows: list[dict[str, Any]] = []
        for at, batch in self.batches.items():
            states = States.of(batch)
            old = load_policy(str(self.folder / str(at - 1)), torch.float32)
            for behind in (0, BEHIND):
                path = self.folder / str(at - 1 + behind)
                if not path.is_dir():
                    continue
                policy = load_policy(str(path), torch.float32)
                found = compare(policy, old, reference, states)
                rows += [{"step": at, "behind": behind, **row} for row in found]
        return rows


@dataclass
class States:
    """A batch as padded rows: contexts and the weight of each sampled token in the loss."""

    token_ids: Tensor
    """[B, T]"""
    attention: Tensor
    predicts: Tensor
    """[B, T] bool: position t predicts a token that was sampled."""
    weight: Tensor
    """[N] share of each sampled token: 1 / (|o_i| · B)."""

    @staticmethod
    def of(batch: Sequence[ScoredGroup]) -> States:
        segments = [t.segments[0] for g in batch for t in g.group.trajectories]
        longest = max(len(s.token_ids_T) for s in segments)
        token_ids = torch.zeros(len(segments), longest, dtype=torch.long)
        attention, predicts = torch.zeros_like(token_ids), torch.zeros_like(token_ids).bool()
        weights: list[Tensor] = []
        for row, segment in enumerate(segments):
            length, sampled = len(segment.token_ids_T), int(segment.trainable_T.sum())
            token_ids[row, :length] = torch.tensor(segment.token_ids_T)
            attention[row, :length] = 1
            predicts[row, : length - 1] = torch.tensor(segment.trainable_T[1:])
            weights.append(torch.full((sampled,), 1 / (sampled * len(segments))))
        return States(token_ids, attention, predicts, torch.cat(weights))

    def logp(self, model: PreTrainedModel) -> Tensor:
        """[N, V] log-probabilities over the whole vocabulary where a token was sampled."""
        logits = model(
            input_ids=self.token_ids, attention_mask=self.attention, use_cache=False
        ).logits
        return logits[self.predicts].log_softmax(-1)


def compare(
    policy: PreTrainedModel, old: PreTrainedModel, reference: PreTrainedModel, states: States
) -> list[dict[str, Any]]:
    """For each estimator: bias and standard deviation, relative to the exact gradient's norm."""
    with torch.no_grad():
        logp_old, logp_ref = states.logp(old), states.logp(reference)
    logp = states.logp(policy)
    parameters = [p for p in policy.parameters() if p.requires_grad]

    def gradient(per_state: Tensor) -> Tensor:
        loss = (per_state * states.weight).sum()
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return torch.cat([g.flatten().double() for g in found if g is not None])

    divergence = (logp.exp() * (logp - logp_ref)).sum(-1)
    exact = gradient(divergence)
    size = exact.norm()
    rows: list[dict[str, Any]] = []
    draws = torch.Generator().manual_seed(0)
    tokens = [
        torch.multinomial(logp_old.exp(), 1, generator=draws) for _ in range(REDRAWS)
    ]  # the same for all estimators
    for name, estimator in ESTIMATORS.items():
        expected = gradient((logp_old.exp() * estimator(logp, logp_old, logp_ref)).sum(-1))
        variance = 0.0
        for drawn in tokens:
            picked = (x.gather(1, drawn)[:, 0] for x in (logp, logp_old, logp_ref))
            variance += float((gradient(estimator(*picked)) - expected).square().sum())
        rows.append(
            {
                "estimator": name,
                "kl": float((divergence.detach() * states.weight).sum()),
                "exact_norm": float(size),
                "bias": float((expected - exact).norm() / size),
                "cosine": float(expected @ exact / (expected.norm() * size)),
                "expected_norm": float(expected.norm() / size),
                "deviation": float((variance / REDRAWS) ** 0.5 / size),
            }
        )
    return rows
