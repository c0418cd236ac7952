"""Applies top-k and top-p to the model's logits, and finds the ids that each row keeps.

vLLM copies the logits to float32 and scans each row many times with one program. Here, all blocks
of all rows are read in parallel, twice. The first pass finds the maxima of a thousand groups per
row. At least top_k logits are as large as the top_k-th largest maximum, which therefore is a lower
bound for the kept logits. The second pass finds the logits that reach this bound. They are few
enough to sort.

The result is exact. If several logits at the cutoff are equal, those with the lowest ids are kept,
and no row keeps more than its top_k.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST_TOP_K = 1024
"""Largest top_k that the kernels support."""
BLOCK, LARGEST_GROUP = 4096, 256
"""Number of entries of a row that are read at once, and maximum number of entries in a group."""
FEWEST_SORTED, LEAST_ROOM = 64, 1024
"""Minimum number of ids sorted at once, and minimum number of ids stored per row."""

_ALL_BUT_SIGN = tl.constexpr(0x7FFFFFFF)
_LEAST = tl.constexpr(-0x80000000)
_ABOVE_NOTHING = tl.constexpr(-0x7F800000)
"""Integer that represents the lowest finite logit. Minus infinity is one less."""
_LAST_BIT = tl.constexpr(10)
"""Last bit in the search for the bound. The relative error of 2^-13 adds only a few candidates."""


@triton.jit
def _order(logits_ptr, ids, inside, temperature):
    """Divide logits by the temperature and convert them to integers in the same order. NaN is
    treated as infinity, so that the log-probability becomes NaN and is detected."""
    logits = tl.load(logits_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    logits = logits / temperature  # as in vLLM's kernel, to the bit
    logits = tl.where(logits != logits, float("inf"), logits)
    logits = tl.where(logits == 0, 0.0, logits)  # minus zero equals zero
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ _ALL_BUT_SIGN)


@triton.jit
def _logits(order):
    """Convert integers returned by `_order` back to logits."""
    bits = tl.where(order >= 0, order, order ^ _ALL_BUT_SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _maxima(
    logits_ptr, logits_row, states_ptr, temperature_ptr, sampled_ptr, maxima_ptr, vocab_size,
    groups, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Compute the maximum of each of GROUPS groups in one row. A group consists of every
    `groups`-th id. Likely ids are often neighbours, so this puts them in different groups."""
    row = tl.program_id(0)
    if tl.load(sampled_ptr + row) > 0:
        temperature = tl.load(temperature_ptr + tl.load(states_ptr + row))
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        ids = tl.arange(0, GROUP)[:, None] * groups + group[None, :]
        logits = logits_ptr + row.to(tl.int64) * logits_row
        order = _order(logits, ids, ids < vocab_size, temperature)
        tl.store(maxima_ptr + row * groups + group, tl.max(order, axis=0))


@triton.jit
def _bound(
    states_ptr, top_k_ptr, sampled_ptr, maxima_ptr, bounds_ptr, found_ptr, groups,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Find a threshold that at least top_k logits of a row meet or exceed. If fewer logits are
    finite, all finite ones do."""
    row = tl.program_id(0)
    tl.store(found_ptr + row, 0)
    if tl.load(sampled_ptr + row) > 0:
        top_k = tl.load(top_k_ptr + tl.load(states_ptr + row))
        place = tl.arange(0, SIZE)
        maxima = tl.load(maxima_ptr + row * groups + place, mask=place < groups, other=_LEAST)
        bound = tl.where(tl.sum((maxima >= 0).to(tl.int32)) >= top_k, 0, _LEAST)
        for step in range(31 - _LAST_BIT):
            higher = bound + (1 << (30 - step))
            bound = tl.where(tl.sum((maxima >= higher).to(tl.int32)) >= top_k, higher, bound)
        tl.store(bounds_ptr + row, tl.maximum(bound, _ABOVE_NOTHING))


@triton.jit
def _keys(order, ids):
    """Return sort keys that put larger logits first and, among equal logits, lower ids first."""
    return (order.to(tl.int64) << 32) | (ids ^ _ALL_BUT_SIGN).to(tl.int64)


@triton.jit
def _file(
    logits_ptr, logits_row, states_ptr, temperature_ptr, sampled_ptr, bounds_ptr, keys_ptr,
    found_ptr, vocab_size, ROOM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the sort keys of the logits in one block that reach the row's bound, in no particular
    order."""
    row = tl.program_id(0)
    if tl.load(sampled_ptr + row) > 0:
        temperature = tl.load(temperature_ptr + tl.load(states_ptr + row))
        ids = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        logits = logits_ptr + row.to(tl.int64) * logits_row
        order = _order(logits, ids, ids < vocab_size, temperature)
        reach = order >= tl.load(bounds_ptr + row)
        # Few do, so one atomic each is cheaper than a sum over the block.
        place = tl.atomic_add(found_ptr + row + ids * 0, 1, mask=reach, sem="relaxed")
        mine = reach & (place < ROOM)
        tl.store(keys_ptr + row.to(tl.int64) * ROOM + place, _keys(order, ids), mask=mine)


@triton.jit
def _count(logits_ptr, vocab_size, temperature, bound, SIZE: tl.constexpr):
    count = 0
    for first in range(0, vocab_size, SIZE):
        ids = first + tl.arange(0, SIZE)
        order = _order(logits_ptr, ids, ids < vocab_size, temperature)
        count += tl.sum((order >= bound).to(tl.int32))
    return count


@triton.jit
def _file_exactly(logits_ptr, vocab_size, temperature, top_k, keys_ptr, SIZE: tl.constexpr):
    """Store the sort keys of a row's top_k largest logits exactly, using many passes. This is the
    fallback for a flat distribution whose candidates do not fit into the buffer."""
    least = tl.where(_count(logits_ptr, vocab_size, temperature, 0, SIZE) >= top_k, 0, _LEAST)
    for step in range(31):
        higher = least + (1 << (30 - step))
        enough = _count(logits_ptr, vocab_size, temperature, higher, SIZE) >= top_k
        least = tl.where(enough, higher, least)
    equals = top_k - _count(logits_ptr, vocab_size, temperature, least + 1, SIZE)
    filed = 0
    for first in range(0, vocab_size, SIZE):
        ids = first + tl.arange(0, SIZE)
        order = _order(logits_ptr, ids, ids < vocab_size, temperature)
        equal = (order == least).to(tl.int32)
        mine = (order > least) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= equals))
        equals -= tl.sum(equal)
        number = mine.to(tl.int32)
        place = filed + tl.cumsum(number, axis=0) - number
        tl.store(keys_ptr + place, _keys(order, ids), mask=mine)
        filed += tl.sum(number)


@triton.jit
def _cut_sorted(keys_ptr, found, top_k, top_p, ids_ptr, SIZE: tl.constexpr):
    """Store the ids of the candidates that are kept, and return their number."""
    place = tl.arange(0, SIZE)
    keys = tl.load(keys_ptr + place, mask=place < found, other=-0x7FFFFFFFFFFFFFFF)
    keys = tl.sort(keys, descending=True)
    inside = place < tl.minimum(found, top_k)
    logits = _logits((keys >> 32).to(tl.int32))
    top = tl.max(tl.where(inside, logits, -float("inf")), axis=0)
    weights = tl.where(inside, tl.exp(logits - top), 0.0)
    # An id stays while the ids before it hold less than top_p, so the first always does.
    before = tl.cumsum(weights, axis=0) - weights
    limit = tl.where(top_p < 1, top_p * tl.sum(weights), float("inf"))
    kept = inside & ((before < limit) | (place == 0))
    count = tl.sum(kept.to(tl.int32))
    ids = (keys & _ALL_BUT_SIGN).to(tl.int32) ^ _ALL_BUT_SIGN
    tl.store(ids_ptr + place, ids, mask=place < count)
    return count


@triton.jit(do_not_specialize=["width"])
def _cut(
    logits_ptr, logits_row, states_ptr, temperature_ptr, top_k_ptr, top_p_ptr, keys_ptr,
    found_ptr, ids_ptr, counts_ptr, vocab_size, width, LIKELY: tl.constexpr, ROOM: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Find the kept ids of one row, and store them with their number."""
    row = tl.program_id(0)
    keys = keys_ptr + row.to(tl.int64) * ROOM
    ids = ids_ptr + row.to(tl.int64) * width
    state = tl.load(states_ptr + row)
    top_k = tl.load(top_k_ptr + state)
    top_p = tl.load(top_p_ptr + state)
    found = tl.load(found_ptr + row)
    if found > ROOM:
        temperature = tl.load(temperature_ptr + state)
        logits = logits_ptr + row.to(tl.int64) * logits_row
        _file_exactly(logits, vocab_size, temperature, top_k, keys, SIZE)
        tl.debug_barrier()  # other threads load these stores
        found = top_k
    if found > LIKELY:
        count = _cut_sorted(keys, found, top_k, top_p, ids, ROOM)
    else:
        count = _cut_sorted(keys, found, top_k, top_p, ids, LIKELY)
    tl.store(counts_ptr + row, count)


def truncate(
    logits: Tensor,
    states: Tensor,
    *,
    sampled: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Return each row's kept ids [rows, width] int32, most likely first, and their number [rows]
    int32. `logits` [rows, V] come directly from the model. `states` [rows] is the index of each
    row's request. `temperature` (> 0), `top_k` (1 to `width`) and `top_p` are indexed by request.
    `width` is at most `WIDEST_TOP_K`. A row keeps no ids where `sampled` [rows] is 0."""
    rows, vocab_size = logits.shape
    device = logits.device
    group = LARGEST_GROUP
    while group > 1 and vocab_size // group < 2 * width:  # then about 1.4 · top_k reach the bound
        group //= 2
    block_groups = BLOCK // group
    blocks = triton.cdiv(vocab_size, BLOCK)
    groups = blocks * block_groups
    likely = max(FEWEST_SORTED, triton.next_power_of_2(width + width // 2))
    room = max(LEAST_ROOM, 2 * likely)
    maxima = torch.empty((rows, groups), dtype=torch.int32, device=device)
    bounds, found, counts = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3))
    keys = torch.empty((rows, room), dtype=torch.int64, device=device)
    ids = torch.empty((rows, width), dtype=torch.int32, device=device)
    _maxima[(rows, blocks)](logits, logits.stride(0), states, temperature, sampled, maxima,
        vocab_size, groups, GROUP=group, GROUPS=block_groups,
    )  # fmt: skip
    size = triton.next_power_of_2(groups)
    _bound[(rows,)](states, top_k, sampled, maxima, bounds, found, groups, SIZE=size)
    _file[(rows, blocks)](logits, logits.stride(0), states, temperature, sampled, bounds,
        keys, found, vocab_size, ROOM=room, SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    _cut[(rows,)](logits, logits.stride(0), states, temperature, top_k, top_p, keys, found,
        ids, counts, vocab_size, width, LIKELY=likely, ROOM=room, SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    return ids, counts
