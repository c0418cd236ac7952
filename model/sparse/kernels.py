"""Triton kernels for sparse attention: index scores, and attention to selected keys.

Tensors: query [N, H, r + e] and keys [S, r + e] with the latent part of size r first, which is also
the value; `chosen` [N, k] int32 holds the row of each selected key, or -1. Logits, softmax and sums
are float32; products have the inputs' precision, as in PyTorch. A program processes one query and a
part of its heads or of its selected keys. Gradients of keys are summed by atomic additions, so
their last bits differ between runs, as with `index_add_`.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false
# (Triton types neither the launch options of a kernel nor arithmetic inside one.)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_QUERIES, _KEYS = 64, 128
"""Tile of `index_scores`."""
_HEADS = 64
"""Largest number of heads in a program of the attention kernels."""
_LOOPED = 32
"""Number of heads that a program of the other kernels processes at a time."""
_FORWARD = {"KEYS": 64, "num_warps": 8, "num_stages": 2}
_QUERY_GRADIENT = {"KEYS": 32, "num_warps": 8, "num_stages": 1}
_KEY_GRADIENT = {"KEYS": 64, "num_warps": 8, "num_stages": 2}
_SHARES = {"KEYS": 128, "num_warps": 8, "num_stages": 2}
_INDEX = {"KEYS": 64, "num_warps": 4}


@triton.jit
def _index_scores(
    query, weight, key, out, first, queries, keys,
    HEADS: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the index scores of a tile of queries and keys (Eq. 1)."""
    row = tl.program_id(2).to(tl.int64)
    q = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    k = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    live_q, live_k = q < queries, k < keys
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    if tl.program_id(0) * KEYS <= first + tl.program_id(1) * QUERIES + QUERIES - 1:
        d = tl.arange(0, SIZE)
        k_rows = key + (row * keys + k)[:, None] * SIZE + d[None, :]
        key_tile = tl.trans(tl.load(k_rows, mask=live_k[:, None], other=0))
        at = (row * queries + q) * HEADS
        for head in range(HEADS):
            q_rows = query + (at + head)[:, None] * SIZE + d[None, :]
            tile = tl.load(q_rows, mask=live_q[:, None], other=0)
            share = tl.load(weight + at + head, mask=live_q, other=0)
            each = tl.dot(tile, key_tile, input_precision="ieee")
            total += share[:, None] * tl.maximum(each, 0.0, propagate_nan=tl.PropagateNan.ALL)
    place = out + (row * queries + q)[:, None] * keys + k[None, :]
    tl.store(place, total, mask=live_q[:, None] & live_k[None, :])


def index_scores(first: int, query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """Compute the index scores (Eq. 1): query [B, c, J, d], weight [B, c, J] float32, key [B, s, d]
    → [B, c, s] float32. Scores of keys after a query are arbitrary. `first` is the position of the
    first query."""
    (rows, queries, heads, size), keys = query.shape, key.shape[1]
    out = torch.empty(rows, queries, keys, dtype=torch.float32, device=query.device)
    grid = (triton.cdiv(keys, _KEYS), triton.cdiv(queries, _QUERIES), rows)
    _index_scores[grid](
        query.contiguous(), weight.contiguous(), key.contiguous(), out, first, queries, keys,
        HEADS=heads, SIZE=size, QUERIES=_QUERIES, KEYS=_KEYS, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _token_and_part(count, SIZE: tl.constexpr):
    """Return this program's token, and the first of the heads or keys that it processes."""
    parts = tl.cdiv(count, SIZE)
    program = tl.program_id(0)
    return (program // parts).to(tl.int64), program % parts * SIZE


@triton.jit
def _load_keys(key, chosen, at, top_k, RANK: tl.constexpr, ROPE: tl.constexpr):
    """Load the latent and rotary parts of the selected keys in places `at`, and their rows."""
    row = tl.load(chosen + at, mask=at < top_k, other=-1)
    known = row >= 0
    start = key + row.to(tl.int64)[:, None] * (RANK + ROPE)
    latent = tl.load(start + tl.arange(0, RANK)[None, :], mask=known[:, None], other=0)
    turned = tl.load(start + RANK + tl.arange(0, ROPE)[None, :], mask=known[:, None], other=0)
    return latent, turned, row


@triton.jit
def _attend(
    query, key, chosen, last, out, lse, scale, top_k, heads,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend to the selected keys with an online softmax (Eq. 2)."""
    token, first = _token_and_part(heads, HEADS)
    head = first + tl.arange(0, HEADS)
    live, at = head < heads, token * heads + head
    r, e = tl.arange(0, RANK), tl.arange(0, ROPE)
    own = query + at[:, None] * (RANK + ROPE)
    q_latent = tl.load(own + r[None, :], mask=live[:, None], other=0)
    q_turned = tl.load(own + RANK + e[None, :], mask=live[:, None], other=0)
    most = tl.full([HEADS], -1e30, tl.float32)  # finite, as a tile may hold no key
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, RANK], tl.float32)
    for start in range(0, tl.load(last + token), KEYS):
        place = start + tl.arange(0, KEYS)
        latent, turned, row = _load_keys(key, chosen + token * top_k, place, top_k, RANK, ROPE)
        logits = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        logits = tl.dot(q_turned, tl.trans(turned), logits, input_precision="ieee")
        logits = tl.where((row >= 0)[None, :], logits * scale, float("-inf"))
        larger = tl.maximum(most, tl.max(logits, 1))
        shares = tl.exp(logits - larger[:, None])
        kept = tl.exp(most - larger)
        total = total * kept + tl.sum(shares, 1)
        shares = shares.to(latent.dtype)
        mixed = tl.dot(shares, latent, mixed * kept[:, None], input_precision="ieee")
        most = larger
    mixed = mixed / total[:, None]
    tl.store(out + at[:, None] * RANK + r[None, :], mixed.to(out.dtype.element_ty), live[:, None])
    tl.store(lse + at, most + tl.log(total), live)


@triton.jit
def _load_pair(
    query, grad, lse, token, first, heads,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Load latent queries and output gradients as one tile, because separate products need more
    registers than there are. Also returns the rotary queries and the logarithms of the softmax's
    denominators."""
    head, pair = first + tl.arange(0, HEADS), first + tl.arange(0, 2 * HEADS) % HEADS
    live, at, row = head < heads, token * heads + head, token * heads + pair
    turned = query + at[:, None] * (RANK + ROPE) + RANK + tl.arange(0, ROPE)[None, :]
    turned = tl.load(turned, mask=live[:, None], other=0)
    log_sum = tl.load(lse + at, mask=live, other=float("inf"))
    is_query = tl.arange(0, 2 * HEADS) < HEADS
    start = tl.where(is_query, query + row * (RANK + ROPE), grad + row * RANK)
    tile = start[:, None] + tl.arange(0, RANK)[None, :]
    return tl.load(tile, mask=(pair < heads)[:, None], other=0), turned, log_sum


@triton.jit
def _query_gradient(
    query, key, chosen, last, out, lse, grad, delta, grad_query, scale, top_k, heads,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the queries' gradients. Also stores the dot product of each output and its gradient
    in `delta`, which `_key_gradient` needs."""
    token, first = _token_and_part(heads, HEADS)
    head = first + tl.arange(0, HEADS)
    live, at, r = head < heads, token * heads + head, tl.arange(0, RANK)
    value = tl.load(out + at[:, None] * RANK + r[None, :], mask=live[:, None], other=0)
    upstream = tl.load(grad + at[:, None] * RANK + r[None, :], mask=live[:, None], other=0)
    mean = tl.sum(value.to(tl.float32) * upstream.to(tl.float32), 1)
    tl.store(delta + at, mean, live)
    pair, q_turned, log_sum = _load_pair(query, grad, lse, token, first, heads, RANK, ROPE, HEADS)
    latents = tl.zeros([HEADS, RANK], tl.float32)
    turns = tl.zeros([HEADS, ROPE], tl.float32)
    for start in range(0, tl.load(last + token), KEYS):
        place = start + tl.arange(0, KEYS)
        latent, turned, row = _load_keys(key, chosen + token * top_k, place, top_k, RANK, ROPE)
        each = tl.dot(pair, tl.trans(latent), input_precision="ieee")
        logits, slope = tl.split(tl.permute(tl.reshape(each, [2, HEADS, KEYS]), (1, 2, 0)))
        logits += tl.dot(q_turned, tl.trans(turned), input_precision="ieee")
        shares = tl.where((row >= 0)[None, :], tl.exp(logits * scale - log_sum[:, None]), 0.0)
        slope = (shares * (slope - mean[:, None]) * scale).to(latent.dtype)
        latents = tl.dot(slope, latent, latents, input_precision="ieee")
        turns = tl.dot(slope, turned, turns, input_precision="ieee")
    into = grad_query + at[:, None] * (RANK + ROPE)
    kind = grad_query.dtype.element_ty
    tl.store(into + r[None, :], latents.to(kind), live[:, None])
    tl.store(into + RANK + tl.arange(0, ROPE)[None, :], turns.to(kind), live[:, None])


@triton.jit
def _key_gradient(
    query, key, chosen, last, lse, grad, delta, grad_key, scale, top_k, heads,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add one query's gradients to those of the keys that it selected."""
    token, start = _token_and_part(top_k, KEYS)
    if start >= tl.load(last + token):
        return
    place = start + tl.arange(0, KEYS)
    latent, turned, row = _load_keys(key, chosen + token * top_k, place, top_k, RANK, ROPE)
    latents = tl.zeros([KEYS, RANK], tl.float32)
    turns = tl.zeros([KEYS, ROPE], tl.float32)
    for first in range(0, heads, HEADS):
        pair, q_turned, log_sum = _load_pair(
            query, grad, lse, token, first, heads, RANK, ROPE, HEADS
        )
        head = first + tl.arange(0, HEADS)
        mean = tl.load(delta + token * heads + head, mask=head < heads, other=0)
        each = tl.dot(latent, tl.trans(pair), input_precision="ieee")
        logits, slope = tl.split(tl.permute(tl.reshape(each, [KEYS, 2, HEADS]), (0, 2, 1)))
        logits += tl.dot(turned, tl.trans(q_turned), input_precision="ieee")
        shares = tl.exp(logits * scale - log_sum[None, :])
        slope = (shares * (slope - mean[None, :]) * scale).to(latent.dtype)
        each = tl.permute(tl.join(slope, shares.to(latent.dtype)), (0, 2, 1))
        each = tl.reshape(each, [KEYS, 2 * HEADS])
        latents = tl.dot(each, pair, latents, input_precision="ieee")
        turns = tl.dot(slope, q_turned, turns, input_precision="ieee")
    known = (row >= 0)[:, None]
    into = grad_key + row.to(tl.int64)[:, None] * (RANK + ROPE)
    tl.atomic_add(into + tl.arange(0, RANK)[None, :], latents, mask=known, sem="relaxed")
    tl.atomic_add(into + RANK + tl.arange(0, ROPE)[None, :], turns, mask=known, sem="relaxed")


@triton.jit
def _mean_shares(
    query, key, chosen, lse, out, scale, top_k, heads,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Average the attention to each selected key over the heads."""
    token, start = _token_and_part(top_k, KEYS)
    place = start + tl.arange(0, KEYS)
    r, e = tl.arange(0, RANK), tl.arange(0, ROPE)
    latent, turned, row = _load_keys(key, chosen + token * top_k, place, top_k, RANK, ROPE)
    total = tl.zeros([KEYS], tl.float32)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        live, at = head < heads, token * heads + head
        own = query + at[:, None] * (RANK + ROPE)
        q_latent = tl.load(own + r[None, :], mask=live[:, None], other=0)
        q_turned = tl.load(own + RANK + e[None, :], mask=live[:, None], other=0)
        logits = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
        logits = tl.dot(turned, tl.trans(q_turned), logits, input_precision="ieee")
        log_sum = tl.load(lse + at, mask=live, other=float("inf"))
        total += tl.sum(tl.exp(logits * scale - log_sum[None, :]), 1)
    total = tl.where(row >= 0, total / heads, 0.0)
    tl.store(out + token * top_k + place, total, mask=place < top_k)


def _sizes(query: Tensor, rank: int, heads: int) -> dict[str, Any]:
    count = min(heads, max(16, triton.next_power_of_2(query.shape[1])))
    return {"RANK": rank, "ROPE": query.shape[-1] - rank, "HEADS": count}


class _SparseAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, chosen: Tensor, scale: float, rank: int
    ) -> tuple[Tensor, Tensor]:
        query, key, chosen = query.contiguous(), key.contiguous(), chosen.contiguous()
        (tokens, heads, _), top_k = query.shape, chosen.shape[1]
        out = query.new_empty(tokens, heads, rank)
        lse = query.new_empty(tokens, heads, dtype=torch.float32)
        sizes = _sizes(query, rank, _HEADS)
        grid = (tokens * triton.cdiv(heads, sizes["HEADS"]),)
        places = torch.arange(1, top_k + 1, dtype=torch.int32, device=query.device)
        last = places.where(chosen >= 0, 0).amax(1)
        _attend[grid](query, key, chosen, last, out, lse, scale, top_k, heads, **sizes, **_FORWARD)
        ctx.save_for_backward(query, key, chosen, last, out, lse)
        ctx.scale, ctx.rank = scale, rank
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, chosen, last, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        (tokens, heads, _), top_k = query.shape, chosen.shape[1]
        delta, grad_query = torch.empty_like(lse), torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        numbers = ctx.scale, top_k, heads
        sizes = _sizes(query, ctx.rank, _HEADS)
        _query_gradient[(tokens * triton.cdiv(heads, sizes["HEADS"]),)](
            query, key, chosen, last, out, lse, grad, delta, grad_query, *numbers,
            **sizes, **_QUERY_GRADIENT,
        )  # fmt: skip
        sizes = _sizes(query, ctx.rank, _LOOPED)
        _key_gradient[(tokens * triton.cdiv(top_k, _KEY_GRADIENT["KEYS"]),)](
            query, key, chosen, last, lse, grad, delta, grad_key, *numbers,
            **sizes, **_KEY_GRADIENT,
        )  # fmt: skip
        return grad_query, grad_key.to(key.dtype), None, None, None


def sparse_attention(
    query: Tensor, key: Tensor, chosen: Tensor, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """Attend to the selected keys (Eq. 2). Returns the outputs [N, H, r] and the logarithms of the
    softmax's denominators [N, H] float32, which have no gradient."""
    return _SparseAttention.apply(query, key, chosen, scale, rank)  # type: ignore[return-value]


@torch.no_grad()
def mean_shares(
    query: Tensor, key: Tensor, chosen: Tensor, lse: Tensor, scale: float, rank: int
) -> Tensor:
    """Return the mean over heads of the attention to each selected key [N, k] float32, with 0 for
    missing ones. `lse` comes from `sparse_attention`."""
    query, key, chosen = query.contiguous(), key.contiguous(), chosen.contiguous()
    (tokens, heads, _), top_k = query.shape, chosen.shape[1]
    out = torch.empty(tokens, top_k, dtype=torch.float32, device=query.device)
    sizes = _sizes(query, rank, _LOOPED)
    grid = (tokens * triton.cdiv(top_k, _SHARES["KEYS"]),)
    _mean_shares[grid](query, key, chosen, lse, out, scale, top_k, heads, **sizes, **_SHARES)
    return out


@triton.jit
def _load_index(
    query, weight, key, chosen, at, top_k, heads, SIZE: tl.constexpr, HEADS: tl.constexpr
):
    """Load a query's index heads and weights, and the index keys in places `at` and their rows."""
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HEADS), tl.arange(0, SIZE)
    own = query + (token * heads + head)[:, None] * SIZE + d[None, :]
    tile = tl.load(own, mask=(head < heads)[:, None], other=0)
    share = tl.load(weight + token * heads + head, mask=head < heads, other=0)
    row = tl.load(chosen + token * top_k + at, mask=at < top_k, other=-1)
    keys = key + row.to(tl.int64)[:, None] * SIZE + d[None, :]
    return tile, share, tl.load(keys, mask=(row >= 0)[:, None], other=0), row


@triton.jit
def _selected_scores(
    query, weight, key, chosen, out, top_k, heads,
    SIZE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the index scores of the selected keys (Eq. 1)."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, top_k, KEYS):
        at = start + tl.arange(0, KEYS)
        tile, share, keys, _ = _load_index(
            query, weight, key, chosen, at, top_k, heads, SIZE, HEADS
        )
        each = tl.dot(tile, tl.trans(keys), input_precision="ieee")
        each = tl.maximum(each, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + token * top_k + at, tl.sum(share[:, None] * each, 0), at < top_k)


@triton.jit
def _selected_scores_backward(
    query, weight, key, chosen, grad, grad_query, grad_weight, grad_key, top_k, heads,
    SIZE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `_selected_scores`."""
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HEADS), tl.arange(0, SIZE)
    dq = tl.zeros([HEADS, SIZE], tl.float32)
    dw = tl.zeros([HEADS], tl.float32)
    for start in range(0, top_k, KEYS):
        at = start + tl.arange(0, KEYS)
        tile, share, keys, row = _load_index(
            query, weight, key, chosen, at, top_k, heads, SIZE, HEADS
        )
        slope = tl.load(grad + token * top_k + at, mask=row >= 0, other=0)
        each = tl.dot(tile, tl.trans(keys), input_precision="ieee")
        active = tl.maximum(each, 0.0, propagate_nan=tl.PropagateNan.ALL)
        dw += tl.sum(active * slope[None, :], 1)
        slopes = tl.where(each <= 0, 0.0, share[:, None] * slope[None, :]).to(keys.dtype)
        dq += tl.dot(slopes, keys, input_precision="ieee")
        dk = tl.dot(tl.trans(slopes), tile, input_precision="ieee")
        into = grad_key + row.to(tl.int64)[:, None] * SIZE + d[None, :]
        tl.atomic_add(into, dk, mask=(row >= 0)[:, None], sem="relaxed")
    place = (token * heads + head)[:, None] * SIZE + d[None, :]
    tl.store(grad_query + place, dq.to(grad_query.dtype.element_ty), (head < heads)[:, None])
    tl.store(grad_weight + token * heads + head, dw, head < heads)


class _SelectedScores(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, weight: Tensor, key: Tensor, chosen: Tensor) -> Tensor:
        tensors = query, weight, key, chosen = [
            x.contiguous() for x in (query, weight, key, chosen)
        ]
        (tokens, heads, _), top_k = query.shape, chosen.shape[1]
        out = torch.empty(tokens, top_k, dtype=torch.float32, device=query.device)
        _selected_scores[(tokens,)](*tensors, out, top_k, heads, **_index_sizes(query))
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, weight, key, chosen = ctx.saved_tensors
        (tokens, heads, _), top_k = query.shape, chosen.shape[1]
        grad_query, grad_weight = torch.empty_like(query), torch.empty_like(weight)
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        _selected_scores_backward[(tokens,)](
            query, weight, key, chosen, grad.contiguous(), grad_query, grad_weight, grad_key,
            top_k, heads, **_index_sizes(query),
        )  # fmt: skip
        return grad_query, grad_weight, grad_key.to(key.dtype), None


def _index_sizes(query: Tensor) -> dict[str, Any]:
    heads = max(16, triton.next_power_of_2(query.shape[1]))
    return {"SIZE": query.shape[2], "HEADS": heads, **_INDEX}


def selected_scores(query: Tensor, weight: Tensor, key: Tensor, chosen: Tensor) -> Tensor:
    """Compute the index scores of the selected keys: query [N, J, d], weight [N, J] float32, key
    [S, d], chosen [N, k] → [N, k] float32."""
    return _SelectedScores.apply(query, weight, key, chosen)  # type: ignore[return-value]
