"""Sparse attention over packed segments, for the family that has it in transformers.

Eq. 1 and 2 of DeepSeek-V3.2 (2025). Multi-head latent attention in its MQA form: all query heads
look at one latent entry a token, so that a selected key is read once for all of them.

What selects is not differentiable, and the indexer's input is detached: the indexer learns from
its own loss alone, and everything else from the language model's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.model.attention import Segments, UnsupportedAttention, uncompiled
from keel.model.sparse.chunks import by_chunks
from keel.model.sparse.indexer import (
    NONE,
    divergence,
    gather_keys,
    index_scores,
    own_products,
    products,
    select,
    selected_scores,
    up_to_own,
)
from keel.model.torch_internals import node_at_work
from keel.model.transformers_internals import become

KNOWN = "DeepseekV32Attention"
"""The class of transformers that is computed here."""
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Largest tensor of a chunk of queries."""


@dataclass(slots=True, kw_only=True)
class SparsePass:
    """How one forward pass of the network attends, and what its indexers made of it. The keyword
    `sparse` of the decoder's forward."""

    dense: bool = False
    """Attend to all earlier tokens, as in the indexer's warm-up; the loss is then Eq. 3, else
    Eq. 4."""
    loss: bool = False
    """Compute the indexers' loss."""
    chunk: int | None = None
    """Queries at a time; None: by `CHUNK_BYTES`."""
    recorded_LNk: Tensor | None = None
    """Positions, counted from the start of a token's segment, that an engine selected for it in
    each layer; a row of `NONE` has the live selection (`keel.model.sparse.replay`)."""
    losses: list[Tensor] = field(default_factory=list[Tensor])
    """Of each layer: Σ_t KL, with its graph."""
    held: list[Tensor] = field(default_factory=list[Tensor])
    """Of each layer, under dense attention with the loss: [2], the share of attention that the top
    k hold, summed over the queries that have more than k keys to choose from, and their number."""

    def loss_sum(self) -> Tensor:
        """Σ over layers and queries of KL, in nats."""
        return torch.stack(self.losses).sum()


def sparse_layers(model: nn.Module) -> list[nn.Module]:
    """The attention modules with an indexer, in the order of layers."""
    return [m for m in model.modules() if isinstance(getattr(m, "indexer", None), nn.Module)]


def indexers(model: nn.Module) -> list[nn.Module]:
    return [layer.get_submodule("indexer") for layer in sparse_layers(model)]


def use_sparse_attention(model: PreTrainedModel) -> None:
    """Let the attention of `model` that has an indexer run over packed segments, by chunks.

    Raises ValueError for a family whose indexer is not known here.
    """
    layers = sparse_layers(model)
    unknown = {type(layer).__name__ for layer in layers} - {KNOWN}
    if unknown:
        raise ValueError(
            f"model of type {model.config.model_type}: the sparse attention of "
            f"{', '.join(sorted(unknown))} is not known here; that of {KNOWN} is"
        )
    for layer in layers:
        become(layer, _packed(type(layer)))


@cache  # one class for all layers, or each would be compiled anew
def _packed(kind: type[nn.Module]) -> type[nn.Module]:
    if kind.forward is _forward:
        return kind
    return type(kind.__name__, (kind,), {"forward": _forward, "__module__": kind.__module__})


