"""Steps with the rows of the step before them.

vLLM prepares every step anew: who is in it, where each request's state is, what attention has to
know. For a batch of few sequences that takes longer than the GPU needs for the step. In a
`DecodeRun` nothing of it changes from one step to the next but how many tokens a row has, which the
GPU counts by itself. So where vLLM has run a step as a CUDA graph and the next one has the same
rows, one kernel moves them on by a token, and the graph is replayed; several times in a row, where
the scheduler has room for several steps (`keel.rollout.vllm_fast.bursts`).
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

import copy
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
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from keel.rollout.vllm_fast.bursts import (
    BurstOutput,
    Drawn,
    begin,
    merged,
    steps_in,
    steps_offered,
)
from keel.rollout.vllm_fast.sampler import KeptSampler
from keel.rollout.vllm_fast.truncate_kernels import launch

BLOCK = 256


class Known(NamedTuple):
    """The last step, if its rows all sampled one token by a CUDA graph."""

    counts: dict[str, int]
    ids: list[str]
    """The run's, which the next step is asked for with, if it is of the same rows."""
    requests: NDArray[np.int64]
    """[rows]: where vLLM has the state of each."""
    graph: Any
    """vLLM's description of it."""
    state: Any
    """What vLLM hands from a step's model to its sampling."""
    planned: bool
    """Attention is planned inside of the graph, and nothing is to be made for it."""

    def has_rows_of(self, output: SchedulerOutput) -> bool:
        """And nothing else is to be done in this step."""
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


