"""Kept sets of a step, from the truncated logits to flat arrays in host memory.

Stands in for vLLM's own, which reads a row of logits with one block of threads from front to back
and sends a bit for each id of the vocabulary to the host. Here all blocks of a row are read at
once, only the kept ids travel, and the host cuts nothing up. The bits stay on the GPU for the rare
row with more ids than the widest top-k allows (ids of equal logits).
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
import vllm.v1.worker.gpu.sample.sampler as vllm_sampler
from torch import Tensor
from vllm.v1.outputs import SamplingMaskLists

WIDEST = 2048
"""Ids of a row that are filed beside the bits."""
MEAN = 64
"""Ids of a mean row that travel with the step; more are fetched when they are needed."""
BLOCK, NARROWEST = 4096, 16
ROWS = 1024
"""Least number of rows that the kernel is compiled for, so that it is compiled once."""


@triton.jit(do_not_specialize=["vocab_size", "width"])
def _find(
    logits_ptr,
    logits_row,
    logits_column,
    source_ptr,
    sampled_ptr,
    ids_ptr,
    ids_row,
    bits_ptr,
    bits_row,
    counts_ptr,
    vocab_size,
    width,
    SIZE: tl.constexpr,
):
    """One block of one row: ids with a finite logit, in no order, and their bits."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    if tl.load(sampled_ptr + row) > 0:
        source = tl.load(source_ptr + row).to(tl.int64)
        ids = block * SIZE + tl.arange(0, SIZE)
        logits = tl.load(
            logits_ptr + source * logits_row + ids * logits_column,
            mask=ids < vocab_size,
            other=-float("inf"),
        )
        kept = ((logits > -float("inf")) & (logits < float("inf"))).to(tl.int32)
        count = tl.sum(kept)
        if count > 0:
            place = tl.atomic_add(counts_ptr + row, count) + tl.cumsum(kept, axis=0) - kept
            tl.store(ids_ptr + row * ids_row + place, ids, mask=(kept > 0) & (place < width))
            bits = tl.sum(tl.reshape(kept, (SIZE // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
            bytes_ = block * (SIZE // 8) + tl.arange(0, SIZE // 8)
            tl.store(bits_ptr + row * bits_row + bytes_, bits.to(tl.uint8), mask=bytes_ < bits_row)


@triton.jit(do_not_specialize=["rows", "width", "room"])
def _line_up(
    ids_ptr,
    ids_row,
    counts_ptr,
    flat_ptr,
    rows,
    width,
    room,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row: its ids, ascending, behind those of the rows before it."""
    row = tl.program_id(0)
    every = tl.arange(0, ROWS)
    counts = tl.minimum(tl.load(counts_ptr + every, mask=every < rows, other=0), width)
    start = tl.sum(tl.where(every < row, counts, 0))
    count = tl.sum(tl.where(every == row, counts, 0))
    place = tl.arange(0, WIDTH)
    ids = tl.load(ids_ptr + row * ids_row + place, mask=place < count, other=2147483647)
    mine = (place < count) & (start + place < room)
    tl.store(flat_ptr + start + place, tl.sort(ids), mask=mine)


class StepSets(NamedTuple):
    """Takes the place of vLLM's `SamplingMaskTensors`; its methods are those."""

    counts: Tensor
    """[rows] int32"""
    flat: Tensor
    """[room] int32: all ids, row by row, as far as there is room."""
    ids: Tensor
    """[rows, width] int32, on the device, in no order within a row."""
    bits: Tensor
    """[rows, ⌈V / 8⌉] uint8, on the device."""

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        cu_num_logits: Tensor,
        num_sampled_tokens: Tensor,
        max_num_kept: int,
        rows_per_request: int = 1,
    ) -> StepSets:
        """`logits` [≥ rows, V], minus infinity where an id was cut off. Row r is about its row
        `cu_num_logits[r]`, if `num_sampled_tokens[r]` is not 0."""
        if rows_per_request != 1:
            raise ValueError("rollout.recorder = 'packed' takes one token a request and step")
        rows, vocab_size = len(num_sampled_tokens), logits.shape[1]
        width = min(max_num_kept, vocab_size, WIDEST)
        room = rows * min(width, MEAN)
        device = logits.device
        ids = torch.empty((rows, width), dtype=torch.int32, device=device)
        flat = torch.empty(room, dtype=torch.int32, device=device)
        counts = torch.zeros(rows, dtype=torch.int32, device=device)
        bits = torch.zeros((rows, -(-vocab_size // 8)), dtype=torch.uint8, device=device)
        _find[(rows, -(-vocab_size // BLOCK))](
            logits,
            logits.stride(0),
            logits.stride(1),
            cu_num_logits,
            num_sampled_tokens,
            ids,
            ids.stride(0),
            bits,
            bits.stride(0),
            counts,
            vocab_size,
            width,
            SIZE=BLOCK,
        )
        _line_up[(rows,)](
            ids,
            ids.stride(0),
            counts,
            flat,
            rows,
            width,
            room,
            ROWS=max(ROWS, triton.next_power_of_2(rows)),
            WIDTH=max(NARROWEST, triton.next_power_of_2(width)),
        )
        return cls(counts, flat, ids, bits)

    def to_cpu_nonblocking(self) -> StepSets:
        counts, flat = (t.to("cpu", non_blocking=True) for t in (self.counts, self.flat))
        return StepSets(counts, flat, self.ids, self.bits)

    def tolists(self, num_sampled_tokens: Any = None) -> SamplingMaskLists:
        """Row r kept `token_ids[offsets[r]:offsets[r + 1]]`, ascending."""
        counts, width = self.counts.cpu().numpy(), self.ids.shape[1]
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        if offsets[-1] <= len(self.flat) and (counts <= width).all():
            # A copy, so that the pinned block behind it is free again.
            return SamplingMaskLists(self.flat.cpu().numpy()[: offsets[-1]].copy(), offsets, None)
        ids = self.ids.cpu().numpy()
        parts = [
            np.sort(ids[row, :count]) if count <= width else self._from_bits(row)
            for row, count in enumerate(counts)
        ]
        return SamplingMaskLists(np.concatenate(parts), offsets, None)

    def _from_bits(self, row: int) -> Any:
        bits = np.unpackbits(self.bits[row].cpu().numpy(), bitorder="little")
        return np.flatnonzero(bits).astype(np.int32)


def install() -> None:
    """Have vLLM's sampler in this process use `StepSets`. Raises RuntimeError if it would not."""
    if not hasattr(vllm_sampler, "SamplingMaskTensors"):
        raise RuntimeError(
            "rollout.recorder = 'packed': vLLM's sampler no longer has SamplingMaskTensors, which "
            "is replaced. Use native, or vLLM 0.32"
        )
    vllm_sampler.SamplingMaskTensors = StepSets
