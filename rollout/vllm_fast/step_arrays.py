"""Stores the log-probabilities and sampling masks of whole steps in flat arrays, on GPU and CPU.

vLLM copies one bit for each id of the vocabulary to the CPU and creates an object for every token.
This takes longer than computing the tokens. Here, only the kept ids are copied, and they stay in
arrays until the completion has finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import SamplingMaskLists

from keel.rl.recordings import SamplingMasks

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

UNMASKED = "keel_unmasked"  # key in a request's `extra_args` that turns off its sampling masks


class StepMasks(NamedTuple):
    """The sampling masks of a step, with the methods of vLLM's `SamplingMaskTensors`."""

    counts: Tensor  # [rows] int32
    flat: Tensor  # int32 ids of all rows, one after another, as far as they fit
    ids: Tensor  # [rows, width] int32 ids on the GPU, in no particular order within a row
    bits: Tensor | None  # [rows, ⌈V / 8⌉] uint8, unless no row can have more than `width` ids

    def to_cpu_nonblocking(self) -> StepMasks:
        counts, flat = (t.to("cpu", non_blocking=True) for t in (self.counts, self.flat))
        # Later steps may overwrite `ids` before they are fetched.
        return StepMasks(counts, flat, self.ids.clone(), self.bits)

    def tolists(self, num_sampled_tokens: Any = None) -> SamplingMaskLists:
        """Copy the masks to the CPU. The ids kept by row r are `token_ids[offsets[r]:offsets[r +
        1]]`, in ascending order."""
        counts, width = self.counts.cpu().numpy(), self.ids.shape[1]
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        if offsets[-1] <= len(self.flat) and (counts <= width).all():
            # A copy frees the pinned block behind it.
            return SamplingMaskLists(self.flat.cpu().numpy()[: offsets[-1]].copy(), offsets, None)
        ids = _copy_to_cpu(self.ids)
        parts = [
            np.sort(ids[row, :count]) if count <= width else self._from_bits(row)
            for row, count in enumerate(counts)
        ]
        return SamplingMaskLists(np.concatenate(parts), offsets, None)

    def _from_bits(self, row: int) -> Any:
        assert self.bits is not None
        bits = np.unpackbits(_copy_to_cpu(self.bits[row]), bitorder="little")
        return np.flatnonzero(bits).astype(np.int32)


def _copy_to_cpu(tensor: Tensor) -> NDArray[Any]:
    """Copy a finished result to the CPU, without waiting for later steps on the GPU."""
    if not tensor.is_cuda:
        return tensor.numpy()
    with torch.cuda.stream(_copy_stream(tensor.device)):
        return tensor.cpu().numpy()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(slots=True)
class PackedRecording:
    """One request's log-probabilities and sampling masks, stored in arrays that cover one or more
    tokens each."""

    with_masks: bool
    logp: list[NDArray[np.float32]] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    sizes: list[NDArray[np.int64]] = field(default_factory=list)

    def take(self, output: EngineCoreOutput) -> None:
        if output.new_logprobs is not None:
            self.logp.append(output.new_logprobs.logprobs[:, 0].copy())
            output.new_logprobs = None
        if output.new_sampling_mask is not None:
            if self.with_masks:
                ids, offsets = output.new_sampling_mask[:2]
                self.ids.append(ids.copy())  # a view would hold the whole step
                self.sizes.append(np.array([len(ids)]) if offsets is None else np.diff(offsets))
            output.new_sampling_mask = None

    def logprobs(self) -> NDArray[np.float32]:
        """Return the log-probabilities [G] of the sampled tokens."""
        return np.concatenate(self.logp) if self.logp else np.zeros(0, np.float32)

    def sampling_masks(self) -> SamplingMasks:
        """Return the G tokens' sampling masks, with ids in ascending order."""
        if not self.sizes:
            return SamplingMasks.empty(0)
        sizes = np.concatenate(self.sizes)
        return SamplingMasks(
            ids=np.concatenate(self.ids).astype(np.int32, copy=False),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )
