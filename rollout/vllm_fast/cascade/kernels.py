"""Attention of a decoding step in which the completions of a group share their prompt's KV blocks.

A decoding step is bound by reading keys and values. The completions of a prompt have its full
blocks in common, the same ones of the cache, and attention as it comes reads these once for each.
Here the rows of a batch that stand side by side and begin with the same blocks are a *segment*:
what its rows share is read once, with all their queries at hand (cascade attention; Hydragen,
arXiv:2402.05099), what each has for itself by itself, in one launch; a second one joins the parts
by their sums of exponentials. Which rows share what is read from the block table on the GPU
(`plan.py`), so that a CUDA graph holds all of it and the host has nothing to do.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from keel.rollout.vllm_fast.cascade.plan import MOST_SPLITS, Scratch
from keel.rollout.vllm_fast.truncate_kernels import launch

LOG2_E = math.log2(math.e)
"""Kernels have powers of two."""
SHORT = 4
"""Slices of a row that are joined in one go by a single warp."""
SLICE = 1024
"""Tokens that are worth a slice beyond the fewest."""
TOKENS, STAGES, WARPS = 64, 2, 4
"""Of keys and values that are read at once, and how far ahead."""


def attend(
    scratch: Scratch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """A layer's attention, of the step that was planned. query, out [rows, query heads, size];
    keys, values [blocks, page, key heads, size]; table, lengths as in `plan`; scale of the
    logits."""
    heads, rows = scratch.heads, len(lengths)
    fewest, splits = heads.splits(rows)
    pairs = triton.cdiv(rows, 2)
    launch(
        _parts,
        (pairs + rows, heads.keys, splits),
        query,
        query.stride(0),
        query.stride(1),
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        table,
        table.stride(0),
        lengths,
        scratch.leader,
        scratch.shared,
        scratch.sums,
        scratch.values,
        scale * LOG2_E,
        rows,
        pairs,
        fewest,
        splits,
        PAGE=heads.page,
        EACH=heads.each,
        HEADS=heads.queries,
        ROWS=heads.rows,
        SIZE=heads.size,
        QUERIES=heads.tile,
        TOKENS=TOKENS,
        SLICE=SLICE,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    launch(
        _join,
        (rows, heads.queries),
        scratch.sums,
        scratch.values,
        lengths,
        scratch.shared,
        out,
        out.stride(0),
        out.stride(1),
        fewest,
        splits,
        HEADS=heads.queries,
        SIZE=heads.size,
        SPLITS=MOST_SPLITS if splits > SHORT else SHORT,
        TOKENS=TOKENS,
        SLICE=SLICE,
        num_warps=4 if splits > SHORT else 1,
    )


@triton.jit
def _slice(length, split, fewest, splits, TOKENS: tl.constexpr, SLICE: tl.constexpr):
    """Beginning and end of one of the slices of so many tokens; one that is not needed is empty."""
    count = tl.maximum(tl.minimum(length // SLICE, splits), fewest)
    size = tl.cdiv(tl.cdiv(length, count), TOKENS) * TOKENS
    return split * size, tl.minimum((split + 1) * size, length)


@triton.jit(do_not_specialize=["rows", "pairs", "fewest", "splits", "table_row", "query_row"])
def _parts(
    query_ptr,
    query_row,
    query_head,
    keys_ptr,
    values_ptr,
    key_page,
    key_token,
    key_head,
    value_page,
    value_token,
    value_head,
    table_ptr,
    table_row,
    lengths_ptr,
    leader_ptr,
    shared_ptr,
    sums_ptr,
    found_ptr,
    scale,
    rows,
    pairs,
    fewest,
    splits,
    PAGE: tl.constexpr,
    EACH: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """One key head and one slice: of what a segment shares (of two rows side by side one leads a
    segment at the most), or of what a row has for itself. Weighted values, and log2 of their sum of
    exponentials."""
    item, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    together = item < pairs
    row = item - pairs
    if together:
        row = 2 * item
        if tl.load(leader_ptr + row) != row or tl.load(shared_ptr + row) == 0:
            row = tl.minimum(row + 1, rows - 1)
    shared = tl.load(shared_ptr + row)
    first = 0
    if together:
        length = tl.where(tl.load(leader_ptr + row) == row, shared, 0)
    else:
        first = shared
        length = tl.load(lengths_ptr + row) - shared
    begin, end = _slice(length, split, fewest, splits, TOKENS, SLICE)
    begin += first
    end += first
    if begin < end:
        query_at = tl.arange(0, QUERIES)
        mine = row + query_at // EACH
        inside = (query_at < ROWS * EACH) & (mine < rows)
        if together:
            leader = tl.load(leader_ptr + mine, mask=inside, other=-1)
            inside = inside & (leader == row)
        else:
            inside = inside & (mine == row)
        heads = head * EACH + query_at % EACH
        numbers, tokens = tl.arange(0, SIZE), tl.arange(0, TOKENS)
        from_ = query_ptr + (mine.to(tl.int64) * query_row + heads * query_head)[:, None]
        query = tl.load(from_ + numbers[None, :], mask=inside[:, None], other=0.0)
        keys_ptr += head * key_head
        values_ptr += head * value_head
        table_ptr += row.to(tl.int64) * table_row
        top = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        found = tl.zeros([QUERIES, SIZE], tl.float32)
        for start in range(begin, end, TOKENS):
            at = start + tokens
            there = at < end
            page = tl.load(table_ptr + at // PAGE, mask=there, other=0).to(tl.int64)
            of_page = at % PAGE
            key = tl.load(
                keys_ptr + (page * key_page + of_page * key_token)[None, :] + numbers[:, None],
                mask=there[None, :],
                other=0.0,
            )
            logits = tl.dot(query, key) * scale
            logits = tl.where(there[None, :], logits, -float("inf"))
            higher = tl.maximum(top, tl.max(logits, axis=1))
            weights = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(top - higher)
            value = tl.load(
                values_ptr
                + (page * value_page + of_page * value_token)[:, None]
                + numbers[None, :],
                mask=there[:, None],
                other=0.0,
            )
            total = total * shrink + tl.sum(weights, axis=1)
            found = found * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
            top = higher
        to = (mine * HEADS + heads) * (2 * splits) + split
        if together:
            to += splits
        tl.store(sums_ptr + to, top + tl.log2(total), mask=inside)
        place = to.to(tl.int64)[:, None] * SIZE + numbers[None, :]
        tl.store(found_ptr + place, found / total[:, None], mask=inside[:, None])


@triton.jit(do_not_specialize=["fewest", "splits", "out_row"])
def _join(
    sums_ptr,
    found_ptr,
    lengths_ptr,
    shared_ptr,
    out_ptr,
    out_row,
    out_head,
    fewest,
    splits,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """One row and query head, from its parts."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    shared = tl.load(shared_ptr + row)
    own = tl.load(lengths_ptr + row) - shared
    part, numbers = tl.arange(0, 2 * SPLITS), tl.arange(0, SIZE)
    split = tl.where(part < splits, part, part - splits)
    length = tl.where(part < splits, own, shared)
    begin, end = _slice(length, split, fewest, splits, TOKENS, SLICE)
    inside = (part < 2 * splits) & (begin < end)
    at = (row * HEADS + head) * (2 * splits) + part
    sums = tl.load(sums_ptr + at, mask=inside, other=-float("inf"))
    found = tl.load(
        found_ptr + at.to(tl.int64)[:, None] * SIZE + numbers[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    top = tl.maximum(tl.max(sums, axis=0), -1e30)  # a row that is nobody's has no part
    weights = tl.exp2(sums - top)
    total = tl.sum(weights, axis=0)
    made = tl.sum(found * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    to = out_ptr + row.to(tl.int64) * out_row + head * out_head + numbers
    tl.store(to, made.to(out_ptr.dtype.element_ty))