def _forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    segments: Segments | None = None,
    sparse: SparsePass | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """hidden_states [1, N, D] of packed segments → ([1, N, D], None)."""
    if segments is None:
        raise UnsupportedAttention("sparse attention needs the keyword `segments`")
    alone = segments.group is None and segments.contexts is None
    if attention_mask is not None or not alone or self.attention_dropout:
        raise UnsupportedAttention(
            "sparse attention knows no mask but packed segments, no dropout, no sequence "
            "parallelism and no shared prompts (trainer.sequence_parallel: 1, "
            "trainer.share_prompts: false)"
        )
    (hidden,), (cos, sin) = hidden_states, (x[0] for x in position_embeddings)
    nope, rope, rank = self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank
    low = self.q_a_layernorm(self.q_a_proj(hidden))
    query, turned = self.q_b_proj(low).unflatten(-1, (-1, nope + rope)).split([nope, rope], -1)
    latent, shared = self.kv_a_proj_with_mqa(hidden).split([rank, rope], -1)
    # The projection's weight, by a call: under ZeRO-3 that is what gathers it.
    unit = torch.eye(rank, dtype=hidden.dtype, device=hidden.device)
    up = self.kv_b_proj(unit).view(rank, self.num_heads, -1)  # [r, H, nope + value]
    query = torch.einsum("nhd,rhd->nhr", query, up[..., :nope])
    query = torch.cat([query, _rotate_pairs(turned, cos, sin)], -1)
    turned = _rotate_pairs(shared[:, None], cos, sin)[:, 0]
    key = torch.cat([self.kv_a_layernorm(latent), turned], -1)
    index = _index_inputs(self.indexer, hidden.detach(), low.detach(), cos, sin)
    mixed = _attend(self, query, key, index, segments, sparse or SparsePass())
    output = torch.einsum("nhr,rhd->nhd", mixed, up[..., nope:])
    return self.o_proj(output.flatten(1))[None], None


