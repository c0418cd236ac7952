"""The lightning indexer, which scores how relevant earlier tokens are for a query, and its loss.

    I_{t,s} = Σ_j w_{t,j} · ReLU(q_{t,j} · k_s)

DeepSeek-V3.2 (2025), Eq. 1. The loss is Σ_t KL(p_{t,·} ‖ softmax(I_{t,·})), where p is the main
attention, summed over heads and normalised: over all earlier tokens in the dense warm-up (Eq. 3),
over the selected ones in the sparse stage (Eq. 4).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

NONE = -1
"""Padding value in a selection."""


def matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply batches of matrices, [B, m, d] · [B, d, n] → [B, m, n], with a float32 result. In
    bfloat16, a logit of 20 would be off by up to 0.06. Gradients have the dtype of the inputs."""
    return _MatmulFloat32.apply(left, right)  # type: ignore[return-value]


def matmul_own_keys(query: Tensor, key: Tensor) -> Tensor:
    """Multiply each query by its own keys: query [B, c, H, d], key [B, c, k, d] → [B, c, H, k]."""
    each = matmul_float32(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    return each.unflatten(0, query.shape[:2])


class _MatmulFloat32(Function):
    """Matrix product with a float32 result. GPUs multiply half-precision inputs directly; on a CPU,
    they are cast first."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        if left.dtype == torch.float32 or not left.is_cuda:
            return left.float() @ right.float()
        return torch.bmm(left, right, out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        grad = grad.to(left.dtype)
        return grad @ right.transpose(1, 2), left.transpose(1, 2) @ grad


def index_scores(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """Compute the index scores I (DeepSeek-V3.2, 2025, Eq. 1) in float32: query [B, c, J, d],
    weight [B, c, J], key [B, s, d] → [B, c, s]."""
    each = matmul_float32(query.flatten(1, 2), key.transpose(1, 2)).relu()
    return (weight.float().unsqueeze(2) @ each.unflatten(1, query.shape[1:3])).squeeze(2)


def selected_scores(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """Compute the index scores I when each query has its own keys: key [B, c, k, d] → [B, c, k]."""
    each = matmul_own_keys(query, key).relu()  # [B, c, J, k]
    return (weight.float().unsqueeze(2) @ each).squeeze(2)


def select_top_keys(first: int, scores: Tensor, top_k: int) -> Tensor:
    """Select the `top_k` highest scores [B, c, s] of each query among the keys up to its own
    position. Returns the positions [B, c, min(k, s)] int32, in no particular order and padded with
    `NONE`. `first` is the position of the first query. Ties go to the later token, so that the
    selection does not depend on batching. Ties do occur, because a score is exactly 0 if no head
    is active."""
    seen = causal_mask(first, scores)
    # Adding 0.0 turns −0.0 into 0.0.
    bits = (scores.masked_fill(~seen, -torch.inf) + 0.0).view(torch.int32)
    ordered = bits.where(bits >= 0, bits ^ 0x7FFFFFFF).long() << 32
    ordered += torch.arange(scores.shape[2], device=scores.device)
    chosen = ordered.topk(min(top_k, scores.shape[2]), sorted=False).indices
    queries = torch.arange(first, first + scores.shape[1], device=scores.device)
    return chosen.masked_fill(chosen > queries[:, None], NONE).int()


def causal_mask(first: int, scores: Tensor) -> Tensor:
    """Build a mask [c, s] that is True where a query may attend to a key. `first` is the position
    of the first query."""
    queries = torch.arange(first, first + scores.shape[1], device=scores.device)
    return torch.arange(scores.shape[2], device=scores.device) <= queries[:, None]


def kl_divergence(target: Tensor, scores: Tensor, among: Tensor) -> Tensor:
    """Compute KL(target ‖ softmax(scores)) over the entries where `among` is True, in nats: [...,
    s] → [...]. `target` contains probabilities, which are 0 everywhere else and receive no
    gradient."""
    target = target.detach().float()
    logs = scores.masked_fill(~among, -torch.inf).log_softmax(-1).masked_fill(~among, 0.0)
    return torch.xlogy(target, target).sum(-1) - (target * logs).sum(-1)


def gather_keys(keys: Tensor, chosen: Tensor) -> Tensor:
    """Gather the selected keys: keys [B, s, d], chosen [B, c, k] → [B, c, k, d]. Keys for `NONE`
    entries of `chosen` are arbitrary."""
    return _GatherKeys.apply(keys, chosen)  # type: ignore[return-value]


class _GatherKeys(Function):
    """Gathers keys and sums their gradients in float32, because many queries may select the same
    key."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, chosen: Tensor) -> Tensor:
        rows, count, length = chosen.shape[0], keys.shape[1], keys.shape[0]
        offsets = count * torch.arange(length, device=keys.device)
        at = (chosen.long().clamp(min=0) + offsets.view(rows, 1, 1)).flatten()
        ctx.save_for_backward(at)
        ctx.shape = keys.shape
        return keys.reshape(-1, keys.shape[-1]).index_select(0, at).view(*chosen.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        rows, count, width = ctx.shape
        total = grad.new_zeros(rows * count, width, dtype=torch.float32)
        total.index_add_(0, at, grad.reshape(-1, width).float())
        return total.view(rows, count, width).to(grad.dtype), None
