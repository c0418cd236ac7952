"""Attention for decoding steps in which the completions of a group share their prompt's KV blocks.

The speed of a decoding step is limited by reading keys and values, and ordinary attention reads the
shared blocks of a prompt once per completion. Here, neighbouring rows that begin with the same
blocks form a *segment*. The shared part of a segment is read once for all its queries (cascade
attention; Hydragen, arXiv:2402.05099). The rest is read for each row. One kernel launch does both.
A second launch combines the parts, using their sums of exponentials.

`plan` finds the segments from the block table on the GPU. A CUDA graph can therefore contain all of
this, and the CPU has nothing to do.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_SHARED = tl.constexpr(64)
"""Minimum number of tokens that rows must share to form a segment."""
COLUMNS = tl.constexpr(64)
AT_ONCE = 16
"""Number of blocks, and number of table rows, that are compared at once."""
NONE = tl.constexpr(1 << 30)
QUERIES = 16
"""Number of queries in one tile: the rows of a segment times the query heads per key head. This is
the minimum for tensor cores. A larger tile needs more registers, so fewer loads can be in flight.
"""
PARTS = 512
"""Target number of parts in a step: a few per multiprocessor. A part is one slice of a row for one
key head."""
LONGER = 4
"""Factor by which the number of parts may grow if slices are long. All multiprocessors then finish
at the same time."""
MOST_SPLITS = 32
"""Maximum number of slices that a row is divided into."""
SIZES = (64, 128)
"""Head sizes for which the kernels are tested."""
MOST_EACH = 4
"""Maximum number of query heads per key head. With more, the unshared part is slower than in vLLM's
kernel, and fewer rows fit into a segment."""
LOG2_E = math.log2(math.e)
"""Converts exponents to base 2, because the kernels compute powers of 2."""
SHORT = 4
"""If a row has at most this many slices, a single warp combines all of them at once."""
SLICE = 1024
"""Number of tokens per slice, for rows with more than the minimum number of slices."""
TOKENS, STAGES, WARPS = 64, 2, 4
"""Number of tokens whose keys and values are read at once, number of pipeline stages, and number of
warps."""


@dataclass(frozen=True)
class Heads:
    """Number and size of a model's attention heads, and its KV block size."""

    queries: int
    keys: int
    size: int
    page: int
    """Number of tokens per KV block."""

    @property
    def each(self) -> int:
        """Number of query heads per key head."""
        return self.queries // self.keys

    @property
    def covered(self) -> bool:
        """True if the kernels support attention heads of this size and number."""
        even = self.queries % self.keys == 0 and self.page & (self.page - 1) == 0
        return even and self.size in SIZES and self.each <= MOST_EACH

    @property
    def tile(self) -> int:
        """Number of queries in one tile, a power of two."""
        least = 1 << (2 * self.each - 1).bit_length()
        return max(QUERIES, least)

    @property
    def rows(self) -> int:
        """Maximum number of rows in a segment, a power of two."""
        return 1 << ((self.tile // self.each).bit_length() - 1)

    def splits(self, rows: int) -> tuple[int, int]:
        """Return the minimum and maximum number of slices per row, for a batch of `rows` rows."""
        fewest, most = (PARTS * times // max(1, rows * self.keys) for times in (1, LONGER))
        return max(1, min(MOST_SPLITS, fewest)), max(1, min(MOST_SPLITS, most))


class Scratch:
    """Buffers that all layers of a model use, one layer after another."""

    def __init__(self, heads: Heads, rows: int, device: torch.device) -> None:
        """Allocate the buffers for batches of at most `rows` rows."""
        self.heads = heads
        parts = max(heads.splits(n)[1] * n for n in range(1, rows + 1))
        self.alike = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows] number of tokens that each row shares with the row before it."""
        self.leader = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows] first row of the segment that each row belongs to."""
        self.shared = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows] number of tokens shared by the row's segment, or 0 if no other row is in it."""
        shape = (2 * parts * heads.queries,)
        self.sums = torch.empty(*shape, dtype=torch.float32, device=device)
        self.values = torch.empty(*shape, heads.size, dtype=torch.float32, device=device)
        """Weighted values of each part, and the log2 of its sum of exponentials."""


def plan(scratch: Scratch, table: Tensor, lengths: Tensor) -> None:
    """Group the rows of a step into segments that share a prefix. This runs before the layers.

    `table` [rows, blocks] int32 is the block table. `lengths` [rows] int32 is each row's number of
    tokens including the current one, or 0 for padding.
    """
    rows = len(lengths)
    _compare[(triton.cdiv(rows, AT_ONCE),)](table, table.stride(0), table.shape[1], lengths,
        scratch.alike, rows, PAGE=scratch.heads.page, ROWS=AT_ONCE,
    )  # fmt: skip
    _segment[(1,)](scratch.alike, scratch.leader, scratch.shared, rows,
        ROWS=scratch.heads.rows, SIZE=triton.next_power_of_2(len(scratch.leader)), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row", "width", "rows"])
def _compare(
    table_ptr, table_row, width, lengths_ptr, alike_ptr, rows, PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Count the tokens that each row of a block shares with the row before it. Counts that are too
    small become 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows) & (row > 0)
    length = tl.load(lengths_ptr + row, mask=inside, other=0)
    before = tl.load(lengths_ptr + row - 1, mask=inside, other=0)
    # Whole blocks of both rows; each keeps at least one unshared token.
    least = tl.maximum(tl.minimum(length, before) - 1, 0) // PAGE
    least = tl.minimum(least, width)
    most = tl.max(least, axis=0)
    columns = tl.arange(0, COLUMNS)
    matched = tl.zeros([ROWS], tl.int32)
    going = least > 0
    column = 0
    while column < most:
        at = column + columns
        mask = going[:, None] & (at < width)[None, :]
        from_ = table_ptr + row.to(tl.int64)[:, None] * table_row + at[None, :]
        mine = tl.load(from_, mask=mask, other=0)
        theirs = tl.load(from_ - table_row, mask=mask, other=0)
        differ = tl.min(tl.where(mine == theirs, COLUMNS, columns[None, :]), axis=1)
        matched += tl.where(going, differ, 0)
        going = going & (differ == COLUMNS)
        column += COLUMNS
        if tl.max(going.to(tl.int32), axis=0) == 0:
            column = most
    same = tl.minimum(matched, least) * PAGE
    tl.store(alike_ptr + row, tl.where(same < LEAST_SHARED, 0, same), mask=row < rows)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["rows"])
def _segment(
    alike_ptr, leader_ptr, shared_ptr, rows, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Divide all rows into segments of at most ROWS rows.

    If more rows share a prefix, they are split into several segments, counted from the first of
    these rows.
    """
    row = tl.arange(0, SIZE)
    inside = row < rows
    same = tl.load(alike_ptr + row, mask=inside, other=0)
    # Groups that share only a little with each other stay separate.
    above = tl.load(alike_ptr + row - 1, mask=inside & (row > 0), other=0)
    below = tl.load(alike_ptr + row + 1, mask=row + 1 < rows, other=0)
    begins = (same == 0) | (8 * same < 7 * tl.maximum(above, below))
    first = tl.associative_scan(tl.where(begins, row, 0), 0, _larger)
    begins = begins | ((row - first) % ROWS == 0)
    leader = tl.associative_scan(tl.where(begins, row, 0), 0, _larger)
    tl.store(leader_ptr + row, leader, mask=inside)
    tl.debug_barrier()  # other threads load these stores
    shared = tl.full([SIZE], NONE, tl.int32)
    for number in range(1, ROWS):
        other = leader + number
        there = inside & (other < rows)
        there = there & (tl.load(leader_ptr + other, mask=there, other=-1) == leader)
        shared = tl.minimum(shared, tl.load(alike_ptr + other, mask=there, other=NONE))
    tl.store(shared_ptr + row, tl.where(shared == NONE, 0, shared), mask=inside)


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
    """Compute a layer's attention in a step. `plan` must have run for this step.

    Shapes: `query` and `out` [rows, query heads, size]; `keys` and `values` [blocks, page, key
    heads, size]. `table` and `lengths` are the same as in `plan`. `scale` multiplies the logits.
    """
    heads, rows = scratch.heads, len(lengths)
    fewest, splits = heads.splits(rows)
    pairs = triton.cdiv(rows, 2)
    _parts[(pairs + rows, heads.keys, splits)](query, query.stride(0), query.stride(1), keys,
        values, keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0),
        values.stride(1), values.stride(2), table, table.stride(0), lengths, scratch.leader,
        scratch.shared, scratch.sums, scratch.values, scale * LOG2_E, rows, pairs, fewest, splits,
        PAGE=heads.page, EACH=heads.each, HEADS=heads.queries, ROWS=heads.rows, SIZE=heads.size,
        QUERIES=heads.tile, TOKENS=TOKENS, SLICE=SLICE, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _join[(rows, heads.queries)](scratch.sums, scratch.values, lengths, scratch.shared, out,
        out.stride(0), out.stride(1), fewest, splits, HEADS=heads.queries, SIZE=heads.size,
        SPLITS=MOST_SPLITS if splits > SHORT else SHORT, TOKENS=TOKENS, SLICE=SLICE,
        num_warps=4 if splits > SHORT else 1,
    )  # fmt: skip


@triton.jit
def _slice(length, split, fewest, splits, TOKENS: tl.constexpr, SLICE: tl.constexpr):
    """Return the start and end positions of a slice. A slice that is not needed is empty."""
    count = tl.maximum(tl.minimum(length // SLICE, splits), fewest)
    size = tl.cdiv(tl.cdiv(length, count), TOKENS) * TOKENS
    return split * size, tl.minimum((split + 1) * size, length)


@triton.jit(do_not_specialize=["rows", "pairs", "fewest", "splits", "table_row", "query_row"])
def _parts(
    query_ptr, query_row, query_head, keys_ptr, values_ptr, key_page, key_token, key_head,
    value_page, value_token, value_head, table_ptr, table_row, lengths_ptr, leader_ptr,
    shared_ptr, sums_ptr, found_ptr, scale, rows, pairs, fewest, splits, PAGE: tl.constexpr,
    EACH: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Compute attention over one slice for one key head.

    The results are the weighted values and the log2 of their sum of exponentials. The slice belongs
    either to the part that a segment shares or to the rest of a single row. Of two neighbouring
    rows, at most one is the first of a segment.
    """
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
    sums_ptr, found_ptr, lengths_ptr, shared_ptr, out_ptr, out_row, out_head, fewest, splits,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
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
    top = tl.maximum(tl.max(sums, axis=0), -1e30)  # padding has no part
    weights = tl.exp2(sums - top)
    total = tl.sum(weights, axis=0)
    made = tl.sum(found * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    to = out_ptr + row.to(tl.int64) * out_row + head * out_head + numbers
    tl.store(to, made.to(out_ptr.dtype.element_ty))
