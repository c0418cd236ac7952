"""Truncates the model's logits and samples the tokens of a step from the few ids that each row
keeps.

vLLM copies the logits to float32 and scans each row many times with one program to truncate it. It
then scans the row once to draw the token, and again for the token's log-probability, rank and
sampling mask. Here, all blocks of all rows are read in parallel. If vLLM has already truncated the
logits, they are read once.

Otherwise `_truncate` reads them twice. The first pass computes the maxima of a thousand groups per
row. At least top_k logits are as large as the top_k-th largest maximum, which is therefore a lower
bound for the kept logits. The second pass collects the logits that are at least this bound. They
are few enough to sort. Everything else uses only the few ids found.

The result is exact. If several logits at the cutoff are equal, those with the lowest ids are kept,
and no row keeps more than its top_k. Noise and ties are handled as in vLLM, so the sampled tokens
are the same.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's kernels are not written in the types of Python.
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from keel.rollout.vllm_fast.step_arrays import StepMasks

_BLOCK = 4096  # number of entries of a row that are read at once
_LARGEST_GROUP = 256
_FEWEST_SORTED, _LEAST_ROOM = 64, 1024  # minimum ids sorted at once, and stored per row

_ALL_BUT_SIGN = tl.constexpr(0x7FFFFFFF)
_LEAST = tl.constexpr(-0x80000000)
_ABOVE_NOTHING = tl.constexpr(-0x7F800000)  # the lowest finite logit, one above −∞
_LAST_BIT = tl.constexpr(10)  # of the bound; an error of 2^-13 adds only a few candidates


@triton.jit
def _ordered_ints(logits_ptr, ids, inside, temperature):
    """Divide logits by the temperature and convert them to integers that sort in the same order.
    NaN becomes infinity, so that the log-probability becomes NaN and the error is detected."""
    logits = tl.load(logits_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    logits = logits / temperature  # as in vLLM's kernel, to the bit
    logits = tl.where(logits != logits, float("inf"), logits)
    logits = tl.where(logits == 0, 0.0, logits)  # minus zero equals zero
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ _ALL_BUT_SIGN)


@triton.jit
def _restore_logits(order):
    bits = tl.where(order >= 0, order, order ^ _ALL_BUT_SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _group_maxima(
    logits_ptr, logits_row, states_ptr, temperature_ptr, sampled_ptr, maxima_ptr, vocab_size,
    groups, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Compute the largest logit in each of GROUPS groups of ids in one row. A group contains every
    `groups`-th id, because likely ids are often next to each other."""
    row = tl.program_id(0)
    if tl.load(sampled_ptr + row) > 0:
        temperature = tl.load(temperature_ptr + tl.load(states_ptr + row))
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        ids = tl.arange(0, GROUP)[:, None] * groups + group[None, :]
        logits = logits_ptr + row.to(tl.int64) * logits_row
        order = _ordered_ints(logits, ids, ids < vocab_size, temperature)
        tl.store(maxima_ptr + row * groups + group, tl.max(order, axis=0))


@triton.jit
def _find_threshold(
    states_ptr, top_k_ptr, sampled_ptr, maxima_ptr, bounds_ptr, found_ptr, groups,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Find a threshold such that at least top_k logits in a row are greater than or equal to it. If
    fewer than top_k logits are finite, all finite ones reach the threshold."""
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
def _sort_keys(order, ids):
    """Return sort keys that put larger logits first and, among equal logits, lower ids first."""
    return (order.to(tl.int64) << 32) | (ids ^ _ALL_BUT_SIGN).to(tl.int64)


@triton.jit
def _collect_candidates(
    logits_ptr, logits_row, states_ptr, temperature_ptr, sampled_ptr, bounds_ptr, keys_ptr,
    found_ptr, vocab_size, ROOM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Collect the sort keys of all logits in a block that are at least the row's threshold, in no
    particular order."""
    row = tl.program_id(0)
    if tl.load(sampled_ptr + row) > 0:
        temperature = tl.load(temperature_ptr + tl.load(states_ptr + row))
        ids = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        logits = logits_ptr + row.to(tl.int64) * logits_row
        order = _ordered_ints(logits, ids, ids < vocab_size, temperature)
        reach = order >= tl.load(bounds_ptr + row)
        # Few do, so one atomic each is cheaper than a sum over the block.
        place = tl.atomic_add(found_ptr + row + ids * 0, 1, mask=reach, sem="relaxed")
        mine = reach & (place < ROOM)
        tl.store(keys_ptr + row.to(tl.int64) * ROOM + place, _sort_keys(order, ids), mask=mine)


@triton.jit
def _count_at_least(logits_ptr, vocab_size, temperature, bound, SIZE: tl.constexpr):
    count = 0
    for first in range(0, vocab_size, SIZE):
        ids = first + tl.arange(0, SIZE)
        order = _ordered_ints(logits_ptr, ids, ids < vocab_size, temperature)
        count += tl.sum((order >= bound).to(tl.int32))
    return count


@triton.jit
def _collect_exactly(logits_ptr, vocab_size, temperature, top_k, keys_ptr, SIZE: tl.constexpr):
    """Collect the sort keys of a row's top_k largest logits in many passes. Used for flat
    distributions, whose candidates don't fit in the buffer."""
    least = tl.where(
        _count_at_least(logits_ptr, vocab_size, temperature, 0, SIZE) >= top_k, 0, _LEAST
    )
    for step in range(31):
        higher = least + (1 << (30 - step))
        enough = _count_at_least(logits_ptr, vocab_size, temperature, higher, SIZE) >= top_k
        least = tl.where(enough, higher, least)
    equals = top_k - _count_at_least(logits_ptr, vocab_size, temperature, least + 1, SIZE)
    filed = 0
    for first in range(0, vocab_size, SIZE):
        ids = first + tl.arange(0, SIZE)
        order = _ordered_ints(logits_ptr, ids, ids < vocab_size, temperature)
        equal = (order == least).to(tl.int32)
        mine = (order > least) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= equals))
        equals -= tl.sum(equal)
        number = mine.to(tl.int32)
        place = filed + tl.cumsum(number, axis=0) - number
        tl.store(keys_ptr + place, _sort_keys(order, ids), mask=mine)
        filed += tl.sum(number)


