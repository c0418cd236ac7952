"""Routes on the GPU, by KV cache slot.

vLLM copies each step's routes to the host and files them by request and prefix block in Python.
Here one kernel per step stores them on the device, where a token's keys are, and a request's rows
are gathered once it is finished. A token keeps its slot while anything attends to it, so chunked
prefills, shared prefixes and tokens recomputed after a preemption are found by the request's
blocks.
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
    """Replaces vLLM's `AuxOutputWorkerConnector` in Model Runner V2 and uses its capture."""

    def __init__(self, captured: Tensor, slots: Tensor, layers: Sequence[int], size: int) -> None:
        """Both tensors are overwritten in each step, in stream order.

        `captured` [N, all layers, K] int32: experts of the current step. `slots` [≥ N]: cache slot
        of each of its tokens. `layers`: the MoE layers. `size`: slots in the cache.
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
        """Called by vLLM after sampling: stores the step's rows and sends nothing to the host."""
        self.store(int(batch.query_start_loc_np[batch.num_reqs]))

    def store(self, tokens: int) -> None:
        rows = self._captured[:tokens]
        if self._layers is not None:
            rows = rows.index_select(1, self._layers)
        self._table.index_copy_(0, self._slots[:tokens], rows.to(self._table.dtype))

    def rows(self, slots: NDArray[np.int64], *, stored: bool = False) -> NDArray[np.int16]:
        """[len(slots), L, K]; waits for the steps in flight unless all rows are `stored`."""
        with (
            torch.cuda.stream(self._copy_stream) if stored and self._copy_stream else nullcontext()
        ):
            index = torch.from_numpy(slots).to(self._table.device)
            return self._table[index].cpu().numpy()

    def close(self) -> None:
        """Called by vLLM when the engine shuts down."""
