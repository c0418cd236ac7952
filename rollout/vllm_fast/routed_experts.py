"""Stores routes on the GPU, indexed by KV cache slot.

vLLM copies each step's routes to the CPU and sorts them by request and prefix block in Python.
Here, one kernel per step stores them on the GPU in the slot that also holds the token's keys, and
the rows of a request are collected when it has finished. A token keeps its slot as long as another
token attends to it. Routes can therefore be found through a request's blocks, even after chunked
prefills, with shared prefixes, or when tokens are recomputed after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.rl.types import NO_ROUTE


class SlotRoutes:
    """Replaces `AuxOutputWorkerConnector` in vLLM's Model Runner V2, and uses vLLM's route
    capture."""

    def __init__(self, captured: Tensor, slots: Tensor, layers: Sequence[int], size: int) -> None:
        """Allocate storage for the routes.

        `captured` [N, all layers, K] int32 holds the experts of the current step, and `slots` [≥ N]
        the cache slot of each of its tokens. Both tensors are overwritten in each step, in stream
        order. `layers` are the MoE layers, and `size` is the number of slots in the cache.
        """
        self._captured, self._slots = captured, slots
        every = list(range(captured.shape[1]))
        self._layers = (
            None
            if list(layers) == every
            else torch.tensor(list(layers), dtype=torch.int64, device=captured.device)
        )
        # A slot that was never stored must not look like a token sent to expert 0.
        self._table = torch.full(
            (size, len(layers), captured.shape[2]),
            NO_ROUTE,
            dtype=torch.int16,
            device=captured.device,
        )
        self._copy_stream = torch.cuda.Stream() if captured.is_cuda else None

    def begin_step(self, metadata: Any) -> None:
        """Called by vLLM before the forward pass."""

    def prepare_output(self, batch: Any) -> None:
        """Store the rows of the step without copying anything to the CPU. vLLM calls this after
        sampling."""
        self.store(int(batch.query_start_loc_np[batch.num_reqs]))

    def store(self, tokens: int) -> None:
        rows = self._captured[:tokens]
        if self._layers is not None:
            rows = rows.index_select(1, self._layers)
        self._table.index_copy_(0, self._slots[:tokens], rows.to(self._table.dtype))

    def rows(self, slots: NDArray[np.int64], *, stored: bool = False) -> NDArray[np.int16]:
        """Return the routes [len(slots), L, K]. Waits for the steps in flight unless all rows are
        `stored`."""
        with (
            torch.cuda.stream(self._copy_stream) if stored and self._copy_stream else nullcontext()
        ):
            index = torch.from_numpy(slots).to(self._table.device)
            return self._table[index].cpu().numpy()

    def close(self) -> None:
        """Called by vLLM when the engine shuts down."""
