"""Samples the tokens of a step from the few ids per row that truncation keeps. vLLM scans every row
once to draw the token, and again for the token's log-probability, its rank and its sampling mask.
Here, all blocks of a row are read in parallel. If vLLM has already truncated the logits, they are
read once; otherwise `keel.rollout.vllm_fast.truncate_kernels` reads them. Everything else uses only
the few ids found. Noise and ties are handled as in vLLM, so the sampled tokens are the same."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from keel.rollout.vllm_fast.step_arrays import StepMasks, ids_in_step
from keel.rollout.vllm_fast.truncate_kernels import truncate

_WIDEST = 2048
"""Number of ids stored per row. If a row keeps more ids, the whole row is scanned."""
BLOCK, NARROWEST, NARROW = 4096, 16, 64
"""Number of entries of a row that are read at once, and the minimum and the usual number of ids
that are sorted at once."""
ROWS = 1024
"""Minimum number of rows for which the kernel is compiled. Smaller batches then need no further
compilation."""


@triton.jit(do_not_specialize=["vocab_size", "width", "bits_row"])
def _find(
    logits_ptr, logits_row, sampled_ptr, ids_ptr, counts_ptr, bits_ptr, bits_row, vocab_size,
    width, RECORD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Find the kept ids in one block of a row and set their bits. The ids are in no particular
    order."""
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
def _load(logits_ptr, ids, inside, temperature, SCALE: tl.constexpr):
    """Load logits. If `SCALE` is set, divide them by the temperature."""
    logits = tl.load(logits_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if SCALE:
        logits = logits / temperature  # as in vLLM's kernel, to the bit
    return logits


@triton.jit
def _start(counts_ptr, row, width, ROWS: tl.constexpr):
    """Return the total number of ids in the rows before this one."""
    every = tl.arange(0, ROWS)
    counts = tl.load(counts_ptr + every, mask=every < row, other=0)
    return tl.sum(tl.minimum(counts, width))


@triton.jit
def _draw_filed(
    logits_ptr, ids_ptr, flat_ptr, start, count, room, seed, position, temperature,
    RECORD: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the token, the largest logit and the sum of exponentials of a row. All kept ids of the
    row must be stored."""
    place = tl.arange(0, WIDTH)
    inside = place < count
    # Ascending, so the lowest id wins ties and the sum is deterministic.
    ids = tl.sort(tl.load(ids_ptr + place, mask=inside, other=2147483647))
    if RECORD:
        tl.store(flat_ptr + start + place, ids, mask=inside & (start + place < room))
    logits = _load(logits_ptr, ids, inside, temperature, SCALE)
    _, best = gumbel_noised_argmax(
        logits, ids, inside, seed, position, temperature, False, False, False
    )
    top = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - top))
    return tl.sum(tl.where(inside & (place == best), ids, 0)), top, total


@triton.jit
def _draw_whole(logits_ptr, vocab_size, seed, position, temperature, SIZE: tl.constexpr):
    """Return the token, the largest logit and the sum of exponentials of a row that keeps more ids
    than are stored."""
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
def _draw(
    logits_ptr, logits_row, states_ptr, temperature_ptr, seed_ptr, position_ptr, ids_ptr,
    counts_ptr, token_ptr, logp_ptr, flat_ptr, vocab_size, width, room, RECORD: tl.constexpr,
    SCALE: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row, and write its log-probability and its ids. The ids are written
    after the ids of earlier rows."""
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
        start = _start(counts_ptr, row, width, ROWS)
    if count > width:  # only rows that vLLM truncated
        token, top, total = _draw_whole(logits, vocab_size, seed, position, temperature, SIZE)
    elif count > NARROW:
        token, top, total = _draw_filed(
            logits, ids, flat_ptr, start, count, room, seed, position, temperature, RECORD, SCALE,
            WIDTH,
        )  # fmt: skip
    else:
        token, top, total = _draw_filed(
            logits, ids, flat_ptr, start, count, room, seed, position, temperature, RECORD, SCALE,
            NARROW,
        )  # fmt: skip
    logp = _load(logits, token, True, temperature, SCALE) - top - tl.log(total)
    tl.store(token_ptr + row, token)
    tl.store(logp_ptr + row, logp)


class SampledRows(NamedTuple):
    """Tokens, log-probabilities and sampling masks from a step with `rows` requests."""

    tokens: Tensor
    """[rows, 1] int64 sampled token ids"""
    logp: Tensor
    """[rows, 1] float32 natural log-probabilities, normalised over the ids that are kept."""
    masks: StepMasks | None


class Truncation(NamedTuple):
    """Per-request truncation parameters (top-k and top-p), stored on the GPU."""

    top_k: Tensor
    """[requests] int32"""
    top_p: Tensor
    """[requests] float32"""


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
    must already be divided by the temperature, and must be minus infinity for ids that were cut
    off. `states` [rows] is the index of each row's request, and `positions` [rows] is the position
    of its token. `temperature` and `seeds` are indexed by request. Where `sampled` [rows] is 0 (an
    unfinished prompt), the mask is empty and the other results are undefined. If `truncation` is
    given, `width` is the largest top_k among the rows; otherwise, it is the number of ids that a
    row usually keeps.

    All results are new tensors, because a later step may run before they are read.
    """
    rows, vocab_size = logits.shape
    width = min(width, vocab_size, _WIDEST)
    device = logits.device
    bits = None
    if truncation:
        ids, counts = truncate(
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
        _find[(rows, -(-vocab_size // BLOCK))](logits, logits.stride(0), sampled, ids,
            counts, ids if bits is None else bits, 0 if bits is None else bits.shape[1],
            vocab_size, width, RECORD=record, SIZE=BLOCK,
        )  # fmt: skip
    tokens = torch.empty((rows, 1), dtype=torch.int64, device=device)
    logp = torch.empty((rows, 1), dtype=torch.float32, device=device)
    masks = None
    if record:
        flat = torch.empty(ids_in_step(rows, width), dtype=torch.int32, device=device)
        masks = StepMasks(counts, flat, ids, bits)
    widest = max(NARROWEST, triton.next_power_of_2(width))
    _draw[(rows,)](logits, logits.stride(0), states, temperature, seeds, positions, ids,
        counts, tokens, logp, masks.flat if masks else ids, vocab_size, width,
        len(masks.flat) if masks else 0, RECORD=record, SCALE=truncation is not None,
        ROWS=max(ROWS, triton.next_power_of_2(rows)), NARROW=min(NARROW, widest), WIDTH=widest,
        SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    return SampledRows(tokens, logp, masks)
