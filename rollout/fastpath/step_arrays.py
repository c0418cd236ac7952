"""What was recorded of completions, kept as arrays of whole steps until each is finished.

An object for each token of each completion would cost more than computing the tokens does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keel.rl.types import KeptSets


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Sampling masks of one step: row r kept `ids[offsets[r]:offsets[r + 1]]`."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def of(self, row: int) -> NDArray[np.int32]:
        return self.ids[self.offsets.item(row) : self.offsets.item(row + 1)]


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


def transpose_masks(
    steps: Sequence[StepMasks], rows: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """From spans step by step to spans request by request.

    `rows[s][r]` is the row of request r in step s. Returns the ids, [nnz], all of request 0 first,
    and the sizes of the spans, [R, S].
    """
    bases = np.cumsum([0, *(len(step.ids) for step in steps)])[:-1]
    starts = np.stack(
        [step.offsets[row] + base for step, row, base in zip(steps, rows, bases, strict=True)], 1
    )
    sizes = np.stack(
        [step.offsets[row + 1] - step.offsets[row] for step, row in zip(steps, rows, strict=True)],
        1,
    )
    flat = sizes.ravel()
    before = np.cumsum(flat) - flat
    take = np.repeat(starts.ravel() - before, flat) + np.arange(flat.sum())
    return np.concatenate([step.ids for step in steps])[take], sizes
