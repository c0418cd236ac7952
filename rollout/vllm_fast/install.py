"""Installs everything that makes vLLM faster for an engine with the packed recorder.

`AsyncFastScheduler` and `FastExtension` are passed to the engine as arguments
(`keel.rollout.recording.packed`). After the engine is built, `FastExtension.keel_install_fast`
replaces parts of each worker's model runner.

`_StepReuse` runs decoding steps with the inputs that were prepared for the previous step. vLLM
prepares every step from scratch: its rows, the state of each request and the attention metadata.
For a batch with few sequences, this takes longer than the computation on the GPU. In a
`_DecodeBatch`, only the lengths change from one step to the next, and the GPU can update them.
Inputs can be reused if vLLM has run a step as a CUDA graph and the next step has the same rows. One
kernel then advances the rows by one token, and the graph is replayed.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# Triton's kernels are not written in the types of Python.
import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from keel.rl.recordings import NO_ROUTE
from keel.rollout.vllm_fast import sampler
from keel.weights.loader import WeightsExtension, moe_runners


class _SlotRoutes:
    """Stores routes on the GPU, indexed by KV cache slot.

    Replaces vLLM's `AuxOutputWorkerConnector`, which copies each step's routes to the CPU and sorts
    them in Python. One kernel per step stores each token's routes under the slot that also holds
    the token's keys. A token keeps its slot as long as another token attends to it, so routes can
    be looked up through a request's blocks, even after chunked prefills, with shared prefixes, or
    after a preemption.
    """

    def __init__(self, captured: Tensor, slots: Tensor, layers: Sequence[int], size: int) -> None:
        """Allocate the table. `layers` lists the MoE layers, and `size` is the number of slots in
        the cache.

        `captured` [N, all layers, K] int32 contains the experts of the current step, and `slots` [≥
        N] contains the cache slot of each of its tokens. Each step overwrites both, in CUDA stream
        order.
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
        """No-op. vLLM calls this before the forward pass."""

    def prepare_output(self, batch: Any) -> None:
        """Store the step's routes. vLLM calls this after sampling."""
        self.store(int(batch.query_start_loc_np[batch.num_reqs]))

    def store(self, tokens: int) -> None:
        rows = self._captured[:tokens]
        if self._layers is not None:
            rows = rows.index_select(1, self._layers)
        self._table.index_copy_(0, self._slots[:tokens], rows.to(self._table.dtype))

    def rows(self, slots: NDArray[np.int64], *, stored: bool = False) -> NDArray[np.int16]:
        """Return the routes [len(slots), L, K]. Waits for the steps in flight, unless `stored` says
        that the table already has all routes."""
        with (
            torch.cuda.stream(self._copy_stream) if stored and self._copy_stream else nullcontext()
        ):
            index = torch.from_numpy(slots).to(self._table.device)
            return self._table[index].cpu().numpy()

    def close(self) -> None:
        """No-op. vLLM calls this when the engine shuts down."""