@triton.jit
def _sort_and_truncate(keys_ptr, found, top_k, top_p, ids_ptr, SIZE: tl.constexpr):
    """Sort a row's candidates, apply top_k and top_p, and store the remaining ids. Returns how many
    ids remain."""
    place = tl.arange(0, SIZE)
    keys = tl.load(keys_ptr + place, mask=place < found, other=-0x7FFFFFFFFFFFFFFF)
    keys = tl.sort(keys, descending=True)
    inside = place < tl.minimum(found, top_k)
    logits = _restore_logits((keys >> 32).to(tl.int32))
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
def _truncate_row(
    logits_ptr, logits_row, states_ptr, temperature_ptr, top_k_ptr, top_p_ptr, keys_ptr,
    found_ptr, ids_ptr, counts_ptr, vocab_size, width, LIKELY: tl.constexpr, ROOM: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Truncate one row, and store its kept ids and their number."""
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
        _collect_exactly(logits, vocab_size, temperature, top_k, keys, SIZE)
        tl.debug_barrier()  # other threads load these stores
        found = top_k
    if found > LIKELY:
        count = _sort_and_truncate(keys, found, top_k, top_p, ids, ROOM)
    else:
        count = _sort_and_truncate(keys, found, top_k, top_p, ids, LIKELY)
    tl.store(counts_ptr + row, count)


def _truncate(
    logits: Tensor,
    states: Tensor,
    *,
    sampled: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Apply temperature, top-k and top-p to logits. Returns each row's kept ids [rows, width]
    int32, most likely first, and their number [rows] int32.

    `logits` [rows, V] come directly from the model. `states` [rows] is the index of each row's
    request. `temperature` (> 0), `top_k` (1 to `width`) and `top_p` are indexed by request. `width`
    is at most `WIDEST_MASK`. A row keeps no ids where `sampled` [rows] is 0.
    """
    rows, vocab_size = logits.shape
    device = logits.device
    group = _LARGEST_GROUP
    while group > 1 and vocab_size // group < 2 * width:  # then about 1.4 · top_k reach the bound
        group //= 2
    block_groups = _BLOCK // group
    blocks = triton.cdiv(vocab_size, _BLOCK)
    groups = blocks * block_groups
    likely = max(_FEWEST_SORTED, triton.next_power_of_2(width + width // 2))
    room = max(_LEAST_ROOM, 2 * likely)
    maxima = torch.empty((rows, groups), dtype=torch.int32, device=device)
    bounds, found, counts = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3))
    keys = torch.empty((rows, room), dtype=torch.int64, device=device)
    ids = torch.empty((rows, width), dtype=torch.int32, device=device)
    _group_maxima[(rows, blocks)](logits, logits.stride(0), states, temperature, sampled, maxima,
        vocab_size, groups, GROUP=group, GROUPS=block_groups,
    )  # fmt: skip
    size = triton.next_power_of_2(groups)
    _find_threshold[(rows,)](states, top_k, sampled, maxima, bounds, found, groups, SIZE=size)
    _collect_candidates[(rows, blocks)](logits, logits.stride(0), states, temperature, sampled,
        bounds, keys, found, vocab_size, ROOM=room, SIZE=_BLOCK, num_warps=8,
    )  # fmt: skip
    _truncate_row[(rows,)](logits, logits.stride(0), states, temperature, top_k, top_p, keys, found,
        ids, counts, vocab_size, width, LIKELY=likely, ROOM=room, SIZE=_BLOCK, num_warps=8,
    )  # fmt: skip
    return ids, counts


_WIDEST = 2048  # number of ids stored per row. If a row keeps more ids, the whole row is scanned.
_MEAN_IDS, _LEAST_IDS = 64, 16_384  # ids copied to the CPU: mean per row, and minimum
_NARROWEST, _NARROW = 16, 64  # minimum and usual number of ids that are sorted at once
_ROWS = 1024  # minimum rows to compile for, so that smaller batches need no compilation


@triton.jit(do_not_specialize=["vocab_size", "width", "bits_row"])
def _collect_kept_ids(
    logits_ptr, logits_row, sampled_ptr, ids_ptr, counts_ptr, bits_ptr, bits_row, vocab_size,
    width, RECORD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Collect the ids in a block of a row that remain after vLLM's truncation, in no particular
    order. Also sets their bits in the bitmap if `RECORD` is set."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    if tl.load(sampled_ptr + row) > 0:
        ids = block * SIZE + tl.arange(0, SIZE)
        logits = tl.load(
            logits_ptr + row.to(tl.int64) * logits_row + ids,
            mask=ids < vocab_size,
            other=-float("inf"),
        ).to(tl.float32)
        # NaN and infinity are kept, so the log-probability becomes NaN and is detected.
        kept = (logits != -float("inf")).to(tl.int32)
        count = tl.sum(kept)
        if count > 0:
            place = tl.atomic_add(counts_ptr + row, count) + tl.cumsum(kept, axis=0) - kept
            mine = (kept > 0) & (place < width)
            tl.store(ids_ptr + row.to(tl.int64) * width + place, ids, mask=mine)
            if RECORD:
                bits = tl.sum(tl.reshape(kept, (SIZE // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
                at = block * (SIZE // 8) + tl.arange(0, SIZE // 8)
                to = bits_ptr + row.to(tl.int64) * bits_row + at
                tl.store(to, bits.to(tl.uint8), mask=at < bits_row)


@triton.jit
def _load_logits(logits_ptr, ids, inside, temperature, SCALE: tl.constexpr):
    """Load logits, dividing them by the temperature if `SCALE` is set."""
    logits = tl.load(logits_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if SCALE:
        logits = logits / temperature  # as in vLLM's kernel, to the bit
    return logits


@triton.jit
def _ids_before_row(counts_ptr, row, width, ROWS: tl.constexpr):
    """Return the total number of kept ids in the rows before this one."""
    every = tl.arange(0, ROWS)
    counts = tl.load(counts_ptr + every, mask=every < row, other=0)
    return tl.sum(tl.minimum(counts, width))


@triton.jit
def _draw_from_ids(
    logits_ptr, ids_ptr, flat_ptr, start, count, room, seed, position, temperature,
    RECORD: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw a row's token from its kept ids. Used if all of them are stored. Returns the token, the
    largest logit and the sum of exponentials."""
    place = tl.arange(0, WIDTH)
    inside = place < count
    # Ascending, so the lowest id wins ties and the sum is deterministic.
    ids = tl.sort(tl.load(ids_ptr + place, mask=inside, other=2147483647))
    if RECORD:
        tl.store(flat_ptr + start + place, ids, mask=inside & (start + place < room))
    logits = _load_logits(logits_ptr, ids, inside, temperature, SCALE)
    _, best = gumbel_noised_argmax(
        logits, ids, inside, seed, position, temperature, False, False, False
    )
    top = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - top))
    return tl.sum(tl.where(inside & (place == best), ids, 0)), top, total


@triton.jit
def _draw_from_logits(logits_ptr, vocab_size, seed, position, temperature, SIZE: tl.constexpr):
    """Draw a row's token from its logits. Used if the row keeps more ids than are stored. Returns
    the token, the largest logit and the sum of exponentials."""
    token = 0
    highest = -float("inf")
    top = -float("inf")
    total = 0.0
    for first in range(0, vocab_size, SIZE):
        ids = first + tl.arange(0, SIZE)
        inside = ids < vocab_size
        logits = tl.load(logits_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
        value, best = gumbel_noised_argmax(
            logits, ids, inside, seed, position, temperature, False, False, False
        )
        token = tl.where(value > highest, first + best, token)
        highest = tl.maximum(highest, value)
        before = top
        top = tl.maximum(top, tl.max(logits, axis=0))
        least = tl.where(top == -float("inf"), 0.0, top)  # nothing kept so far
        total = total * tl.exp(before - least) + tl.sum(tl.exp(logits - least))
    return token, top, total


@triton.jit(do_not_specialize=["vocab_size", "width", "room"])
def _draw_row(
    logits_ptr, logits_row, states_ptr, temperature_ptr, seed_ptr, position_ptr, ids_ptr,
    counts_ptr, token_ptr, logp_ptr, flat_ptr, vocab_size, width, room, RECORD: tl.constexpr,
    SCALE: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Draw one row's token and store it along with its log-probability. The kept ids are written
    after those of earlier rows."""
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * logits_row
    ids = ids_ptr + row.to(tl.int64) * width
    state = tl.load(states_ptr + row)
    temperature = tl.load(temperature_ptr + state).to(tl.float32)
    seed = tl.load(seed_ptr + state)
    position = tl.load(position_ptr + row)
    count = tl.load(counts_ptr + row)
    start = 0
    if RECORD:
        start = _ids_before_row(counts_ptr, row, width, ROWS)
    if count > width:  # only rows that vLLM truncated
        token, top, total = _draw_from_logits(logits, vocab_size, seed, position, temperature, SIZE)
    elif count > NARROW:
        token, top, total = _draw_from_ids(
            logits, ids, flat_ptr, start, count, room, seed, position, temperature, RECORD, SCALE,
            WIDTH,
        )  # fmt: skip
    else:
        token, top, total = _draw_from_ids(
            logits, ids, flat_ptr, start, count, room, seed, position, temperature, RECORD, SCALE,
            NARROW,
        )  # fmt: skip
    logp = _load_logits(logits, token, True, temperature, SCALE) - top - tl.log(total)
    tl.store(token_ptr + row, token)
    tl.store(logp_ptr + row, logp)


class SampledRows(NamedTuple):
    """The tokens, log-probabilities and sampling masks of a step with `rows` requests."""

    tokens: Tensor  # [rows, 1] int64 sampled token ids
    logp: Tensor  # [rows, 1] float32 natural log-probabilities over the ids that are kept
    masks: StepMasks | None


class Truncation(NamedTuple):
    """Per-request truncation parameters (top-k and top-p), stored on the GPU."""

    top_k: Tensor  # [requests] int32
    top_p: Tensor  # [requests] float32


def draw(
    logits: Tensor,
    states: Tensor,
    positions: Tensor,
    *,
    sampled: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    width: int,
    record: bool,
    truncation: Truncation | None = None,
) -> SampledRows:
    """Draw a token for each row of `logits` [rows, V].

    If `truncation` is given, temperature and truncation are applied here. Otherwise, the logits
    must already be divided by the temperature, and be minus infinity for ids that were cut off.
    `states` [rows] is the index of each row's request, and `positions` [rows] is the position of
    its token. `temperature` and `seeds` are indexed by request. Where `sampled` [rows] is 0 (an
    unfinished prompt), the mask is empty and the other results are undefined.

    `width` is the largest top_k among the rows or, without `truncation`, the number of ids that a
    row usually keeps. All results are new tensors, because a later step may run before they are
    read.
    """
    rows, vocab_size = logits.shape
    width = min(width, vocab_size, _WIDEST)
    device = logits.device
    bits = None
    if truncation:
        ids, counts = _truncate(
            logits,
            states,
            sampled=sampled,
            temperature=temperature,
            top_k=truncation.top_k,
            top_p=truncation.top_p,
            width=width,
        )
    else:
        counts = torch.zeros(rows, dtype=torch.int32, device=device)
        ids = torch.empty((rows, width), dtype=torch.int32, device=device)
        if record:
            bits = torch.zeros((rows, -(-vocab_size // 8)), dtype=torch.uint8, device=device)
        _collect_kept_ids[(rows, -(-vocab_size // _BLOCK))](logits, logits.stride(0), sampled, ids,
            counts, ids if bits is None else bits, 0 if bits is None else bits.shape[1],
            vocab_size, width, RECORD=record, SIZE=_BLOCK,
        )  # fmt: skip
    tokens = torch.empty((rows, 1), dtype=torch.int64, device=device)
    logp = torch.empty((rows, 1), dtype=torch.float32, device=device)
    masks = None
    if record:
        copied = rows * min(width, max(_MEAN_IDS, _LEAST_IDS // rows))
        flat = torch.empty(copied, dtype=torch.int32, device=device)
        masks = StepMasks(counts, flat, ids, bits)
    widest = max(_NARROWEST, triton.next_power_of_2(width))
    _draw_row[(rows,)](logits, logits.stride(0), states, temperature, seeds, positions, ids,
        counts, tokens, logp, masks.flat if masks else ids, vocab_size, width,
        len(masks.flat) if masks else 0, RECORD=record, SCALE=truncation is not None,
        ROWS=max(_ROWS, triton.next_power_of_2(rows)), NARROW=min(_NARROW, widest), WIDTH=widest,
        SIZE=_BLOCK, num_warps=8,
    )  # fmt: skip
    return SampledRows(tokens, logp, masks)
