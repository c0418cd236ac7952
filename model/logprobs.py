"""From packed micro-batches to log-probabilities: the support head, and the one shift.

A packed row holds token t at position t, and everything recorded about sampling it (probability,
sampling mask, advantage) is stored at t as well. But the network predicts token t from what it
computed at position t−1. `head_inputs` is the only place in the project where the two meet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.model.device import to_device
from keel.model.head.support import support_head
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
    r"""Log-probability of each target over its sampling mask.

        log π(o) = z_o/τ − logsumexp_{v∈S} z_v/τ,   z = W h

    Exact, and differentiable in `hidden` and `weight`, at O(nnz·d) where sampling masks are short.
    Keep Sampling Mask, DeepSeek-V3.2 (2025), section 3.1.

    Shapes: hidden [T, d], row t predicting targets[t]; weight [V, d]; targets [T]; kept_ids [nnz];
    kept_offsets [T+1]. Token t kept `kept_ids[kept_offsets[t]:kept_offsets[t+1]]`; an empty span
    means the whole vocabulary. Returns [T] float32.

    The integer tensors may be on the CPU with `hidden` on a GPU; nothing then waits for the GPU.
    Raises ValueError as `keel.model.head.support.support_head`, which also gives the entropy.
    """
    return support_head(hidden, weight, targets, kept_ids, kept_offsets, temperature=temperature)[0]


class Head(Protocol):
    """A module that scores rows of hidden states, such as `keel.model.head.module.SupportHead`."""

    def __call__(
        self,
        hidden: Tensor,
        targets: Tensor,
        kept_ids: Tensor,
        kept_offsets: Tensor,
        *,
        temperature: float,
        memo: dict[Any, Any],
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """What the head needs about the n trainable tokens of a micro-batch, in host memory.

    It depends on the micro-batch alone: make it once for all passes over the batch."""

    rows: Tensor
    """[n] int64, the trainable tokens t, ascending."""
    hidden_rows: Tensor
    """[n] int64, t−1: where the network predicted them."""
    targets: Tensor
    """[n] int64."""
    kept_ids: Tensor
    """[nnz] int32."""
    kept_offsets: Tensor
    """[n+1] int64; all spans are empty where sampling was not truncated."""
    probes: Tensor
    """[m] int64, indices into the n: some trainable tokens of each segment, for `kept_mass`. Which
    is up to its tokens alone, however the micro-batch is packed and cut."""
    probe_weight: Tensor
    """[m] float32, w_i / |o_i| of Eq. 5 times the trainable tokens of its segment for which a probe
    stands: a sum with it over the probes estimates one over all tokens."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What heads found out about the above in an earlier pass; see `support_head`."""


def trainable_rows(batch: MicroBatch) -> NDArray[np.int64]:
    """[n] indices of the tokens that the policy sampled, in the order of `policy_logprobs`.

    Index `logp_old_N`, `advantage_N`, `kl_coef_N` and `sequence_N` with it.
    """
    return np.flatnonzero(batch.trainable_N)


def head_inputs(
    batch: MicroBatch,
    start: int = 0,
    stop: int | None = None,
    *,
    probes: int = 1,
) -> HeadInputs:
    """Bring targets, sampling masks and the positions that predict them together.

    A trainable token is never the first of its segment (`MicroBatch` checks), so position t−1
    belongs to the same segment. `start` and `stop` bound the positions t−1, not the tokens t, for a
    rank that computes those hidden states only; `hidden_rows` then count from `start`.
    `probes`: how many of a segment's trainable tokens are, at most; evenly spaced.
    """
    every, stop = trainable_rows(batch), len(batch.token_ids_N) if stop is None else stop
    rows = every[(every > start) & (every <= stop)]
    probed, stands_for = _probed(batch, every, probes)
    here = (probed > start) & (probed <= stop)
    probed, stands_for = probed[here], stands_for[here]
    owner = batch.sequence_N[probed]
    weight = stands_for * batch.sequence_weight_S[owner] / batch.sequence_tokens_S[owner]
    kept = _spans(batch.sampling_mask, rows, len(batch.token_ids_N))
    return HeadInputs(
        rows=torch.from_numpy(rows),
        hidden_rows=torch.from_numpy(rows - 1 - start),
        targets=torch.from_numpy(batch.token_ids_N[rows].astype(np.int64)),
        kept_ids=torch.from_numpy(kept.ids),
        kept_offsets=torch.from_numpy(kept.offsets),
        probes=torch.from_numpy(np.searchsorted(rows, probed)),
        probe_weight=torch.from_numpy(weight.astype(np.float32)),
    )