class FastExtension(WeightsExtension):
    """Methods that vLLM adds to its workers. They run on all ranks."""

    def keel_install_fast(self, routes: bool) -> None:
        """Install faster code for the sampler's final stage, for preparing repeated steps and, if
        `routes` is set, for capturing routes."""
        runner = self.model_runner
        if sampler.install(runner):
            sampler.install_graphs(runner)
        if routes:
            self._store_routes()
        if _can_reuse_steps(runner):
            runner.execute_model = _StepReuse(runner).execute_model

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
        runner.aux_output_connector = _SlotRoutes(
            captured,
            runner.block_tables.slot_mappings[0],
            [moe.layer_id for moe in moe_runners(runner.get_model())],
            runner.kv_cache_config.num_blocks * self._keel_block_size,
        )

    def keel_routes(self, blocks: Sequence[int], first: int, tokens: int) -> NDArray[np.int16]:
        """Return the expert routes of the request that owns these cache blocks, starting at
        position `first`: [tokens − first, L, K]."""
        return self.model_runner.aux_output_connector.rows(self._keel_slots(blocks)[first:tokens])

    def keel_finished_routes(
        self, requests: Sequence[tuple[Sequence[int], int]]
    ) -> list[NDArray[np.int16]]:
        """Return the routes of requests that finished in the last step. Each request is given as a
        pair (cache blocks, first). Its routes [slots, L, K] start at slot `first`."""
        slots = [self._keel_slots(blocks)[first:] for blocks, first in requests]
        rows = self.model_runner.aux_output_connector.rows(np.concatenate(slots), stored=True)
        return np.split(rows, np.cumsum([len(each) for each in slots])[:-1])

    def _keel_slots(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        first = np.asarray(blocks, np.int64) * self._keel_block_size
        return (first[:, None] + np.arange(self._keel_block_size)).ravel()


_BLOCK = 256


class _KnownStep(NamedTuple):
    """A step that ran as a CUDA graph and sampled one token in each row."""

    counts: dict[str, int]
    ids: list[str]  # of the batch. A later step with the same list object has the same rows.
    requests: NDArray[np.int64]  # [rows] index of each row's request in vLLM's state
    graph: Any  # vLLM's descriptor of the CUDA graph that ran the step
    state: Any  # state that vLLM passes from the model's forward pass to sampling

    def repeats_in(self, output: SchedulerOutput) -> bool:
        return (
            output.num_scheduled_tokens is self.counts
            and output.scheduled_cached_reqs.req_ids is self.ids
            and not output.scheduled_new_reqs
            and not output.finished_req_ids
            and not output.preempted_req_ids
            and not output.free_encoder_mm_hashes
            and not output.new_block_ids_to_zero
            and not output.kv_cache_block_copies
            and not output.has_structured_output_requests
        )


class _StepReuse:
    def __init__(self, runner: Any) -> None:
        self._runner, self._original = runner, runner.execute_model
        self._known: _KnownStep | None = None
        self.reused = 0

    def execute_model(self, scheduler_output: SchedulerOutput, *rest: Any, **named: Any) -> Any:
        known, self._known = self._known, None
        plain = not named and all(each is None for each in rest)
        if plain and known is not None and known.repeats_in(scheduler_output):
            with torch.inference_mode():
                self._known = self._run_next_token(known, scheduler_output)
            self.reused += 1
            return None
        output = self._original(scheduler_output, *rest, **named)
        if plain and output is None:
            self._known = self._inspect(scheduler_output)
        return output

    def _inspect(self, output: SchedulerOutput) -> _KnownStep | None:
        runner = self._runner
        state, ids = runner.execute_model_state, output.scheduled_cached_reqs.req_ids
        if state is None:
            return None
        batch = state.input_batch
        if (
            batch.has_prefill
            or batch.num_draft_tokens
            or batch.num_tokens != batch.num_reqs
            or batch.req_ids != ids
        ):
            return None
        rows = batch.num_reqs
        graph = runner.cudagraph_manager.dispatch(rows, rows, 1, 0, max_query_len=1)
        if (
            graph.cg_mode != CUDAGraphMode.FULL
            or graph.num_tokens != batch.num_tokens_after_padding
        ):
            return None
        return _KnownStep(
            counts=output.num_scheduled_tokens,
            ids=ids,
            requests=batch.idx_mapping_np,
            graph=graph,
            state=state,
        )

    def _run_next_token(self, known: _KnownStep, output: SchedulerOutput) -> _KnownStep:
        runner, cached = self._runner, output.scheduled_cached_reqs
        batch = copy.copy(known.state.input_batch)
        tables, buffers, states = runner.block_tables, runner.input_buffers, runner.req_states
        grown = False
        for request, blocks in zip(known.requests.tolist(), cached.new_block_ids, strict=True):
            if blocks is not None:
                tables.append_block_ids(request, blocks, overwrite=False)
                grown = True
        if grown:
            tables.apply_staged_writes()
            tables.gather_block_tables(
                batch.idx_mapping, num_reqs_padded=batch.num_reqs_after_padding
            )
        if runner.aux_output_connector is not None:
            runner.aux_output_connector.begin_step(output.aux_output_connector_metadata)
        if runner.sampler is not None:
            runner.sampler.apply_staged_writes()  # of processors that have some in every step
        _advance_inputs(
            batch.idx_mapping,
            computed=states.num_computed_tokens.gpu,
            sampled=states.last_sampled_tokens,
            table=tables.block_tables[0].gpu,
            page=tables.block_sizes[0],
            positions=buffers.positions,
            lengths=buffers.seq_lens,
            ids=buffers.input_ids,
            slots=tables.slot_mappings[0],
        )
        # Keep vLLM's host-side copies up to date.
        computed = np.array(cached.num_computed_tokens, np.int32)
        states.num_computed_tokens_np[known.requests] = computed
        batch.num_computed_tokens_np = computed
        bound = torch.zeros_like(batch.seq_lens_cpu_upper_bound)
        bound[: batch.num_reqs] = torch.from_numpy(computed + 1)
        batch.seq_lens_cpu_upper_bound = bound
        rows, tokens = batch.num_reqs_after_padding, batch.num_tokens_after_padding
        metadata = runner.model_state.prepare_attn(
            batch,
            known.graph.cg_mode,
            tuple(table[:rows] for table in tables.input_block_tables),
            tables.slot_mappings[:, :tokens],
            runner.attn_groups,
            runner.kv_cache_config,
        )
        finished = output.finished_req_ids
        state = known.state._replace(finished_req_ids=finished, attn_metadata=metadata)
        hidden_states = self._run(known.graph, state)
        state = state._replace(input_batch=batch, hidden_states=hidden_states)
        runner.execute_model_state = state
        return known._replace(state=state)

    def _run(self, graph: Any, state: Any) -> Tensor:
        """Replay the CUDA graph of a step. `state` is used only in tests, which override this
        method to run without graphs."""
        return self._runner.cudagraph_manager.run_fullgraph(graph)


def _advance_inputs(
    requests: Tensor,
    *,
    computed: Tensor,
    sampled: Tensor,
    table: Tensor,
    page: int,
    positions: Tensor,
    lengths: Tensor,
    ids: Tensor,
    slots: Tensor,
) -> None:
    """Prepare the inputs of the next decoding step on the GPU by filling the first rows of
    `positions`, `lengths`, `ids` and `slots`. Each row's input is the last token it sampled.

    `requests` [rows] int64 is the request of each row. The other arrays are indexed by request:
    `computed` [requests] is the number of tokens that already have keys and values, `sampled`
    [requests, 1] is the last token, and `table` [requests, blocks] lists the KV blocks, which hold
    `page` tokens each. On the `meta` device, the kernel is only compiled.
    """
    rows = len(requests)
    _advance_kernel[(triton.cdiv(rows, _BLOCK),)](requests, computed, sampled, table,
        table.stride(0), positions, lengths, ids, slots, rows, PAGE=page, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "table_row"])
def _advance_kernel(
    requests_ptr, computed_ptr, sampled_ptr, table_ptr, table_row, positions_ptr, lengths_ptr,
    ids_ptr, slots_ptr, rows, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    request = tl.load(requests_ptr + row, mask=there, other=0)
    position = tl.load(computed_ptr + request, mask=there, other=0)
    token = tl.load(sampled_ptr + request, mask=there, other=0)
    block = tl.load(table_ptr + request * table_row + position // PAGE, mask=there, other=0)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=there)
    tl.store(lengths_ptr + row, position + 1, mask=there)
    tl.store(ids_ptr + row, token.to(tl.int32), mask=there)
    tl.store(slots_ptr + row, block.to(tl.int64) * PAGE + position % PAGE, mask=there)


def _can_reuse_steps(runner: Any) -> bool:
    """Return True if steps can be reused. This requires a text model with full attention, one GPU
    and CUDA graphs."""
    groups = runner.kv_cache_config.kv_cache_groups
    return (
        runner.vllm_config.parallel_config.world_size == 1
        and runner.cudagraph_manager is not None
        and type(runner.model_state) is DefaultModelState
        and runner.model_state.rope_state is None
        and runner.model_state.prompt_embeds_state is None
        and len(groups) == 1
        and type(groups[0].kv_cache_spec) is FullAttentionSpec
        and runner.fast_prefill is None
        and runner.encoder_cache is None
        and not runner.uses_inputs_embeds
        and runner.model_config.rswa_window is None
    )
