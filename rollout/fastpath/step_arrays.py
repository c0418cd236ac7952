"""What was recorded of completions, kept as arrays of whole steps until each is finished.

An object for each token of each completion would cost more than computing the tokens does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import KeptSets


@dataclass(slots=True)
class Packed:
    """One request's log-probabilities and sampling masks, in pieces of one or more tokens."""

    kept_wanted: bool
    logp: list[NDArray[np.float32]] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    sizes: list[NDArray[np.int64]] = field(default_factory=list)

    def logprobs(self) -> NDArray[np.float32]:
        """[G]"""
        return np.concatenate(self.logp) if self.logp else np.zeros(0, np.float32)

    def kept(self) -> KeptSets:
        """G spans of ascending ids."""
        if not self.sizes:
            return KeptSets.empty(0)
        sizes = np.concatenate(self.sizes)
        return KeptSets(
            ids=np.concatenate(self.ids).astype(np.int32, copy=False),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )
