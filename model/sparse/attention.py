"""Sparse attention over packed segments, for DeepSeek-V3.2 in transformers.

This implements Eq. 1 and 2 of DeepSeek-V3.2 (2025). Multi-head latent attention is computed in its
MQA form, in which all query heads attend to one latent vector per token, so each selected key is
read once for all heads. Scores are computed for a chunk of queries at a time, so no tensor of
queries × keys is ever created. On Hopper GPUs, Triton kernels attend to the selected keys
(`keel.model.sparse.kernels`); elsewhere PyTorch does, also in chunks.

With sequence parallelism, each rank attends with the queries of its own tokens, and gathers the
keys of the whole row. The keys of a token have 704 elements in DeepSeek-V3.2 (latent, rope and
indexer). Ulysses would exchange 40,960 elements of queries and outputs instead (128 heads of 192
and 128), which is more for up to 58 ranks, and no rank would have the attention over all heads that
the indexer learns from.

The selection is not differentiable, and the indexer's input is detached. The indexer therefore
learns only from its own loss, and the other weights only from the language model's loss.

**Index replay.** The trainer attends to the positions that the rollout engine selected and computes
everything else itself, as Keep Routing does for experts. The engine records, for each input token
and each layer with an indexer, a bitmap of the positions in the token's segment that it attended
to. A bitmap of zeros means that nothing was recorded; the trainer then makes its own selection.
Tokens with at most k tokens in their context are not recorded, because they attend to all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from keel.model.attention import Segments, UnsupportedAttention, disable_compile
from keel.model.sparse.indexer import (
    NONE,
    causal_mask,
    gather_keys,
    index_scores,
    kl_divergence,
    matmul_float32,
    matmul_own_keys,
    select_top_keys,
    selected_scores,
)
from keel.model.torch_internals import running_node_number, to_device
from keel.model.transformers_internals import override_methods
from keel.model.ulysses import gather_tokens

_SUPPORTED = "DeepseekV32Attention"
"""The only supported attention class of transformers."""
_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Maximum size of the largest tensor of a chunk, in bytes."""
_SELECT_BYTES = 25
"""Bytes per score while keys are selected."""
_HOPPER = 9
"""Compute capability of the GPUs with kernels. Others have too little shared memory for them."""


@dataclass(slots=True, kw_only=True)
class SparsePass:
    """Options and results of one forward pass, passed to the decoder as the keyword argument
    `sparse`."""

    dense: bool = False
    """If True, attend to all earlier tokens, as in the indexer's warm-up. The loss is Eq. 3."""
    loss: bool = False
    """If True, compute the indexers' loss. It is Eq. 4, or Eq. 3 with `dense`."""
    chunk: int | None = None
    """Number of queries in a chunk. By default, it is derived from `_CHUNK_BYTES`."""
    recorded_LNb: Tensor | None = None
    """Bitmaps of the positions in the segment that an engine selected for each layer and token,
    from `recorded_selection`. For rows of zeros, the trainer makes its own selection."""
    losses: list[Tensor] = field(default_factory=list[Tensor])
    """Σ_t KL of each layer, with its autograd graph."""
    topk_attention: list[Tensor] = field(default_factory=list[Tensor])
    """For each layer with dense attention and loss, two numbers [2]: the sum of the attention on
    the top k keys over all queries with more than k keys, and the number of these queries."""
    overlap: list[Tensor] = field(default_factory=list[Tensor])
    """For each layer that replays, two numbers [2]: the sum over queries with a bitmap of the share
    of its positions that the trainer's indexer also selects, and the number of these queries."""

    def loss_sum(self) -> Tensor:
        """Return the indexers' loss: the sum of the KL divergences over layers and queries, in
        nats."""
        return torch.stack(self.losses).sum()


def _sparse_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules that have an indexer, in layer order."""
    return [m for m in model.modules() if isinstance(getattr(m, "indexer", None), nn.Module)]


def indexers(model: nn.Module) -> list[nn.Module]:
    return [layer.get_submodule("indexer") for layer in _sparse_layers(model)]


def use_sparse_attention(model: PreTrainedModel) -> None:
    """Make the sparse attention layers in `model` process packed segments chunk by chunk. Raises
    ValueError if the model family isn't supported."""
    layers = _sparse_layers(model)
    unknown = {type(layer).__name__ for layer in layers} - {_SUPPORTED}
    if unknown:
        raise ValueError(
            f"{model.config.model_type}: sparse attention of {', '.join(sorted(unknown))} is not "
            f"supported, only {_SUPPORTED}"
        )
    for layer in layers:
        if not isinstance(layer, _Packed):
            override_methods(layer, _Packed)


