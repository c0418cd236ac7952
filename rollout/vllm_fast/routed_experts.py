"""Routes on the GPU: the experts of every token whose keys and values are in the cache, by slot.

vLLM copies each step's routes to the host and files them by request and prefix block, in Python.
Here one kernel a step files them on the device, where a token's keys are, and a request's rows are
gathered once, when it is finished. A token has one slot for as long as anything attends to it, so
chunked prefills, prefixes taken over from other requests and tokens computed again after a
preemption are found by the request's blocks.
"""

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
from keel.weights.loader import WeightsExtension, moe_runners


class SlotRoutes:
    """Stands in for vLLM's `AuxOutputWorkerConnector` in Model Runner V2, whose capture it uses."""

    keel_stays = True
    """Nothing of a step goes to the host, so that several may follow on each other."""

    def __init__(self, captured: Tensor, slots: Tensor, layers: Sequence[int], size: int) -> None:
        """`captured` [N, all layers, K] int32: the current step's experts. `slots` [≥ N]: cache
        slot of each of its tokens. Both are overwritten in each step, in stream order. `layers`:
        the MoE layers. `size`: slots in the cache."""
        self._captured, self._slots = captured, slots
        every = list(range(captured.shape[1]))
        self._layers = (
            None
            if list(layers) == every
            else torch.tensor(list(layers), dtype=torch.int64, device=captured.device)
        )
        # A slot that is read and was never filed must not look like a token sent to expert 0.
        self._table = torch.full(
            (size, len(layers), captured.shape[2]),
            NO_ROUTE,
            dtype=torch.int16,
            device=captured.device,
        )
        self._beside = torch.cuda.Stream() if captured.is_cuda else None

    def begin_step(self, metadata: Any) -> None:
        """Called before the forward pass; the scheduler has nothing to say."""

    def prepare_output(self, batch: Any) -> None:
        """Called after sampling: files the step's rows. None: nothing goes to the host."""
        self.file(int(batch.query_start_loc_np[batch.num_reqs]))

    def file(self, tokens: int) -> None:
        rows = self._captured[:tokens]
        if self._layers is not None:
            rows = rows.index_select(1, self._layers)
        self._table.index_copy_(0, self._slots[:tokens], rows.to(self._table.dtype))

    def rows(self, slots: NDArray[np.int64], *, filed: bool = False) -> NDArray[np.int16]:
        """[len(slots), L, K]; waits for the steps in flight, unless all of it is `filed`."""
        with torch.cuda.stream(self._beside) if filed and self._beside else nullcontext():
            index = torch.from_numpy(slots).to(self._table.device)
            return self._table[index].cpu().numpy()

    def close(self) -> None:
        """Called when the engine shuts down."""


class RoutesExtension(WeightsExtension):
    """Methods that vLLM adds to its workers; every rank runs them."""

    def keel_file_routes(self) -> None:
        """Take over from vLLM's connector. Raises `ValueError` for a cache without one slot a
        token."""
        runner = self.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
            kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
            raise ValueError(
                "rollout.recorder = 'packed': keeps routes by cache slot, which needs full "
                f"attention in every layer; this model has {', '.join(kinds)}. Use native"
            )
        theirs = runner.aux_output_connector
        captured = theirs._capturer.device_buffer
        theirs.close()
        self._keel_block_size = groups[0].kv_cache_spec.block_size
        runner.aux_output_connector = SlotRoutes(
            captured,
            runner.block_tables.slot_mappings[0],
            [moe.layer_id for moe in moe_runners(runner.get_model())],
            runner.kv_cache_config.num_blocks * self._keel_block_size,
        )

    def keel_sampler(self) -> None:
        """Take over the end of vLLM's sampler."""
        from keel.rollout.vllm_fast import sample_graphs  # noqa: PLC0415  (Triton: not every CPU machine has it)
        from keel.rollout.vllm_fast import sampler as kept_sampler  # noqa: PLC0415

        if kept_sampler.install(self.model_runner):
            sample_graphs.install(self.model_runner)

    def keel_steps(self) -> None:
        """Reuse the preparation of a decoding step for the next one with the same rows."""
        from keel.rollout.vllm_fast import step_reuse  # noqa: PLC0415  (as above)

        step_reuse.install(self.model_runner, bursts=True)

    def keel_routes(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.int16]:
        """[tokens − first, L, K] of a request that has these cache blocks."""
        return self.model_runner.aux_output_connector.rows(self._keel_slots(blocks)[first:tokens])

    def keel_finished_routes(
        self, requests: Sequence[tuple[Sequence[int], int]]
    ) -> list[NDArray[np.int16]]:
        """[slots from the first wanted on, L, K] of each request, given with the cache blocks that
        it had until the last step."""
        slots = [self._keel_slots(blocks)[first:] for blocks, first in requests]
        rows = self.model_runner.aux_output_connector.rows(np.concatenate(slots), filed=True)
        return np.split(rows, np.cumsum([len(each) for each in slots])[:-1])

    def _keel_slots(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        first = np.asarray(blocks, np.int64) * self._keel_block_size
        return (first[:, None] + np.arange(self._keel_block_size)).ravel()
