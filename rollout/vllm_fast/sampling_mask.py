"""Sampling masks of a step, from flat arrays on the GPU to flat arrays in host memory.

vLLM's own send a bit for each id of the vocabulary to the host, which then cuts them up row by row.
Here only the kept ids travel. Where vLLM has truncated, bits stay on the GPU for the rare row with
more ids than the widest top-k allows (ids of equal logits).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import SamplingMaskLists

MEAN, ROOM = 64, 16_384
"""Ids of a mean row, and of a step of few rows, that travel with the step; more are fetched when
they are needed."""


def room(rows: int, width: int) -> int:
    """For ids that travel with a step."""
    return rows * min(width, max(MEAN, ROOM // rows))


def fetched(made: Tensor) -> NDArray[Any]:
    """In host memory, beside the steps that the GPU has been given since. What makes it must have
    come to its end."""
    if not made.is_cuda:
        return made.numpy()
    with torch.cuda.stream(_beside(made.device)):
        return made.cpu().numpy()


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class StepSets(NamedTuple):
    """Takes the place of vLLM's `SamplingMaskTensors`; its methods are those."""

    counts: Tensor
    """[rows] int32"""
    flat: Tensor
    """[room] int32: all ids, row by row, as far as there is room."""
    ids: Tensor
    """[rows, width] int32, on the device, in no order within a row."""
    bits: Tensor | None
    """[rows, ⌈V / 8⌉] uint8, on the device. None where no row can have more than `width` ids."""

    def to_cpu_nonblocking(self) -> StepSets:
        counts, flat = (t.to("cpu", non_blocking=True) for t in (self.counts, self.flat))
        # Several later steps may have written to the place of `ids` before they are fetched.
        return StepSets(counts, flat, self.ids.clone(), self.bits)

    def tolists(self, num_sampled_tokens: Any = None) -> SamplingMaskLists:
        """Row r kept `token_ids[offsets[r]:offsets[r + 1]]`, ascending."""
        counts, width = self.counts.cpu().numpy(), self.ids.shape[1]
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        if offsets[-1] <= len(self.flat) and (counts <= width).all():
            # A copy, so that the pinned block behind it is free again.
            return SamplingMaskLists(self.flat.cpu().numpy()[: offsets[-1]].copy(), offsets, None)
        ids = fetched(self.ids)
        parts = [
            np.sort(ids[row, :count]) if count <= width else self._from_bits(row)
            for row, count in enumerate(counts)
        ]
        return SamplingMaskLists(np.concatenate(parts), offsets, None)

    def _from_bits(self, row: int) -> Any:
        assert self.bits is not None
        bits = np.unpackbits(fetched(self.bits[row]), bitorder="little")
        return np.flatnonzero(bits).astype(np.int32)