class _Packed:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        segments: Segments | None = None,
        sparse: SparsePass | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Run the layer on packed segments. `hidden_states` is [1, N, D]. Returns ([1, N, D],
        None)."""
        if segments is None:
            raise UnsupportedAttention("sparse attention needs the keyword `segments`")
        shared = segments.contexts is not None
        if attention_mask is not None or shared or self.attention_dropout:
            raise UnsupportedAttention(
                "sparse attention supports no masks, dropout or shared prompts. Set "
                "trainer.share_prompts: false"
            )
        (hidden,), (cos, sin) = hidden_states, (x[0] for x in position_embeddings)
        nope, rope, rank = self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank
        low = self.q_a_layernorm(self.q_a_proj(hidden))
        query, turned = self.q_b_proj(low).unflatten(-1, (-1, nope + rope)).split([nope, rope], -1)
        latent, shared_key = self.kv_a_proj_with_mqa(hidden).split([rank, rope], -1)
        # A call returns the projection's weight, because ZeRO-3 gathers it only for calls.
        unit = torch.eye(rank, dtype=hidden.dtype, device=hidden.device)
        up = self.kv_b_proj(unit).view(rank, self.num_heads, -1)  # [r, H, nope + value]
        query = torch.einsum("nhd,rhd->nhr", query, up[..., :nope])
        query = torch.cat([query, _rotate_pairs(turned, cos, sin)], -1)
        turned = _rotate_pairs(shared_key[:, None], cos, sin)[:, 0]
        key = torch.cat([self.kv_a_layernorm(latent), turned], -1)
        index = _index_inputs(self.indexer, hidden.detach(), low.detach(), cos, sin)
        mixed = _attend(self, query, key, index, segments, sparse or SparsePass())
        output = torch.einsum("nhr,rhd->nhd", mixed, up[..., nope:])
        return self.o_proj(output.flatten(1))[None], None


def _index_inputs(
    indexer: Any, hidden: Tensor, low: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the inputs to the index scores (Eq. 1): query [N, J, d], weight [N, J] float32 and
    key [N, d]. The indexer's rotary embedding pairs up the two halves of the first dimensions,
    whereas the main attention rotates adjacent pairs of the last dimensions."""
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """This rank's queries and their keys, arranged in right-padded blocks of segments."""

    blocks: tuple[tuple[int, int, int], ...]
    """(number of segments, number of keys before the first query, number of queries) of each
    block."""
    queries: Tensor
    """The token of this rank in each row of the blocks."""
    keys: Tensor
    """The token of all ranks in each row of the blocks."""
    back: Tensor
    """The row of each of this rank's queries."""

    def slices(self) -> Iterator[tuple[tuple[int, int, int], slice, slice]]:
        """Yield each block along with its rows in `queries` and `keys`."""
        query = key = 0
        for count, first, longest in self.blocks:
            own = slice(query, query + count * longest)
            seen = slice(key, key + count * (first + longest))
            yield (count, first, longest), own, seen
            query, key = own.stop, seen.stop


def _rows_of(segments: Segments) -> _Rows:
    blocks = tuple((count, 0, longest) for count, longest in segments.blocks)
    return _Rows(blocks, segments.token_of_row, segments.token_of_row, segments.row_of_token)


@lru_cache(maxsize=2)  # for all layers of a micro-batch
def _rows_of_shard(lengths: tuple[int, ...], start: int, stop: int, device: torch.device) -> _Rows:
    """Arrange the queries `start` to `stop` − 1 of a row. A segment that begins on an earlier rank
    gets its own block."""
    offsets = np.cumsum((0, *lengths))
    before = start - int(offsets[offsets <= start][-1])
    inside = np.diff(offsets.clip(start, stop))
    pieces: list[int] = inside[inside > 0].tolist()
    own = pieces.pop(0) if before else 0
    with torch.inference_mode(False):
        queries = back = torch.arange(own)
        keys = torch.arange(start - before, start + own)
        blocks = ((1, before, own),) if before else ()
        if pieces:
            rest = Segments.of(pieces)
            blocks += tuple((count, 0, longest) for count, longest in rest.blocks)
            queries = torch.cat([queries, own + rest.token_of_row])
            keys = torch.cat([keys, start + own + rest.token_of_row])
            back = torch.cat([back, own + rest.row_of_token])
        return _Rows(blocks, *(to_device(x, device) for x in (queries, keys, back)))


@disable_compile  # blocks differ between rows
def _attend(
    layer: Any,
    query: Tensor,
    key: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    segments: Segments,
    sparse: SparsePass,
) -> Tensor:
    """Compute attention in latent space: query [N, H, r + rope], key [N, r + rope] → [N, H, r]."""
    group, keys = segments.group, [key, index[2]]
    if group is None:
        rows = _rows_of(segments)
    else:
        start = len(query) * dist.get_rank(group)
        rows = _rows_of_shard(segments.lengths, start, start + len(query), query.device)
        keys = gather_tokens(torch.cat(keys, 1), group).split([x.shape[1] for x in keys], 1)
    recorded = None
    if sparse.recorded_LNb is not None and not sparse.dense:
        recorded = sparse.recorded_LNb[layer.layer_idx].to(query.device)
        recorded = recorded.index_select(0, rows.queries)
    rank = layer.kv_lora_rank
    run = ChunkAttention(layer.scaling, rank, layer.indexer.index_topk, sparse.loss)
    fused = not sparse.dense and _has_kernels(query, index[0], rank)
    attend = _attend_with_kernels if fused else _attend_in_chunks
    mixed, lost, topk_attention, overlap = attend(
        run, (query, *index[:2]), keys, rows, recorded, sparse
    )
    if sparse.loss:
        lost = lost.sum()  # tokens that pad a shard are all equal, so their divergence is 0
    if running_node_number() is None:  # not in a recomputation
        if sparse.loss:
            sparse.losses.append(lost)
            sparse.topk_attention.append(_sum_and_count(topk_attention.detach()))
        if recorded is not None:
            sparse.overlap.append(_sum_and_count(overlap))
    return mixed


def _attend_in_chunks(
    run: "ChunkAttention",
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    rows: _Rows,
    recorded: Tensor | None,
    sparse: SparsePass,
) -> tuple[Tensor, ...]:
    """Attend in PyTorch, block by block. The queries (main, index, weights) are this rank's tokens,
    and the keys (main, index) are all ranks' tokens; `recorded` has the order of `rows.queries`.
    Returns the results of `ChunkAttention` and the overlap of `SparsePass`, for each token."""
    per_query = [x.index_select(0, rows.queries) for x in queries]
    per_key = [x.index_select(0, rows.keys) for x in keys]
    outputs: list[tuple[Tensor, ...]] = []
    for (count, first, longest), own, seen in rows.slices():
        own_queries = [_block(x, own, count) for x in per_query]
        seen_keys = [_block(x, seen, count) for x in per_key]
        length = seen.stop - seen.start
        size = sparse.chunk or _chunk_size(own_queries[0], own_queries[1], length, run.top_k)
        if sparse.dense or (first + longest <= run.top_k and recorded is None):
            parts = _apply_in_chunks(run.dense, own_queries, seen_keys, size=size, first=first)
            overlap = torch.full_like(parts[1], -1)
        else:
            replayed = [] if recorded is None else [_block(recorded, own, count)]
            _, index_q, weight = own_queries
            chosen, overlap = _select_in_chunks(
                index_q, weight, seen_keys[1], run.top_k, size, first=first, recorded=replayed
            )
            inputs = [*own_queries, chosen]
            parts = _apply_in_chunks(run.chosen, inputs, seen_keys, size=size, first=first)
        outputs.append(tuple(part.flatten(0, 1) for part in (*parts, overlap)))
    return tuple(torch.cat(x).index_select(0, rows.back) for x in zip(*outputs, strict=True))


def _attend_with_kernels(
    run: "ChunkAttention",
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    rows: _Rows,
    recorded: Tensor | None,
    sparse: SparsePass,
) -> tuple[Tensor, ...]:
    """Compute the same as `_attend_in_chunks` with Triton kernels. Blocks select their keys, and
    then all tokens attend at once."""
    from keel.model.sparse import kernels  # noqa: PLC0415

    (query, index_q, weight), (key, index_k) = queries, keys
    with torch.no_grad():
        own_q, own_weight = (x.index_select(0, rows.queries) for x in (index_q, weight))
        seen_k = index_k.index_select(0, rows.keys)
        width = min(run.top_k, max(first + longest for _, first, longest in rows.blocks))
        parts: list[tuple[Tensor, Tensor]] = []
        for (count, first, longest), own, seen in rows.slices():
            block_q = _block(own_q, own, count)
            if first + longest <= run.top_k and recorded is None:
                chosen, overlap = _select_all(first, block_q)
            else:
                replayed = [] if recorded is None else [_block(recorded, own, count)]
                size = sparse.chunk or max(
                    1, _CHUNK_BYTES["cuda"] // (_SELECT_BYTES * (seen.stop - seen.start))
                )
                chosen, overlap = _select_in_chunks(
                    block_q, _block(own_weight, own, count), _block(seen_k, seen, count),
                    run.top_k, size, first=first, recorded=replayed, score=kernels.index_scores,
                )  # fmt: skip
            token = _block(rows.keys, seen, count).int()[:, None].expand(-1, longest, -1)
            token = token.gather(2, chosen.clamp(min=0).long()).where(chosen != NONE, NONE)
            token = nn.functional.pad(token, (0, width - token.shape[-1]), value=NONE)
            parts.append((token.flatten(0, 1), overlap.flatten()))
        chosen, overlap = (
            torch.cat(x).index_select(0, rows.back) for x in zip(*parts, strict=True)
        )
    mixed, lse = kernels.sparse_attention(query, key, chosen, run.scaling, run.rank)
    lost = torch.zeros_like(overlap)
    if run.loss:
        target = kernels.mean_shares(query, key, chosen, lse, run.scaling, run.rank)
        scores = kernels.selected_scores(index_q, weight, index_k, chosen)
        lost = kl_divergence(target, scores, chosen != NONE)
    return mixed, lost, torch.full_like(overlap, -1), overlap


def _block(x: Tensor, rows: slice, count: int) -> Tensor:
    """Return rows of x [R, …] as [count, rows / count, …]."""
    return x[rows].unflatten(0, (count, -1))


def _has_kernels(query: Tensor, index_q: Tensor, rank: int) -> bool:
    """Return whether `keel.model.sparse.kernels` supports queries [N, H, r + rope] and queries of
    the indexer [N, J, d]: in half precision, on Hopper GPUs, up to the sizes of DeepSeek-V3.2."""
    if not query.is_cuda or query.dtype.itemsize != 2 or index_q.shape[1] > 128:
        return False
    sizes = ((rank, 512), (query.shape[-1] - rank, 64), (index_q.shape[-1], 128))
    fits = all(16 <= size <= most and size & (size - 1) == 0 for size, most in sizes)
    return fits and torch.cuda.get_device_capability(query.device)[0] == _HOPPER


def _sum_and_count(shares: Tensor) -> Tensor:
    """Return the sum and the number [2] of the entries that were computed, which are not −1."""
    computed = shares >= 0
    return torch.stack([shares.where(computed, 0).sum(), computed.sum()])


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Computes attention for one chunk of queries. Returns the outputs [B, c, H, r], the KL
    divergences [B, c], and the fraction of attention that goes to the top k keys [B, c], or −1
    where it was not computed."""

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
        logits = matmul_float32(query.flatten(1, 2), key.transpose(1, 2)) * self.scaling
        logits = logits.unflatten(1, query.shape[1:3])  # [B, c, H, s]
        seen = causal_mask(first, logits[:, :, 0])
        shares = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("bchs,bsr->bchr", shares.to(key.dtype), key[..., : self.rank])
        lost, topk_attention = self._not_computed(mixed)
        if self.loss:
            target = shares.detach().mean(2)
            scores = index_scores(index_q, weight, index_k)
            lost = kl_divergence(target, scores, seen)
            if scores.shape[-1] > self.top_k:
                chosen = select_top_keys(first, scores.detach(), self.top_k).long()
                share = target.gather(-1, chosen.clamp(min=0)).where(chosen != NONE, 0).sum(-1)
                topk_attention = share.where(seen.sum(-1) > self.top_k, -1)
        return mixed, lost, topk_attention

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
        logits = matmul_own_keys(query, keys) * self.scaling  # [B, c, H, k]
        shares = logits.masked_fill(~known[:, :, None], -torch.inf).softmax(-1)
        mixed = shares.to(key.dtype) @ keys[..., : self.rank]
        lost, topk_attention = self._not_computed(mixed)
        if self.loss:
            scores = selected_scores(index_q, weight, gather_keys(index_k, chosen))
            lost = kl_divergence(shares.mean(2), scores, known)
        return mixed, lost, topk_attention

    def _not_computed(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        nothing = mixed.new_zeros(mixed.shape[:2], dtype=torch.float32)
        return nothing, nothing - 1


def _select_all(first: int, query: Tensor) -> tuple[Tensor, Tensor]:
    """Select all keys up to each query's own position, for queries [B, L, …]. Returns the positions
    [B, L, first + L], padded with `NONE`, and no overlap, as `_select_in_chunks` does."""
    (rows, count), device = query.shape[:2], query.device
    own = torch.arange(first, first + count, dtype=torch.int32, device=device)
    earlier = torch.arange(first + count, dtype=torch.int32, device=device)
    chosen = earlier.where(earlier <= own[:, None], NONE)
    return chosen.expand(rows, -1, -1), torch.full((rows, count), -1.0, device=device)


@torch.no_grad()
def _select_in_chunks(
    query: Tensor,
    weight: Tensor,
    key: Tensor,
    top_k: int,
    size: int,
    *,
    first: int = 0,
    recorded: Sequence[Tensor] = (),
    score: "_Score | None" = None,
) -> tuple[Tensor, Tensor]:
    """Select keys for all queries, chunk by chunk. Returns their positions [B, L, k] int32, and the
    share [B, L] of an engine's selection that the indexer also selects, or −1 without one. See
    `_apply_in_chunks` for `first`. `recorded` is either empty or a list with one element, the
    bitmaps [B, L, b] that an engine recorded. These replace the indexer's selection wherever they
    are nonzero. `score` replaces `index_scores`."""

    def chunk(first: int, query: Tensor, weight: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        *bitmaps, key = others
        scores = score(first, query, weight, key) if score else index_scores(query, weight, key)
        chosen = select_top_keys(first, scores, top_k)
        overlap = scores.new_full(chosen.shape[:2], -1)
        for bitmap in bitmaps:
            attended = _unpack_bits(bitmap, scores.shape[-1]).byte()
            same = attended.gather(-1, chosen.clamp(min=0).long()).where(chosen != NONE, 0).sum(-1)
            bits, replayed = attended.topk(chosen.shape[-1], sorted=False)
            count = bits.sum(-1)
            overlap = (same / count).where(count > 0, -1)
            chosen = replayed.where(bits > 0, NONE).int().where(count[..., None] > 0, chosen)
        return nn.functional.pad(chosen, (0, top_k - chosen.shape[-1]), value=NONE), overlap

    inputs = [query, weight, *recorded]
    chosen, overlap = _apply_in_chunks(chunk, inputs, [key], size=size, first=first)
    return chosen, overlap


def _unpack_bits(bitmap: Tensor, count: int) -> Tensor:
    """Unpack uint8 bitmaps [..., b] into booleans [..., count]."""
    bits = bitmap[..., None] >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    bits = (bits & 1).bool().flatten(-2)
    return nn.functional.pad(bits[..., :count], (0, max(0, count - bits.shape[-1])))


def _chunk_size(query: Tensor, index_q: Tensor, keys: int, top_k: int) -> int:
    """Return how many queries to process at once so that their largest float32 tensor takes up at
    most `_CHUNK_BYTES`. `keys` is the total number of keys across all rows."""
    rows, width = len(query), query.shape[-1]
    heads = max(query.shape[2], index_q.shape[2])
    largest = 4 * max(heads * keys, rows * min(top_k, keys) * max(width, heads))
    return max(1, _CHUNK_BYTES["cuda" if query.is_cuda else "cpu"] // largest)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the pairs (0, 1), (2, 3), … of x [N, H, d]. The result holds
    the first elements of all pairs, followed by the second elements, in the same order for queries
    and keys."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-two, one], -1) * sin[:, None]


_Score = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Computes index scores as `keel.model.sparse.kernels.index_scores` does."""
_ChunkFunction = Callable[..., tuple[Tensor, ...]]
"""Computes one chunk: (position of the first query, per-query tensors [B, c, …] …, per-key tensors
[B, s, …] …) → outputs [B, c, …] …. The keys are those up to the last query's position."""


def _apply_in_chunks(
    chunk: _ChunkFunction,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    *,
    size: int,
    first: int = 0,
) -> tuple[Tensor, ...]:
    """Apply `chunk` to `size` queries at a time, and concatenate the outputs [B, L, …]. The queries
    are [B, L, …] and the keys [B, first + L, …]. `first` is the position of the first query, and
    the keys start at position 0. Only inputs and outputs are saved; the backward pass recomputes
    one chunk at a time. Key gradients are summed in float32."""
    plan = _Plan(chunk, size, len(queries), first)
    return _ByChunks.apply(plan, *queries, *keys)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Plan:
    chunk: _ChunkFunction
    size: int
    queries: int
    """Number of tensors with one entry per query. The other tensors have one entry per key."""
    first: int

    def parts(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[slice]]]:
        """Yield the index of the first query and slices of all tensors for each chunk."""
        for start in range(0, tensors[0].shape[1], self.size):
            stop = start + self.size
            own, seen = slice(start, stop), slice(0, self.first + stop)
            yield start, [own if at < self.queries else seen for at in range(len(tensors))]


class _ByChunks(Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        parts = [
            plan.chunk(
                plan.first + start, *(x[:, part] for x, part in zip(tensors, where, strict=True))
            )
            for start, where in plan.parts(tensors)
        ]
        return tuple(torch.cat(part, 1) for part in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        leaves = [at for at, need in enumerate(needed) if need]
        sums: list[Tensor | None] = [None] * len(tensors)
        for start, where in plan.parts(tensors):
            inputs = [
                x[:, part].detach().requires_grad_(need)
                for x, part, need in zip(tensors, where, needed, strict=True)
            ]
            with torch.enable_grad():
                outputs = plan.chunk(plan.first + start, *inputs)
            used = [
                (output, grad[:, start : start + plan.size])
                for output, grad in zip(outputs, grads, strict=True)
                if grad is not None and output.requires_grad
            ]
            if not used:
                continue
            chunk_grads = torch.autograd.grad(
                [output for output, _ in used],
                [inputs[at] for at in leaves],
                [grad for _, grad in used],
                allow_unused=True,
            )
            for at, grad in zip(leaves, chunk_grads, strict=True):
                if grad is None:
                    continue
                if (total := sums[at]) is None:
                    dtype = tensors[at].dtype if at < plan.queries else torch.float32
                    total = sums[at] = torch.zeros_like(tensors[at], dtype=dtype)
                total[:, where[at]] += grad
        gradients = (
            None if total is None else total.to(x.dtype)
            for total, x in zip(sums, tensors, strict=True)
        )
        return None, *gradients


def recorded_selection(
    model: nn.Module, selected_NLb: NDArray[np.uint8], position_N: NDArray[Any]
) -> Tensor:
    """Validate an engine's bitmaps of selected positions, and convert them to the layout of
    `SparsePass.recorded_LNb`. `position_N` holds each token's own position. Raises ValueError if
    the number of layers is wrong, or if a selection includes later tokens or has the wrong number
    of positions. The error names the first invalid token and layer."""
    modules = indexers(model)
    if selected_NLb.ndim != 3 or selected_NLb.shape[:2] != (len(position_N), len(modules)):
        raise ValueError(
            f"recorded selection has shape {selected_NLb.shape} for {len(position_N)} tokens and "
            f"{len(modules)} layers with an indexer"
        )
    top_k = int(getattr(modules[0], "index_topk", 0)) if modules else 0
    count, layers, width = selected_NLb.shape
    by_layer = np.zeros((layers, count, -(-width // 8) * 8), np.uint8)  # rows of 64-bit words
    by_layer[..., :width] = selected_NLb.transpose(1, 0, 2)
    for layer, selected_Nb in enumerate(by_layer):
        _check_selection(selected_Nb, position_N, top_k, layer)
    return torch.from_numpy(by_layer)


def _check_selection(
    selected_Nb: NDArray[np.uint8], position_N: NDArray[Any], top_k: int, layer: int
) -> None:
    count = np.bitwise_count(selected_Nb.view(np.uint64)).sum(-1, dtype=np.int64)
    byte = selected_Nb.shape[-1] - 1 - (selected_Nb[:, ::-1] != 0).argmax(-1)
    highest = np.frexp(selected_Nb[np.arange(len(byte)), byte].astype(np.float32))[1] - 1
    last = np.where(count > 0, 8 * byte + highest, -1)
    for fault, where in {
        "a later token": last > position_N,
        f"not min(position + 1, {top_k}) positions": (count > 0)
        & (count != np.minimum(position_N + 1, top_k)),
    }.items():
        if where.any():
            token = int(where.argmax())
            raise ValueError(
                f"recorded selection: token {token} (position {position_N[token]}), layer {layer}: "
                f"{fault}"
            )
