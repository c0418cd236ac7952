"""Non-finite gradients: the token that is named, and when a run gives up."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from keel.rl.packing import pack
from keel.trainer.nonfinite import (
    NanTracer,
    SkipCounter,
    describe_findings,
)
from tests.rl.rollouts import scored, segment, trajectory


class Layer(nn.Module):
    """Scales the output, and inversely the gradient, by 0 or infinity in some rows."""

    def __init__(self, forward: Tensor, backward: Tensor) -> None:
        super().__init__()
        self.factors = forward, backward

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        forward, backward = self.factors
        inside = hidden * 1
        inside.register_hook(lambda gradient: gradient * backward[:, None])
        return (inside * forward[:, None],)


GROUPS = [scored([trajectory(segment(20 * s, 6), sibling=s) for s in (0, 1)], [0.0, 1.0])]
(BATCH,) = (m for b in pack(GROUPS, ranks=1, micro_batch_tokens=99) for m in b.micro_batches)
TOKENS = len(BATCH.token_ids_N)
SAMPLED = np.flatnonzero(BATCH.trainable_N)


def looked(*, offset: float = 0.0, **changes: tuple[int, float]) -> list[tuple[int, str, bool]]:
    """Findings by row for a network of two layers, of which the second is modified. `forward`,
    `backward`, `slope` and `logp` replace one factor; rows of the last two are sampled tokens."""

    def ones(name: str, count: int = TOKENS) -> Tensor:
        values = torch.ones(count)
        if name in changes:
            values[changes[name][0]] = changes[name][1]
        return values

    layers = [Layer(ones(""), ones("")), Layer(ones("forward"), ones("backward"))]
    look = NanTracer(layers)
    with look.trace(BATCH, 0):
        hidden = torch.ones(1, TOKENS, 2, requires_grad=True)
        for layer in layers:
            (hidden,) = layer(hidden)
        logp_R = -hidden[0, SAMPLED].sum(1) * ones("logp", len(SAMPLED))
        loss = (logp_R * ones("slope", len(SAMPLED))).sum() + offset
        look.observe(logp_R, None, torch.zeros(len(SAMPLED)), loss)
        loss.backward()
    starts = {  # the first row of each segment, by its token ids
        BATCH.token_ids_N[BATCH.segment_N == n].tobytes(): int(np.argmax(BATCH.segment_N == n))
        for n in set(BATCH.segment_N)
    }
    return [(starts[f.token_ids_T.tobytes()] + f.token, f.what, f.certain) for f in look.findings]


def test_first_bad_number_names_token_and_cause() -> None:
    row = int(SAMPLED[2])
    certain = [
        (looked(forward=(9, math.inf)), 9, "not finite from the output of layer 1 on"),
        (looked(logp=(2, math.nan)), row, "log-probability is nan"),
        (looked(slope=(2, math.inf)), row, "slope of the loss is inf"),
        (looked(backward=(row, math.nan)), row, "its gradient is not finite behind layer 0"),
    ]
    for findings, expected, what in certain:
        assert findings[0] == (expected, what, True)


def test_certain_findings_replace_the_steepest() -> None:
    ((row, what, certain),) = looked(slope=(3, 1e30))
    assert row == SAMPLED[3] and "slope of 1e+30" in what and not certain
    ((_, what, certain),) = looked(offset=math.inf)
    assert "the loss of its micro-batch is inf" in what and certain
    looks = [NanTracer([]), NanTracer([])]
    for look, factor in zip(looks, (1.0, math.nan), strict=True):
        with look.trace(BATCH, 0):
            logp = torch.ones(len(SAMPLED), requires_grad=True)
            look.observe(logp, None, torch.zeros(len(SAMPLED)), logp.sum())
            (logp.sum() * factor).backward()
    vague, sure = (look.findings for look in looks)
    assert describe_findings([*vague, *sure], GROUPS) == describe_findings(sure, GROUPS)
    assert describe_findings(vague, GROUPS)[0].startswith("p, completion 1, token ")


def test_skips_in_a_row_end_the_run() -> None:
    skips = SkipCounter(2)
    seen = [skips.count(norm, version) for version, norm in enumerate([1, math.nan, 2, math.inf])]
    assert seen == [False, True, False, True] and not skips.gave_up
    assert skips.count(math.nan, 5)
    assert "2 optimizer steps in a row, the last to version 5" in skips.gave_up
    assert "run.max_skipped_steps" in skips.gave_up
