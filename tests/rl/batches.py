"""Random inputs of `keel.rl.losses.grpo_loss`, and parts of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keel.rl.losses import LossOutput, grpo_loss
from tests.rl.reference_grpo import Answer, Token


@dataclass(frozen=True)
class LossInputs:
    """N tokens of S sequences in random order, float64."""

    logp: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    advantage: Tensor
    sequence: Tensor
    kl_coef: Tensor
    sequence_tokens: Tensor

    @staticmethod
    def random(
        seed: int, lengths: Sequence[int], *, drift: float = 0.5, kl_coef: float = 0.3
    ) -> "LossInputs":
        """Draw a batch; π_old and π_ref are about `drift` nats from π_θ.

        About half of the sequences have a KL coefficient, and about half a negative advantage.
        """
        rng = torch.Generator().manual_seed(seed)
        count, tokens = len(lengths), sum(lengths)

        def normal(size: int) -> Tensor:
            return torch.randn(size, generator=rng, dtype=torch.float64)

        order = torch.randperm(tokens, generator=rng)
        sequence = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))[order]
        logp = -normal(tokens).abs() - 0.1
        # A shift per sequence moves some of them beyond δ.
        logp_old = logp + drift * (normal(tokens) + normal(count)[sequence])
        return LossInputs(
            logp=logp,
            logp_old=logp_old,
            logp_ref=logp + drift * normal(tokens),
            advantage=normal(count)[sequence],
            sequence=sequence,
            kl_coef=(kl_coef * (normal(count) > 0).double())[sequence],
            sequence_tokens=torch.tensor(lengths),
        )

    def rows(self, rows: Tensor) -> "LossInputs":
        """Return the part with these tokens, with renumbered sequences."""
        owners, sequence = torch.unique(self.sequence[rows], return_inverse=True)
        return LossInputs(
            logp=self.logp[rows],
            logp_old=self.logp_old[rows],
            logp_ref=self.logp_ref[rows],
            advantage=self.advantage[rows],
            sequence=sequence,
            kl_coef=self.kl_coef[rows],
            sequence_tokens=self.sequence_tokens[owners],
        )

    def loss(self, **knobs: Any) -> tuple[LossOutput, Tensor]:
        """Return the partial loss and its gradient with respect to `logp`."""
        logp = self.logp.clone().requires_grad_()
        knobs = {
            "total_sequences": max(1, len(self.sequence_tokens)),
            "logp_ref": self.logp_ref,
            "kl_coef": self.kl_coef,
            **knobs,
        }
        rows = logp, self.logp_old, self.advantage, self.sequence
        output = grpo_loss(*rows, sequence_tokens=self.sequence_tokens, **knobs)
        output.loss.backward()
        return output, logp.grad

    def answers(self) -> tuple[list[Answer], Tensor]:
        """Return the oracle's input, and the leaf that gets its gradient."""
        leaf = self.logp.double().clone().requires_grad_()
        answers: list[Answer] = []
        old, ref, coef = (x.tolist() for x in (self.logp_old, self.logp_ref, self.kl_coef))
        for index in range(len(self.sequence_tokens)):
            rows: list[int] = (self.sequence == index).nonzero()[:, 0].tolist()
            tokens = [Token(leaf[row], old[row], ref[row], coef[row]) for row in rows]
            answers.append(Answer(tokens=tokens, advantage=self.advantage[rows[0]].item()))
        return answers, leaf