class SteadySteps:
    """Stands before a model runner's `execute_model`, whose steps it takes where it can."""

    def __init__(self, runner: Any, *, bursts: bool = False) -> None:
        """`bursts`: take several steps at once, where they are offered and nothing else has to be
        done between them."""
        self._runner, self._theirs = runner, runner.execute_model
        self._sample_theirs = runner.sample_tokens if bursts else None
        self._known: Known | None = None
        self._drawn: Drawn | None = None
        """In this burst, but for its last step."""
        self.taken = 0
        """Steps."""

    def execute_model(self, scheduler_output: SchedulerOutput, *rest: Any, **named: Any) -> Any:
        """As vLLM's."""
        known, self._known = self._known, None
        alone = not named and all(each is None for each in rest)
        if alone and known is not None and known.has_rows_of(scheduler_output):
            with torch.inference_mode():
                self._known = self._again(known, scheduler_output)
            self.taken += steps_in(scheduler_output)
            return None
        made = self._theirs(scheduler_output, *rest, **named)
        if alone and made is None:
            self._known = self._look(scheduler_output)
        return made

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's; of all steps of a burst."""
        assert self._sample_theirs is not None
        runner, drawn, self._drawn = self._runner, self._drawn, None
        if drawn is None:
            return self._sample_theirs(grammar_output)
        before = drawn.to_host(runner.output_copy_stream, runner.main_stream)
        last = self._sample_theirs(grammar_output)
        if isinstance(last, AsyncModelRunnerOutput):
            return BurstOutput(before, last)
        return merged(before, last)

    def _look(self, output: SchedulerOutput) -> Known | None:
        """At the step that vLLM has just run."""
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
        graph = self._graph(batch.num_reqs)
        if (
            graph.cg_mode != CUDAGraphMode.FULL
            or graph.num_tokens != batch.num_tokens_after_padding
        ):
            return None
        of = state.attn_metadata
        return Known(
            counts=output.num_scheduled_tokens,
            ids=ids,
            requests=batch.idx_mapping_np,
            graph=graph,
            state=state,
            planned=all(getattr(each, "step", None) is not None for each in of.values()),
        )

    def _graph(self, rows: int) -> Any:
        """As vLLM has chosen it."""
        return self._runner.cudagraph_manager.dispatch(rows, rows, 1, 0, max_query_len=1)

    def _again(self, known: Known, output: SchedulerOutput) -> Known:
        runner, cached = self._runner, output.scheduled_cached_reqs
        batch, tables = known.state.input_batch, runner.block_tables
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
        known = known._replace(state=known.state._replace(finished_req_ids=output.finished_req_ids))
        computed = np.array(cached.num_computed_tokens, np.int32)
        steps = self._steps_of(output, known)
        if steps > 1:
            begin(output, steps)
            drawn = Drawn(steps - 1)
            for index in range(steps - 1):
                known = self._step(known, computed)
                drawn.add(self._draw(known.state))
                computed = computed + 1
                if index == 0 and runner.output_copy_stream:
                    # The next one draws to where the last step before this burst did.
                    runner.main_stream.wait_stream(runner.output_copy_stream)
            self._drawn = drawn
        known = self._step(known, computed)
        runner.execute_model_state = known.state
        return known

    def _steps_of(self, output: SchedulerOutput, known: Known) -> int:
        """As many as are offered, if what each of them draws is all that comes of it, and nothing
        has to be made for it on the host."""
        runner, requests = self._runner, known.requests
        nothing = runner.aux_output_connector is None
        if (
            (offered := steps_offered(output)) == 1
            or self._sample_theirs is None
            or not self._on_gpu(known)
            or not getattr(runner.aux_output_connector, "keel_stays", nothing)
            or not isinstance(runner.sampler, KeptSampler)
            or runner.sampler.get_logprobs_dims(requests) != (0, 0)
            or not runner.sampler.only_truncates(requests)
        ):
            return 1
        return offered

    def _on_gpu(self, known: Known) -> bool:
        """Whether attention is planned there: some kernels' plans are written to one place of the
        host's, from where the GPU fetches them later."""
        return known.planned

    def _draw(self, state: Any) -> SamplerOutput:
        """What vLLM does with a step's hidden states, but for handing it to the host."""
        runner, batch = self._runner, state.input_batch
        made, sampled, rejected = runner.sample(state.hidden_states, batch, None)
        runner.postprocess_sampled(
            batch.idx_mapping, made.sampled_token_ids, sampled, rejected, batch.query_start_loc
        )
        if runner.aux_output_connector is not None:
            runner.aux_output_connector.prepare_output(batch)
        return made

    def _step(self, known: Known, computed: NDArray[np.int32]) -> Known:
        """The model on the next token of every row, of which so many tokens are computed."""
        runner, batch = self._runner, copy.copy(known.state.input_batch)
        tables, buffers, states = runner.block_tables, runner.input_buffers, runner.req_states
        if runner.sampler is not None:
            runner.sampler.apply_staged_writes()  # of processors that have some in every step
        advance(
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
        # What vLLM knows on the host is kept up.
        states.num_computed_tokens_np[known.requests] = computed
        batch.num_computed_tokens_np = computed
        bound = torch.zeros_like(batch.seq_lens_cpu_upper_bound)
        bound[: batch.num_reqs] = torch.from_numpy(computed + 1)
        batch.seq_lens_cpu_upper_bound = bound
        state = known.state
        if not known.planned:
            rows, tokens = batch.num_reqs_after_padding, batch.num_tokens_after_padding
            made = runner.model_state.prepare_attn(
                batch,
                known.graph.cg_mode,
                tuple(table[:rows] for table in tables.input_block_tables),
                tables.slot_mappings[:, :tokens],
                runner.attn_groups,
                runner.kv_cache_config,
            )
            state = state._replace(attn_metadata=made)
        hidden_states = self._run(known.graph, state)
        state = state._replace(input_batch=batch, hidden_states=hidden_states)
        return known._replace(state=state)

    def _run(self, graph: Any, state: Any) -> Tensor:
        """The model, on what is in its buffers; the last hidden states. `state` is for a stand-in
        that has no graph, and has to call the model."""
        return self._runner.cudagraph_manager.run_fullgraph(graph)


def advance(
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
    """Fill the first rows of `positions`, `lengths`, `ids` and `slots`: each has one token to
    compute, the last that it sampled. `requests` [rows] int64 says which request a row is of;
    `computed` [requests] tokens it has keys and values of, `sampled` [requests, 1], and its KV
    blocks, of `page` tokens, in `table` [requests, blocks]. On the device `meta`, the kernel is
    only compiled."""
    rows = len(requests)
    launch(
        _advance,
        (triton.cdiv(rows, BLOCK),),
        requests,
        computed,
        sampled,
        table,
        table.stride(0),
        positions,
        lengths,
        ids,
        slots,
        rows,
        PAGE=page,
        BLOCK=BLOCK,
    )


@triton.jit(do_not_specialize=["rows", "table_row"])
def _advance(
    requests_ptr,
    computed_ptr,
    sampled_ptr,
    table_ptr,
    table_row,
    positions_ptr,
    lengths_ptr,
    ids_ptr,
    slots_ptr,
    rows,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


def covers(runner: Any) -> bool:
    """Whether a step of this model runner is what `SteadySteps` makes of it: a model of text and
    full attention on one GPU, and nothing beside it."""
    parallel, groups = runner.vllm_config.parallel_config, runner.kv_cache_config.kv_cache_groups
    return (
        parallel.world_size == 1
        and parallel.data_parallel_size == 1
        and not parallel.enable_eplb
        and runner.cudagraph_manager is not None
        and type(runner.model_state) is DefaultModelState
        and runner.model_state.rope_state is None
        and runner.model_state.prompt_embeds_state is None
        and len(groups) == 1
        and type(groups[0].kv_cache_spec) is FullAttentionSpec
        and runner.kv_connector is NO_OP_KV_CONNECTOR
        and runner.dcp_size == 1
        and runner.pcp_manager is None
        and runner.ubatch_runner is None
        and runner.fast_prefill is None
        and runner.pooling_runner is None
        and runner.encoder_cache is None
        and not runner.lora_config
        and not runner.num_speculative_steps
        and not runner.uses_inputs_embeds
        and not runner.is_encoder_decoder
        and not runner.observability_config.cudagraph_metrics
        and runner.model_config.rswa_window is None
    )


def install(runner: Any, *, bursts: bool) -> None:
    """Have a model runner go this way, if it is one that this covers."""
    if covers(runner):
        steps = SteadySteps(runner, bursts=bursts)
        runner.execute_model = steps.execute_model
        if bursts:
            runner.sample_tokens = steps.sample_tokens
