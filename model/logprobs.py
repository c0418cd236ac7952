"""Compute log-probabilities for packed micro-batches.

A packed row stores everything about token t (its probability, sampling mask and advantage) at
position t, but the network predicts token t at position t−1. `head_inputs` accounts for this shift,
as do `Inputs.of` and `seen_tokens` in `keel.trainer.engine.policy`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.model.head.support import support_head
from keel.model.torch_internals import to_device
from keel.rl.packing import MicroBatch
from keel.rl.types import SamplingMasks


def support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the log-probability of each target over its sampling mask.

        log π(o) = z_o/τ − logsumexp_{v∈S} z_v/τ,   z = W h

    This implements Keep Sampling Mask (DeepSeek-V3.2, 2025, section 3.1), with exact gradients for
    `hidden` and `weight`. Returns [T] float32. See `keel.model.head.support.support_head`.
    """
    return support_head(hidden, weight, targets, kept_ids, kept_offsets, temperature=temperature)[0]


Head = Callable[..., tuple[Tensor, Tensor]]
"""Interface of `keel.model.head.support.SupportHead`."""


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """Head inputs for the n trainable tokens in a micro-batch, in host memory. They depend only on
    the micro-batch, so all forward passes over it can share them."""

    rows: Tensor
    """[n] int64, positions t of trainable tokens, ascending."""
    hidden_rows: Tensor
    """[n] int64, positions t−1, where the tokens are predicted."""
    targets: Tensor
    kept_ids: Tensor
    kept_offsets: Tensor
    """[n+1] int64. If sampling was not truncated, all masks are empty."""
    probes: Tensor
    """[m] int64, indices into the n tokens: a few tokens per segment for `kept_mass`. The choice
    depends only on the segment's sampled tokens, and not on packing."""
    probe_weight: Tensor
    """[m] float32, weight w_i / |o_i| from Eq. 5, multiplied by the number of tokens that the probe
    represents. A weighted sum over probes therefore estimates a sum over all tokens."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


def trainable_rows(batch: MicroBatch) -> NDArray[np.int64]:
    """Return the positions [n] of the sampled tokens, in the same order as `policy_logprobs`. Use
    them to index `logp_old_N`, `advantage_N`, `kl_coef_N` and `sequence_N`."""
    return np.flatnonzero(batch.trainable_N)


def head_inputs(
    batch: MicroBatch, start: int = 0, stop: int | None = None, *, probes: int = 1
) -> HeadInputs:
    """Collect the targets and sampling masks of the trainable tokens, and the positions that
    predict them. A trainable token t is never the first in its segment, so the position t−1 that
    predicts it is in the same segment. If a rank computes only some of the hidden states, `start`
    and `stop` give its range of positions t−1, and `hidden_rows` are relative to `start`. `probes`
    is the maximum number of evenly spaced probes per segment."""
    trainable = trainable_rows(batch)
    stop = len(batch.token_ids_N) if stop is None else stop
    rows = trainable[(trainable > start) & (trainable <= stop)]
    probed, represented = _choose_probes(batch, trainable, probes)
    here = (probed > start) & (probed <= stop)
    probed, represented = probed[here], represented[here]
    owner = batch.sequence_N[probed]
    weight = represented * batch.sequence_weight_S[owner] / batch.sequence_tokens_S[owner]
    masks = _select_masks(batch.sampling_mask, rows, len(batch.token_ids_N))
    return HeadInputs(
        rows=torch.from_numpy(rows),
        hidden_rows=torch.from_numpy(rows - 1 - start),
        targets=torch.from_numpy(batch.token_ids_N[rows].astype(np.int64)),
        kept_ids=torch.from_numpy(masks.ids),
        kept_offsets=torch.from_numpy(masks.offsets),
        probes=torch.from_numpy(np.searchsorted(rows, probed)),
        probe_weight=torch.from_numpy(weight.astype(np.float32)),
    )


def policy_logprobs(
    hidden_ND: Tensor, head: Head, inputs: HeadInputs, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute log π_θ of the n trainable tokens in a micro-batch, and the entropy over their masks.

    `hidden_ND` are the final hidden states of the packed row, [N, d] or [1, N, d]. Returns two [n]
    float32 tensors in the order of `trainable_rows`. The entropy has no gradient. On a rank with
    only padding, both are empty, but the first one is still part of a graph with zero gradients.
    Include its sum in the loss, so that the ZeRO and data-parallel hooks run.
    """
    hidden_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
    return head(
        hidden_ND.index_select(0, to_device(inputs.hidden_rows, hidden_ND.device)),
        inputs.targets,
        inputs.kept_ids,
        inputs.kept_offsets,
        temperature=temperature,
        memo=inputs.memo,
    )


def kept_mass(
    hidden_ND: Tensor, head: Head, inputs: HeadInputs, logp: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """For each probe, compute log Σ_{v∈S} π(v), the log-probability of the whole sampling mask.
    Returns [m].

    `logp` [n] comes from `policy_logprobs` and is normalized over the masks. A second pass covers
    the whole vocabulary, since π(o) = π(o | S) · Σ_{v∈S} π(v), and gradients flow through both. See
    `keel.rl.offpolicy.kept_mass_shortfall`.
    """
    hidden_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
    probes = inputs.probes
    whole, _ = head(
        hidden_ND.index_select(0, to_device(inputs.hidden_rows[probes], hidden_ND.device)),
        inputs.targets[probes],
        inputs.kept_ids[:0],
        torch.zeros(len(probes) + 1, dtype=torch.int64),
        temperature=temperature,
        memo={},
    )
    return whole - logp[to_device(probes, logp.device)]


def _choose_probes(
    batch: MicroBatch, rows: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Choose up to `most` evenly spaced rows in each segment, and count how many rows each of them
    represents. The first chosen row depends on the sum of the segment's sampled token ids."""
    _, first, owner, counts = np.unique(
        batch.segment_N[rows], return_index=True, return_inverse=True, return_counts=True
    )
    if not len(first):
        return rows, np.zeros(0)
    stride = -(-counts // most)
    offset = np.add.reduceat(batch.token_ids_N[rows].astype(np.int64), first)
    probed = (np.arange(len(rows)) - first[owner] - offset[owner]) % stride[owner] == 0
    chosen = owner[probed]
    return rows[probed], (counts / np.bincount(chosen))[chosen]


def _select_masks(
    masks: SamplingMasks | None, rows: NDArray[np.int64], tokens: int
) -> SamplingMasks:
    if masks is None:
        return SamplingMasks.empty(len(rows))
    sizes = masks.sizes()
    selected = np.zeros(tokens, np.bool_)
    selected[rows] = True
    # Usually only sampled tokens have spans; then no copy is needed.
    ids = masks.ids if not sizes[~selected].any() else masks.ids[np.repeat(selected, sizes)]
    return SamplingMasks(
        ids=ids, offsets=np.concatenate([np.zeros(1, np.int64), sizes[rows].cumsum()])
    )
