"""Which rows of a decoding step have KV blocks in common, for `cascade_kernels.py`.

Rows that stand side by side and begin with the same blocks are a *segment*: of as many rows as can
be read together.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_SHARED = tl.constexpr(64)
"""Tokens that rows must share to be read together."""
COLUMNS = tl.constexpr(64)
"""Blocks of the table that are compared at once."""
NONE = tl.constexpr(1 << 30)
QUERIES = 16
"""Of a segment that are at hand at once, its rows times the query heads of a key head: the least
that tensor cores take. More would cost registers, and so what is in flight from memory."""
PARTS = 1024
"""Parts (row, key head, share of a row) that a step is cut into, if it can be."""
MOST_SPLITS = 32
"""Shares of a row."""


@dataclass(frozen=True)
class Heads:
    """Of a model's attention."""

    queries: int
    keys: int
    size: int
    page: int
    """Tokens of a KV block."""

    @property
    def each(self) -> int:
        """Query heads of a key head."""
        return self.queries // self.keys

    @property
    def tile(self) -> int:
        """Queries that are at hand at once, a power of two."""
        least = 1 << (2 * self.each - 1).bit_length()
        return max(QUERIES, least)

    @property
    def rows(self) -> int:
        """Of the batch that a segment may have: a power of two."""
        return 1 << ((self.tile // self.each).bit_length() - 1)

    def splits(self, rows: int) -> int:
        """Shares that each of so many rows is cut into."""
        return max(1, min(MOST_SPLITS, PARTS // max(1, rows * self.keys)))


class Scratch:
    """What the steps of a model's layers hand on, one after the other."""

    def __init__(self, heads: Heads, rows: int, device: torch.device) -> None:
        """`rows`: of a batch, at most."""
        self.heads = heads
        parts = max(heads.splits(n) * n for n in range(1, rows + 1))
        self.leader = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows]: the first row of each one's segment."""
        self.shared = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows]: tokens that its segment shares; 0: it is alone."""
        shape = (2 * parts * heads.queries,)
        self.sums = torch.empty(*shape, dtype=torch.float32, device=device)
        self.values = torch.empty(*shape, heads.size, dtype=torch.float32, device=device)
        """Of each part: log2 of its sum of exponentials, and what it makes of the values."""


def plan(scratch: Scratch, table: Tensor, lengths: Tensor) -> None:
    """See who shares what: once a step, before its layers. table [rows, blocks] int32; lengths
    [rows] int32, the token that is being decoded included, 0: nobody's row."""
    rows = len(lengths)
    each = scratch.heads.rows
    _plan[(triton.cdiv(rows, each),)](
        table,
        table.stride(0),
        table.shape[1],
        lengths,
        scratch.leader,
        scratch.shared,
        rows,
        PAGE=scratch.heads.page,
        ROWS=each,
    )


@triton.jit(do_not_specialize=["table_row", "width", "rows"])
def _plan(
    table_ptr,
    table_row,
    width,
    lengths_ptr,
    leader_ptr,
    shared_ptr,
    rows,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows: where segments begin, and how much each shares."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, ROWS)
    inside = row < rows
    first = place == 0
    length = tl.load(lengths_ptr + row, mask=inside, other=0)
    before = tl.load(lengths_ptr + row - 1, mask=inside & (row > 0), other=0)
    # Whole blocks of both, and each row keeps a token for itself.
    least = tl.maximum(tl.minimum(length, before) - 1, 0) // PAGE
    least = tl.where(first, 0, tl.minimum(least, width))
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
    same = tl.where(same < LEAST_SHARED, 0, same)
    # Two segments that share a little with each other stay two: their own parts are longer.
    above = tl.sum(tl.where(place[:, None] == place[None, :] + 1, same[:, None], 0), axis=0)
    below = tl.sum(tl.where(place[:, None] + 1 == place[None, :], same[:, None], 0), axis=0)
    begins = first | (same == 0) | (8 * same < 7 * tl.maximum(above, below))
    earlier = (place[:, None] <= place[None, :]) & begins[:, None]
    leader = tl.max(tl.where(earlier, place[:, None], 0), axis=0)
    # [i, j]: row i is in the segment of row j, and not its first.
    member = (leader[:, None] == leader[None, :]) & (leader != place)[:, None]
    shared = tl.min(tl.where(member, same[:, None], NONE), axis=0)
    shared = tl.where(shared == NONE, 0, shared)
    tl.store(leader_ptr + row, leader + row - place, mask=inside)
    tl.store(shared_ptr + row, shared, mask=inside)
