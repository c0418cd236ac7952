"""What was recorded of completions, kept as arrays of whole steps until each is finished.

An object for each token of each completion would cost more than computing the tokens does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import SamplingMasks

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

UNMASKED = "keel_unmasked"
"""In a request's `extra_args`: nobody asks for its sampling masks."""


@dataclass(slots=True)
class Packed:
    """One request's log-probabilities and sampling masks, in pieces of one or more tokens."""

    kept_wanted: bool
    logp: list[NDArray[np.float32]] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    sizes: list[NDArray[np.int64]] = field(default_factory=list)

    def take(self, output: EngineCoreOutput) -> None:
        """What is recorded of the tokens that it delivers, which stays here."""
        if output.new_logprobs is not None:
            self.logp.append(output.new_logprobs.logprobs[:, 0].copy())
            output.new_logprobs = None
        if output.new_sampling_mask is not None:
            if self.kept_wanted:
                ids, offsets = output.new_sampling_mask[:2]
                self.ids.append(ids.copy())  # a view would hold the whole step
                self.sizes.append(np.array([len(ids)]) if offsets is None else np.diff(offsets))
            output.new_sampling_mask = None

    def logprobs(self) -> NDArray[np.float32]:
        """[G]"""
        return np.concatenate(self.logp) if self.logp else np.zeros(0, np.float32)

    def kept(self) -> SamplingMasks:
        """G spans of ascending ids."""
        if not self.sizes:
            return SamplingMasks.empty(0)
        sizes = np.concatenate(self.sizes)
        return SamplingMasks(
            ids=np.concatenate(self.ids).astype(np.int32, copy=False),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )
