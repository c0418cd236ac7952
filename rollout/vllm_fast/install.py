"""Installs everything that makes vLLM faster for an engine with the packed recorder.
`AsyncFastScheduler` and `FastExtension` are passed to the engine as arguments
(`keel.rollout.recording.packed`). After the engine is built, `FastExtension.keel_install_fast`
replaces parts of each worker's model runner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from keel.rl.types import NO_ROUTE
from keel.rollout.vllm_fast import sample_graphs, sampler, step_reuse
from keel.weights.loader import WeightsExtension, moe_runners


class SlotRoutes:
    """Stores routes on the GPU, indexed by KV cache slot.

    This class replaces `AuxOutputWorkerConnector` in vLLM's Model Runner V2, which copies each
    step's routes to the CPU and sorts them in Python. vLLM's own route capture is still used. One
    kernel per step stores each token's routes under the slot that also holds the token's keys.

    A token keeps its slot as long as another token attends to it. Routes can therefore be found
    through a request's blocks, even after chunked prefills, with shared prefixes, or when tokens
    are recomputed after a preemption.
    """

    def __init__(self, captured: Tensor, slots: Tensor, layers: Sequence[int], size: int) -> None:
        """Allocate storage for the routes. `captured` [N, all layers, K] int32 holds the experts of
        the current step, and `slots` [≥ N] holds the cache slot of each token in the step. Both
        tensors are overwritten in each step, in stream order. `layers` lists the MoE layers, and
        `size` is the number of slots in the cache."""
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
        """Do nothing. vLLM calls this before the forward pass."""

    def prepare_output(self, batch: Any) -> None:
        """Store the routes of the step on the GPU, without copying anything to the CPU. vLLM calls
        this after sampling."""
        self.store(int(batch.query_start_loc_np[batch.num_reqs]))

    def store(self, tokens: int) -> None:
        rows = self._captured[:tokens]
        if self._layers is not None:
            rows = rows.index_select(1, self._layers)
        self._table.index_copy_(0, self._slots[:tokens], rows.to(self._table.dtype))

    def rows(self, slots: NDArray[np.int64], *, stored: bool = False) -> NDArray[np.int16]:
        """Return the routes [len(slots), L, K]. Unless all rows are already `stored`, this waits
        for the steps in flight."""
        with (
            torch.cuda.stream(self._copy_stream) if stored and self._copy_stream else nullcontext()
        ):
            index = torch.from_numpy(slots).to(self._table.device)
            return self._table[index].cpu().numpy()

    def close(self) -> None:
        """Do nothing. vLLM calls this when the engine shuts down."""


class FastExtension(WeightsExtension):
    """Methods that vLLM adds to its workers. They run on all ranks."""

    def keel_install_fast(self, routes: bool) -> None:
        """Replace the last part of the sampler, the preparation of repeated steps and, if `routes`
        is set, route capture. Raises ValueError if the KV cache does not have exactly one slot per
        token."""
        runner = self.model_runner
        if sampler.install(runner):
            sample_graphs.install(runner)
        if routes:
            self._store_routes()
        step_reuse.install(runner)

    def _store_routes(self) -> None:
        runner = self.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
            kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
            raise ValueError(
                "rollout.recorder = 'packed' keeps routes by cache slot, which needs full "
                f"attention in every layer; this model has {', '.join(kinds)}. Use native"
            )
        connector = runner.aux_output_connector
        captured = connector._capturer.device_buffer
        connector.close()
        self._keel_block_size = groups[0].kv_cache_spec.block_size
        runner.aux_output_connector = SlotRoutes(
            captured,
            runner.block_tables.slot_mappings[0],
            [moe.layer_id for moe in moe_runners(runner.get_model())],
            runner.kv_cache_config.num_blocks * self._keel_block_size,
        )

    def keel_routes(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.int16]:
        """Return the routes [tokens − first, L, K] of the request that has these cache blocks."""
        return self.model_runner.aux_output_connector.rows(self._keel_slots(blocks)[first:tokens])

    def keel_finished_routes(
        self, requests: Sequence[tuple[Sequence[int], int]]
    ) -> list[NDArray[np.int16]]:
        """Return the routes [slots from `first` on, L, K] of several requests that finished in the
        last step. Each request is given as a pair (cache blocks, first)."""
        slots = [self._keel_slots(blocks)[first:] for blocks, first in requests]
        rows = self.model_runner.aux_output_connector.rows(np.concatenate(slots), stored=True)
        return np.split(rows, np.cumsum([len(each) for each in slots])[:-1])

    def _keel_slots(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        first = np.asarray(blocks, np.int64) * self._keel_block_size
        return (first[:, None] + np.arange(self._keel_block_size)).ravel()
