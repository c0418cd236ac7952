"""Records on the V1 model runner (CPUs), which returns neither routes nor sampling masks.

The recorder uses three hooks and no patches: the capture function of each router, a forward hook on
the model, and a forward hook on the last stage of the sampler.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm import LLMEngine
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.outputs import CompletionOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec

from keel.rl.recordings import NO_ROUTE, SamplingMasks
from keel.rollout.recording.base import (
    Recorder,
    RecordingOptions,
    core_of,
)
from keel.rollout.spec import RecordingError
from keel.weights.loader import moe_runners


class _RouteTable:
    """Stores the experts of every token in the KV cache, indexed by cache slot.

    A token keeps its slot as long as another token attends to it. Routes can therefore be looked up
    through a request's blocks, even after chunked prefills, with shared prefixes, or when tokens
    are recomputed after a preemption.
    """

    def __init__(self, runner: Any) -> None:
        groups = runner.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec) for group in groups]
        full = [issubclass(kind, FullAttentionSpec) for kind in kinds]
        if True not in full:
            raise ValueError(
                "rollout.recorder = 'v1' keeps routes by cache slot, which needs layers with full "
                f"attention; this model has {', '.join(sorted({kind.__name__ for kind in kinds}))}"
            )
        self.group = full.index(True)
        """Index of the KV cache group whose slots are used. A hybrid model has several groups."""
        self._layer = groups[self.group].layer_names[0]
        layers = moe_runners(runner.model)
        experts = {moe.moe_config.num_experts for moe in layers}
        widths = {moe.moe_config.experts_per_token for moe in layers}
        if len(widths) != 1 or max(experts) > np.iinfo(np.int16).max:
            raise ValueError(
                "routes need the same number of experts per token in every MoE layer and expert "
                f"ids that fit int16; this model has {sorted(widths)} of {sorted(experts)}"
            )
        self._batch = runner.input_batch
        block = self._block = groups[self.group].kv_cache_spec.block_size
        shape = (len(layers), widths.pop())
        self._slots = torch.full(
            (runner.kv_cache_config.num_blocks * block, *shape), NO_ROUTE, dtype=torch.int16
        )
        tokens = runner.scheduler_config.max_num_batched_tokens
        self._step = torch.empty((tokens, *shape), dtype=torch.int16)
        for index, moe in enumerate(layers):
            if not isinstance(moe.router, BaseRouter):
                raise ValueError(f"routes of {type(moe.router).__name__} cannot be recorded")
            moe.router.set_capture_fn(partial(self._capture, index))
        runner.model.register_forward_hook(self._store)

    def _capture(self, layer: int, topk_ids: Tensor) -> None:
        self._step[: len(topk_ids), layer] = topk_ids

    def _store(self, model: nn.Module, args: Any, output: Any) -> None:
        mapping = get_forward_context().slot_mapping
        if isinstance(mapping, dict) and mapping:
            slots = mapping[self._layer]
            self._slots[slots] = self._step[: len(slots)]

    def blocks(self, request_id: str) -> list[int]:
        row = self._batch.req_id_to_index.get(request_id)
        if row is None:
            raise RecordingError(
                f"request {request_id}: left the batch before its routes were read"
            )
        return self._batch.block_table[self.group].get_numpy_array()[row].tolist()

    def rows(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.int16]:
        """Return the expert routes of the request that owns these cache blocks, starting at
        position `first`: [tokens − first, L, K]."""
        positions = np.arange(first, tokens)
        begins = np.asarray(blocks, np.int64)[positions // self._block] * self._block
        return self._slots[torch.from_numpy(begins + positions % self._block)].numpy()


class _SampledTokens(NamedTuple):
    """The tokens sampled in one step, one per row of the batch."""

    tokens: list[int]
    logp: list[float]
    masks: list[NDArray[np.int32]] | None


class V1Recorder(Recorder):
    """A recorder for vLLM's V1 model runner, which must run in this process."""

    _table: _RouteTable | None = None

    def attach(self, engine: LLMEngine) -> None:
        runner = self._runner = engine.model_executor.driver_worker.model_runner
        self._live: dict[str, list[tuple[_SampledTokens, int]]] = {}
        """Maps each unfinished request to the sampled tokens of its steps, with the request's row
        in each step."""
        runner.sampler.topk_topp_sampler.register_forward_hook(self._on_draw)
        if self._records_routes:
            self._table = _RouteTable(runner)
            table = self._table
            self._save_before_preemption(core_of(engine).scheduler, table.rows, table.group)

    def expect(self, request_id: str, options: RecordingOptions) -> None:
        super().expect(request_id, options)
        self._live[request_id] = []

    def _on_draw(self, sampler: nn.Module, args: Any, output: Any) -> None:
        (sampled, logprobs), batch = output, self._runner.input_batch
        names = batch.req_ids
        # The other rows are chunks of unfinished prompts, whose tokens are discarded.
        rows = np.flatnonzero(~self._runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        live = [(row, self._live.get(names[row])) for row in rows]
        if not any(draws is not None for _, draws in live):
            return
        tokens = sampled.long()
        logp = logprobs.gather(1, tokens[:, None])[:, 0]
        step = _SampledTokens(tokens.tolist(), logp.tolist(), self._kept_ids(logprobs, names))
        for row, draws in live:
            if draws is not None:
                draws.append((step, row))

    def _kept_ids(self, logprobs: Tensor, names: list[str]) -> list[NDArray[np.int32]] | None:
        """Return the ids with a finite log-probability in each row, for requests with truncated
        sampling. Returns None if there are no such requests."""
        options = [self._options.get(name) for name in names[: len(logprobs)]]
        truncated = torch.tensor([each is not None and each.sampling_mask for each in options])
        if not truncated.any():
            return None
        rows, ids = (logprobs.isfinite() & truncated[:, None]).nonzero(as_tuple=True)
        ends = rows.bincount(minlength=len(logprobs)).cumsum(0)[:-1]
        return np.split(ids.to(torch.int32).numpy(), ends.numpy())

    def _logprobs(self, request_id: str, output: CompletionOutput) -> NDArray[np.float32]:
        draws = self._live[request_id]
        if [step.tokens[row] for step, row in draws] != list(output.token_ids):
            raise RecordingError(
                f"request {request_id}: the recorded tokens are not the completion's"
            )
        return np.array([step.logp[row] for step, row in draws], np.float32)

    def _sampling_masks(self, request_id: str, output: CompletionOutput) -> SamplingMasks:
        draws = self._live[request_id]
        return SamplingMasks.from_lists([step.masks[row] for step, row in draws if step.masks])

    def _routes(
        self, request_id: str, output: CompletionOutput, first: int, last: int
    ) -> NDArray[np.int16]:
        table = self._table
        assert table is not None
        blocks = table.blocks(request_id)

        def read_after(count: int) -> NDArray[np.int16]:
            return table.rows(blocks, first + count, last)

        return self._rows(request_id, last - first, read_after)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._live.pop(request_id, None)
