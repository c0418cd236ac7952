"""Loss of packed batches for a policy that is a table of logits by token id, and its oracle."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.rl.losses import grpo_loss
from keel.rl.metrics import Max, Metric, merge, values
from keel.rl.offpolicy import GapTotals
from keel.rl.packing import MicroBatch, TrainBatch, plan_packing
from keel.rl.types import ScoredGroup
from tests.rl.reference_grpo import Answer, Result, Token, reference_grpo

LOGP_REF = -1.0
MASK_DELTA = 0.5


def pack(groups: Sequence[ScoredGroup], **options: Any) -> list[TrainBatch]:
    """Pack the groups of one optimizer step into one `TrainBatch` per replica."""
    return [plan.pack() for plan in plan_packing(groups, **{"mask_delta": MASK_DELTA, **options})]


def micro_batches(batches: Sequence[TrainBatch]) -> list[MicroBatch]:
    return [micro_batch for batch in batches for micro_batch in batch.micro_batches]


def fresh_table(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1, 1, 1000, dtype=dtype).sin().requires_grad_()


class Rows:
    """The sampled tokens of a micro-batch, as tensors."""

    def __init__(self, micro_batch: MicroBatch, table: Tensor) -> None:
        rows = torch.from_numpy(np.flatnonzero(micro_batch.trainable_N))
        self.logp = -table[torch.from_numpy(micro_batch.token_ids_N).long()[rows]].exp()
        self.logp_old = torch.from_numpy(micro_batch.logp_old_N)[rows]
        self.advantage = torch.from_numpy(micro_batch.advantage_N)[rows]
        self.kl_coef = torch.from_numpy(micro_batch.kl_coef_N)[rows]
        self.sequence = torch.from_numpy(micro_batch.sequence_N)[rows]
        count = len(micro_batch.sequence_tokens_S)
        numbers = np.full(count, -1) if micro_batch.split_S is None else micro_batch.split_S
        self.split_S = torch.from_numpy(numbers)

    def add_to(self, totals: GapTotals) -> None:
        totals.add(self.logp, self.logp_old, self.split_S[self.sequence])


def trained(
    batches: Sequence[TrainBatch], table: Tensor, *, mask_delta: float | None = MASK_DELTA
) -> dict[str, float]:
    """Accumulate the gradient of a step in `table`, like `keel.trainer.engine`; return metrics."""
    split, seen = (GapTotals(batches[0].split_sequences) for _ in range(2))
    for micro_batch in (first for batch in batches for first in batch.mask_pass):
        Rows(micro_batch, table).add_to(split)
    parts: list[Mapping[str, Metric]] = []
    for batch in batches:
        for micro_batch in batch.micro_batches:
            rows = Rows(micro_batch, table)
            gap = split.means()[rows.split_S] if batch.split_sequences else None
            output = grpo_loss(
                *(rows.logp, rows.logp_old, rows.advantage, rows.sequence),
                sequence_tokens=torch.from_numpy(micro_batch.sequence_tokens_S),
                total_sequences=batch.total_sequences,
                sequence_weight=torch.from_numpy(micro_batch.sequence_weight_S),
                logp_ref=torch.full_like(rows.logp, LOGP_REF),
                kl_coef=rows.kl_coef,
                mask_delta=mask_delta,
                sequence_gap=None if gap is None else torch.where(rows.split_S < 0, torch.nan, gap),
            )
            output.loss.backward()
            rows.add_to(seen)
            parts.append(output.metrics)
    if batches[0].split_sequences and mask_delta is not None:
        parts.append({"mask/logp_gap_max": Max(float(seen.means().max().clamp(min=0)))})
    return values(merge(parts))


def gradient(batches: Sequence[TrainBatch], **how: Any) -> tuple[float, Tensor]:
    """Return loss and gradient."""
    table = fresh_table()
    loss = trained(batches, table, **how)["loss"]
    return loss, table.grad


def oracle(
    groups: Sequence[ScoredGroup], table: Tensor, *, mask_delta: float | None = MASK_DELTA
) -> Result:
    """Return the oracle's loss and metrics for the same policy."""
    answers: list[Answer] = []
    owners: list[int] = []
    for index, group in enumerate(groups):
        for answer, advantage in zip(group.group.trajectories, group.advantages_G, strict=True):
            tokens = [
                Token(
                    logp=-table[int(segment.token_ids_T[t])].double().exp(),
                    logp_old=float(segment.logp_old_T[t]),
                    logp_ref=LOGP_REF,
                    kl_coef=group.group.prompt.kl_coef,
                )
                for segment in answer.segments
                for t in np.flatnonzero(segment.trainable_T)
            ]
            answers.append(Answer(tokens=tokens, advantage=float(advantage)))
            owners.append(index)
    return reference_grpo(answers, groups=owners, mask_delta=mask_delta)