def _index_inputs(
    indexer: Any, hidden: Tensor, low: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [N, J, d], weight [N, J] float32 and key [N, d] of Eq. 1. Its rotary embedding turns
    halves of the first dimensions, where the main attention's turns pairs of the last."""
    rope = indexer.qk_rope_head_dim
    query = indexer.wq_b(low).unflatten(-1, (indexer.n_heads, -1))
    key = indexer.k_norm(indexer.wk(hidden))[:, None]
    query, key = (
        torch.cat([_rotate_halves(x[..., :rope], cos, sin), x[..., rope:]], -1)
        for x in (query, key)
    )
    project = indexer.weights_proj
    weight = project(hidden.to(project.weight.dtype)).float()
    return query, weight * (indexer.softmax_scale * indexer.n_heads**-0.5), key[:, 0]


@uncompiled  # blocks differ from row to row
def _attend(
    layer: Any,
    query: Tensor,
    key: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    segments: Segments,
    sparse: SparsePass,
) -> Tensor:
    """query [N, H, r + rope] and key [N, r + rope] → [N, H, r]."""
    top_k = layer.indexer.index_topk
    rows = segments.token_of_row
    per_query = [x.index_select(0, rows) for x in (query, *index[:2])]
    per_key = [x.index_select(0, rows) for x in (key, index[2])]
    recorded = None
    if sparse.recorded_LNk is not None and not sparse.dense:
        recorded = sparse.recorded_LNk[layer.layer_idx].to(query.device).index_select(0, rows)
    run = partial(Chunk, layer.scaling, layer.kv_lora_rank, top_k, sparse.loss)
    outputs: list[tuple[Tensor, ...]] = []
    start = 0
    for count, longest in segments.blocks:
        stop = start + count * longest

        def block(x: Tensor, start: int = start, stop: int = stop, count: int = count) -> Tensor:
            return x[start:stop].unflatten(0, (count, -1))

        queries, keys = [*map(block, per_query)], [*map(block, per_key)]
        size = sparse.chunk or chunk_size(queries[0], queries[1], count * longest, top_k)
        if sparse.dense or (longest <= top_k and recorded is None):
            parts = by_chunks(run().dense, queries, keys, size=size)
        else:
            live = selection(queries[1], queries[2], keys[1], top_k, size)
            chosen = live if recorded is None else _replayed(block(recorded), live)
            parts = by_chunks(run().chosen, [*queries, chosen], keys, size=size)
        outputs.append(tuple(part.flatten(0, 1) for part in parts))
        start = stop
    back = segments.row_of_token
    mixed, lost, held = (torch.cat(x).index_select(0, back) for x in zip(*outputs, strict=True))
    if sparse.loss:
        lost, held = lost.sum(), held.detach()
        if node_at_work() is None:  # not while a backward pass computes it again
            looked = held >= 0
            sparse.losses.append(lost)
            sparse.held.append(torch.stack([held.where(looked, 0).sum(), looked.sum()]))
    return mixed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attention of some queries: outputs [B, c, H, r], KL [B, c] and the share of attention [B, c]
    that the top k hold (−1: not looked at)."""

    scaling: float
    rank: int
    top_k: int
    loss: bool

    def dense(
        self,
        first: int,
        query: Tensor,
        index_q: Tensor,
        weight: Tensor,
        key: Tensor,
        index_k: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = products(query.flatten(1, 2), key.transpose(1, 2)) * self.scaling
        logits = logits.unflatten(1, query.shape[1:3])  # [B, c, H, s]
        seen = up_to_own(first, logits[:, :, 0])
        shares = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("bchs,bsr->bchr", shares.to(key.dtype), key[..., : self.rank])
        lost, held = self._unknown(mixed)
        if self.loss:
            target = shares.detach().mean(2)
            scores = index_scores(index_q, weight, index_k)
            lost = divergence(target, scores, seen)
            if scores.shape[-1] > self.top_k:
                chosen = select(first, scores.detach(), self.top_k).long()
                share = target.gather(-1, chosen.clamp(min=0)).where(chosen != NONE, 0).sum(-1)
                held = share.where(seen.sum(-1) > self.top_k, -1)
        return mixed, lost, held

    def chosen(
        self,
        first: int,
        query: Tensor,
        index_q: Tensor,
        weight: Tensor,
        chosen: Tensor,
        key: Tensor,
        index_k: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        known = chosen != NONE
        keys = gather_keys(key, chosen)
        logits = own_products(query, keys) * self.scaling  # [B, c, H, k]
        shares = logits.masked_fill(~known[:, :, None], -torch.inf).softmax(-1)
        mixed = shares.to(key.dtype) @ keys[..., : self.rank]
        lost, held = self._unknown(mixed)
        if self.loss:
            scores = selected_scores(index_q, weight, gather_keys(index_k, chosen))
            lost = divergence(shares.mean(2), scores, known)
        return mixed, lost, held

    def _unknown(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        nothing = mixed.new_zeros(mixed.shape[:2], dtype=torch.float32)
        return nothing, nothing - 1


@torch.no_grad()
def selection(
    query: Tensor, weight: Tensor, key: Tensor, top_k: int, size: int, *, first: int = 0
) -> Tensor:
    """[B, L, k] int32 of all queries, by chunks; `first` as in `by_chunks`."""

    def chunk(first: int, query: Tensor, weight: Tensor, key: Tensor) -> tuple[Tensor]:
        chosen = select(first, index_scores(query, weight, key), top_k)
        return (nn.functional.pad(chosen, (0, top_k - chosen.shape[-1]), value=NONE),)

    return by_chunks(chunk, [query, weight], [key], size=size, first=first)[0]


def _replayed(recorded: Tensor, live: Tensor) -> Tensor:
    """The recorded selection, and the live one in rows without."""
    width = max(recorded.shape[-1], live.shape[-1])
    recorded, live = (
        nn.functional.pad(x, (0, width - x.shape[-1]), value=NONE) for x in (recorded, live)
    )
    return recorded.where((recorded != NONE).any(-1, keepdim=True), live)


def chunk_size(query: Tensor, index_q: Tensor, keys: int, top_k: int) -> int:
    """Queries whose largest tensor, in float32, is within `CHUNK_BYTES`. `keys`: in all rows."""
    rows, width = len(query), query.shape[-1]
    heads = max(query.shape[2], index_q.shape[2])
    largest = 4 * max(heads * keys, rows * min(top_k, keys) * max(width, heads))
    return max(1, CHUNK_BYTES["cuda" if query.is_cuda else "cpu"] // largest)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (0, 1), (2, 3), …, x [N, H, d]; the result holds all first ones of
    pairs before all second ones, for queries and keys alike."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + d/2), x [N, H, d]."""
    one, two = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-two, one], -1) * sin[:, None]
