r"""The lightning indexer: how much each earlier token matters to a query, and what it learns from.

    I_{t,s} = Σ_j w_{t,j} · ReLU(q_{t,j} · k_s)

DeepSeek-V3.2 (2025), Eq. 1. Its loss is Σ_t KL(p_{t,·} ‖ softmax(I_{t,·})), p being the main
attention summed over heads and normalised: over all earlier tokens in the dense warm-up (Eq. 3),
over the selected ones in the sparse stage (Eq. 4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

NONE = -1
"""Entry of a selection that selects nothing."""


def products(left: Tensor, right: Tensor) -> Tensor:
    """Batched products of matrices [B, m, d] and [B, d, n] → [B, m, n] float32, whatever they are
    in: a bfloat16 logit of 20 is off by up to 0.06. Gradients are of their own precision, as other
    matrix products' are."""
    return _Products.apply(left, right)  # type: ignore[return-value]


def own_products(query: Tensor, key: Tensor) -> Tensor:
    """With keys of each query's own: query [B, c, H, d], key [B, c, k, d] → [B, c, H, k]."""
    each = products(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    return each.unflatten(0, query.shape[:2])


class _Products(Function):
    """A GPU multiplies narrow floats into float32; a CPU has to widen them."""

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
    """I of Eq. 1, float32: query [B, c, J, d], weight [B, c, J], key [B, s, d] → [B, c, s]."""
    each = products(query.flatten(1, 2), key.transpose(1, 2)).relu()
    return (weight.float().unsqueeze(2) @ each.unflatten(1, query.shape[1:3])).squeeze(2)


def selected_scores(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """The same with keys of each query's own, key [B, c, k, d] → [B, c, k]."""
    each = own_products(query, key).relu()  # [B, c, J, k]
    return (weight.float().unsqueeze(2) @ each).squeeze(2)


def select(first: int, scores: Tensor, top_k: int) -> Tensor:
    """The `top_k` largest of each query's scores [B, c, s] among those up to its own, in no order:
    [B, c, min(k, s)] int32, `NONE` where there are fewer. `first`: number of the first query.

    Of equal scores the later token's counts as larger (where no head of the indexer cares, scores
    are exactly 0), so that a selection does not depend on what it is computed together with.
    """
    seen = up_to_own(first, scores)
    bits = (scores.masked_fill(~seen, -torch.inf) + 0.0).view(torch.int32)  # and no −0.0
    ordered = bits.where(bits >= 0, bits ^ 0x7FFFFFFF).long() << 32
    ordered += torch.arange(scores.shape[2], device=scores.device)
    chosen = ordered.topk(min(top_k, scores.shape[2]), sorted=False).indices
    queries = torch.arange(first, first + scores.shape[1], device=scores.device)
    return chosen.masked_fill(chosen > queries[:, None], NONE).int()


def up_to_own(first: int, scores: Tensor) -> Tensor:
    """[c, s]: whether a query, the first of which has the number `first`, may see a key."""
    queries = torch.arange(first, first + scores.shape[1], device=scores.device)
    return torch.arange(scores.shape[2], device=scores.device) <= queries[:, None]


def divergence(target: Tensor, scores: Tensor, among: Tensor) -> Tensor:
    """KL(target ‖ softmax(scores)) over the entries `among`, in nats: [..., s] → [...], float32.

    `target`: probabilities, 0 elsewhere. No gradient reaches it.
    """
    target = target.detach().float()
    logs = scores.masked_fill(~among, -torch.inf).log_softmax(-1).masked_fill(~among, 0.0)
    return torch.xlogy(target, target).sum(-1) - (target * logs).sum(-1)


def gather_keys(keys: Tensor, chosen: Tensor) -> Tensor:
    """keys [B, s, d], chosen [B, c, k] (`NONE`: any) → [B, c, k, d]."""
    return _Gather.apply(keys, chosen)  # type: ignore[return-value]


class _Gather(Function):
    """Its gradient is summed in float32: a key may be selected by every query."""

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
