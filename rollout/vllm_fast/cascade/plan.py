"""Which rows of a decoding step have KV blocks in common, for `kernels.py`.

Rows that stand side by side and begin with the same blocks are a *segment*: of as many rows as can
be read together.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from keel.rollout.vllm_fast.truncate_kernels import launch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LEAST_SHARED = tl.constexpr(64)
"""Tokens that rows must share to be read together."""
COLUMNS = tl.constexpr(64)
AT_ONCE = 16
"""Blocks of the table, and rows of it, that are compared at once."""
NONE = tl.constexpr(1 << 30)
QUERIES = 16
"""Of a segment that are at hand at once, its rows times the query heads of a key head: the least
that tensor cores take. More would cost registers, and so what is in flight from memory."""
PARTS = 512
"""Parts (row, key head, slice of a row) that a step is cut into, if it can be: some for each of a
GPU's processors."""
LONGER = 4
"""Times as many where slices stay long: one of thousands of tokens that a segment shares would keep
a processor busy when all others are done."""
MOST_SPLITS = 32
"""Slices of a row."""
PAGE = 16
"""Tokens of a KV block, where nothing else is said."""
SIZES = (64, 128)
"""Of heads: those that have run."""
MOST_EACH = 4
"""Query heads of a key head. With more, what a row has for itself is read more slowly than by
vLLM's kernel, and fewer rows fit what is read together."""


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
    def covered(self) -> bool:
        """Whether the kernels are for such heads."""
        even = self.queries % self.keys == 0 and self.page & (self.page - 1) == 0
        return even and self.size in SIZES and self.each <= MOST_EACH

    @property
    def tile(self) -> int:
        """Queries that are at hand at once, a power of two."""
        least = 1 << (2 * self.each - 1).bit_length()
        return max(QUERIES, least)

    @property
    def rows(self) -> int:
        """Of the batch that a segment may have: a power of two."""
        return 1 << ((self.tile // self.each).bit_length() - 1)

    def splits(self, rows: int) -> tuple[int, int]:
        """Slices that each of so many rows is cut into, at least and at most."""
        fewest, most = (PARTS * times // max(1, rows * self.keys) for times in (1, LONGER))
        return max(1, min(MOST_SPLITS, fewest)), max(1, min(MOST_SPLITS, most))


def heads_of(text: PreTrainedConfig) -> Heads | None:
    """Of a model's attention, by its configuration; None where that is of another kind."""
    queries = getattr(text, "num_attention_heads", 0)
    keys = getattr(text, "num_key_value_heads", None) or queries
    if not queries or getattr(text, "kv_lora_rank", None):
        return None
    size = getattr(text, "head_dim", None) or text.hidden_size // queries
    return Heads(queries, keys, size, PAGE)


class Scratch:
    """What the steps of a model's layers hand on, one after the other."""

    def __init__(self, heads: Heads, rows: int, device: torch.device) -> None:
        """`rows`: of a batch, at most."""
        self.heads = heads
        parts = max(heads.splits(n)[1] * n for n in range(1, rows + 1))
        self.alike = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows]: tokens that each has in common with the one before it."""
        self.leader = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows]: the first row of each one's segment."""
        self.shared = torch.zeros(rows, dtype=torch.int32, device=device)
        """[rows]: tokens that its segment has in common; 0: it is alone."""
        shape = (2 * parts * heads.queries,)
        self.sums = torch.empty(*shape, dtype=torch.float32, device=device)
        self.values = torch.empty(*shape, heads.size, dtype=torch.float32, device=device)
        """Of each part: log2 of its sum of exponentials, and what it makes of the values."""


def plan(scratch: Scratch, table: Tensor, lengths: Tensor) -> None:
    """See who shares what: once a step, before its layers. table [rows, blocks] int32; lengths
    [rows] int32, the token that is being decoded included, 0: nobody's row."""
    rows = len(lengths)
    launch(
        _compare,
        (triton.cdiv(rows, AT_ONCE),),
        table,
        table.stride(0),
        table.shape[1],
        lengths,
        scratch.alike,
        rows,
        PAGE=scratch.heads.page,
        ROWS=AT_ONCE,
    )
    launch(
        _segment,
        (1,),
        scratch.alike,
        scratch.leader,
        scratch.shared,
        rows,
        ROWS=scratch.heads.rows,
        SIZE=triton.next_power_of_2(len(scratch.leader)),
        num_warps=8,
    )


@triton.jit(do_not_specialize=["table_row", "width", "rows"])
def _compare(
    table_ptr,
    table_row,
    width,
    lengths_ptr,
    alike_ptr,
    rows,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows: tokens that each has in common with the one before it, if they are worth it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows) & (row > 0)
    length = tl.load(lengths_ptr + row, mask=inside, other=0)
    before = tl.load(lengths_ptr + row - 1, mask=inside, other=0)
    # Whole blocks of both, and each row keeps a token for itself.
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
    alike_ptr,
    leader_ptr,
    shared_ptr,
    rows,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """All rows: the segments, of ROWS rows at most, counted from the first that shares."""
    row = tl.arange(0, SIZE)
    inside = row < rows
    same = tl.load(alike_ptr + row, mask=inside, other=0)
    # Two that share a little with each other stay two: their own parts are longer.
    above = tl.load(alike_ptr + row - 1, mask=inside & (row > 0), other=0)
    below = tl.load(alike_ptr + row + 1, mask=row + 1 < rows, other=0)
    begins = (same == 0) | (8 * same < 7 * tl.maximum(above, below))
    first = tl.associative_scan(tl.where(begins, row, 0), 0, _larger)
    begins = begins | ((row - first) % ROWS == 0)
    leader = tl.associative_scan(tl.where(begins, row, 0), 0, _larger)
    tl.store(leader_ptr + row, leader, mask=inside)
    tl.debug_barrier()  # what some threads have stored, others load
    shared = tl.full([SIZE], NONE, tl.int32)
    for number in range(1, ROWS):
        other = leader + number
        there = inside & (other < rows)
        there = there & (tl.load(leader_ptr + other, mask=there, other=-1) == leader)
        shared = tl.minimum(shared, tl.load(alike_ptr + other, mask=there, other=NONE))
    tl.store(shared_ptr + row, tl.where(shared == NONE, 0, shared), mask=inside)