def policy_logprobs(
    hidden_ND: Tensor,
    head: Head,
    batch: MicroBatch | HeadInputs,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """log π_θ of the n trainable tokens of a micro-batch, and the entropy of their sampling masks.

    Args:
        hidden_ND: final hidden states of the packed row, [N, d] or [1, N, d].
        head: the model's support head.
        batch: the micro-batch, or its `head_inputs` where several passes share them.
        temperature: the τ that the rollout engine sampled with.

    Returns:
        Two [n] float32 tensors in the order of `trainable_rows`; the entropy has no gradient.
        With no trainable token (a micro-batch that only keeps ranks in step) both are empty, and
        the first still leads to `hidden_ND` and the head with zero gradients, so that the hooks
        of ZeRO and of data parallelism run: put its sum into the loss.
    """
    hidden_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
    inputs = batch if isinstance(batch, HeadInputs) else head_inputs(batch)
    if isinstance(batch, MicroBatch) and len(hidden_ND) != len(batch.token_ids_N):
        raise ValueError(
            f"hidden_ND has {len(hidden_ND)} rows for the {len(batch.token_ids_N)} tokens of the "
            "micro-batch"
        )
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
    r"""[m] float32: log Σ_{v∈S} π(v), what the policy gives to a whole sampling mask, of each of
    the tokens `HeadInputs.probes`.

    logp: [n] as `policy_logprobs` has found them, inside the masks. With the same over the whole
    vocabulary, π(o) = π(o | S) · Σ_{v∈S} π(v); gradient flows through both.

    Σ at the time of sampling is `top_p` or more. What a policy moves out of S later changes no
    ratio over S: this is where it shows (`keel.rl.offpolicy.kept_mass_shortfall`).
    """
    hidden_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
    picked = inputs.probes
    whole, _ = head(
        hidden_ND.index_select(0, to_device(inputs.hidden_rows[picked], hidden_ND.device)),
        inputs.targets[picked],
        inputs.kept_ids[:0],
        torch.zeros(len(picked) + 1, dtype=torch.int64),
        temperature=temperature,
        memo={},
    )
    return whole - logp[to_device(picked, logp.device)]


def _probed(
    batch: MicroBatch, rows: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of the `rows` of each segment at most so many, evenly spaced from one that is drawn by what
    its tokens are; and how many rows of its segment each stands for."""
    _, first, owner, counts = np.unique(
        batch.segment_N[rows], return_index=True, return_inverse=True, return_counts=True
    )
    if not len(first):
        return rows, np.zeros(0)
    stride = -(-counts // most)
    drawn = np.add.reduceat(batch.token_ids_N[rows].astype(np.int64), first)
    probed = (np.arange(len(rows)) - first[owner] - drawn[owner]) % stride[owner] == 0
    chosen = owner[probed]
    return rows[probed], (counts / np.bincount(chosen))[chosen]


def _spans(kept: SamplingMasks | None, rows: NDArray[np.int64], tokens: int) -> SamplingMasks:
    """The spans of `rows`; empty ones without sampling masks."""
    if kept is None:
        return SamplingMasks.empty(len(rows))
    sizes = kept.sizes()
    wanted = np.zeros(tokens, np.bool_)
    wanted[rows] = True
    # A view of all ids in the usual case that only sampled tokens have any.
    ids = kept.ids if not sizes[~wanted].any() else kept.ids[np.repeat(wanted, sizes)]
    return SamplingMasks(
        ids=ids, offsets=np.concatenate([np.zeros(1, np.int64), sizes[rows].cumsum()])
    )
