"""Replaces the last part of vLLM's sampler on Model Runner V2.

`keel.rollout.vllm_fast.sample_kernels` draws the token and computes its log-probability and its
mask. It also applies temperature and truncation if nothing else changes the logits. Batches that
the kernels do not support use vLLM's sampler.

On one GPU, `_SampleGraphs` runs the end of a decoding step (output head, truncation, sampling) as
one CUDA graph. A step with few sequences is limited by the CPU, which spends a fifth of the time on
launching the kernels after the last layer. There is one graph for each combination of a vLLM batch
size and a largest top-k. It is captured when it is first used. Each graph exists twice, because a
step begins before the CPU has read the results of the previous one. A separate kernel first copies
the sampling parameters of all rows into fixed buffers. All graphs share their working memory, so
their results are copied out of it.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# Triton's kernels are not written in the types of Python.
from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsLists
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from keel.rollout.spec import WIDEST_MASK
from keel.rollout.vllm_fast.sample_kernels import SampledRows, Truncation, draw
from keel.rollout.vllm_fast.step_arrays import UNMASKED, StepMasks

_PROCESSORS = [LogitBiasState, PenaltiesState, BadWordsState]


class _StepLogprobs(NamedTuple):
    """A step's log-probabilities, with the methods of vLLM's `LogprobsTensors` but without ids or
    ranks."""

    logp: Tensor  # [rows, 1] float32

    def to_cpu_nonblocking(self) -> _StepLogprobs:
        return _StepLogprobs(self.logp.to("cpu", non_blocking=True))

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> LogprobsLists:
        logp = self.logp.cpu().numpy()
        unknown = np.full(logp.shape, -1, np.int64)
        return LogprobsLists(unknown, logp, unknown[:, 0], None)


class _OneTokenSampler(Sampler):
    """Samples one token per request, and computes only that token's log-probability."""

    one_and_none: Tensor  # [2, requests] int32, sampled (1) and rejected (0). Never written.
    unmasked: NDArray[np.bool_]  # [requests] True where sampling masks are not recorded
    changed: bool = True  # True if requests were added since the parameters were copied to the GPU

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        self.changed = True
        self.unmasked[req_idx] = UNMASKED in (sampling_params.extra_args or {})
        super().add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        if self.changed:
            self.changed = False
            super().apply_staged_writes()

    def masks(self, requests: NDArray[np.integer]) -> bool:
        return self.return_sampling_mask and not self.unmasked[requests].all()

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> SamplerOutput:
        requests = input_batch.idx_mapping_np
        if len(logits) != len(requests) or self.get_logprobs_dims(requests) != (0, 0):
            return super().__call__(logits, input_batch)
        rows, states = input_batch.logits_indices, input_batch.expanded_idx_mapping
        positions = input_batch.positions[rows]
        if input_batch.has_prefill:
            sampled, rejected = get_num_sampled_and_rejected(
                input_batch.seq_lens.new_ones(len(requests)),
                input_batch.seq_lens,
                input_batch.cu_num_logits,
                input_batch.idx_mapping,
                self.req_states.prefill_len.gpu,
            )
        else:
            sampled, rejected = self.one_and_none[:, : len(requests)]
        truncation = None
        if self.only_truncates(requests):
            top_k, top_p = self.sampling_states.top_k, self.sampling_states.top_p
            truncation = Truncation(top_k.gpu, top_p.gpu)
        else:
            logits = self.apply_sampling_params(
                logits,
                states,
                input_batch.idx_mapping,
                requests,
                positions,
                input_batch.input_ids[rows],
                input_batch.expanded_local_pos,
                input_batch.seq_lens_cpu_upper_bound.numpy(),
            )
        sampled_rows = draw(
            logits,
            states,
            positions,
            sampled=sampled,
            temperature=self.sampling_states.temperature.gpu,
            seeds=self.sampling_states.seeds.gpu,
            width=int(self.sampling_states.top_k.np[requests].max()),
            record=self.masks(requests),
            truncation=truncation,
        )
        return _to_sampler_output(sampled_rows, sampled, rejected)

    def only_truncates(self, requests: NDArray[np.integer]) -> bool:
        """Return True if these requests use temperature > 0 and a small top-k. Besides top-p,
        Keel's requests set no other parameter that changes the logits."""
        states = self.sampling_states
        small = (states.top_k.np[requests] <= WIDEST_MASK).all()
        return bool(small and (states.temperature.np[requests] > 0).all())


def _to_sampler_output(rows: SampledRows, sampled: Tensor, rejected: Tensor) -> SamplerOutput:
    logprobs: Any = _StepLogprobs(rows.logp)
    masks: Any = rows.masks
    return SamplerOutput(
        sampled_token_ids=rows.tokens,
        logprobs_tensors=logprobs,
        num_nans=None,
        num_sampled=sampled,
        num_rejected=rejected,
        sampling_mask_tensors=masks,
    )


def install(runner: Any) -> bool:
    """Replace a model runner's sampler. Returns False if this process doesn't have one, or if a
    plugin has added logits processors to it."""
    sampler: Any = runner.sampler
    if type(sampler) is not Sampler or [*map(type, sampler.logits_processors)] != _PROCESSORS:
        return False
    counts = torch.tensor([[1], [0]], dtype=torch.int32, device=runner.device)
    sampler.__class__ = _OneTokenSampler
    most = sampler.sampling_states.max_num_reqs
    runner.sampler.one_and_none = counts.repeat(1, most)
    runner.sampler.unmasked = np.zeros(most, bool)
    return True


_LOG = logging.getLogger(__name__)
_COPIES = 2  # maximum number of steps that can be in flight
_BLOCK = 256


class _SamplingRows(NamedTuple):
    """The sampling parameters of a step's rows, each in a fixed GPU buffer of shape [rows]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    sampled: Tensor  # 1 for a row that samples a token, 0 for padding

    @staticmethod
    def allocate(rows: int, device: torch.device) -> _SamplingRows:
        kinds = (torch.float32, torch.int32, torch.float32, torch.int64, torch.int32)
        return _SamplingRows(*(torch.zeros(rows, dtype=kind, device=device) for kind in kinds))

    def first(self, rows: int) -> _SamplingRows:
        return _SamplingRows(*(each[:rows] for each in self))


def _fill_rows(
    into: _SamplingRows,
    requests: Tensor,
    size: int,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
) -> None:
    """Copy the sampling parameters of `requests` to the first rows, padding them to `size` rows."""
    grid, rows = (triton.cdiv(size, _BLOCK),), len(requests)
    _gather[grid](requests, temperature, top_k, top_p, seeds, *into, rows, size, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["rows", "size"])
def _gather(
    requests_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seeds_ptr, to_temperature_ptr,
    to_top_k_ptr, to_top_p_ptr, to_seeds_ptr, to_sampled_ptr, rows, size, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, inside = row < rows, row < size
    request = tl.load(requests_ptr + row, mask=there, other=0)
    temperature = tl.load(temperature_ptr + request, mask=there, other=1.0)
    tl.store(to_temperature_ptr + row, temperature, mask=inside)
    tl.store(to_top_k_ptr + row, tl.load(top_k_ptr + request, mask=there, other=1), mask=inside)
    tl.store(to_top_p_ptr + row, tl.load(top_p_ptr + request, mask=there, other=1.0), mask=inside)
    tl.store(to_seeds_ptr + row, tl.load(seeds_ptr + request, mask=there, other=0), mask=inside)
    tl.store(to_sampled_ptr + row, there.to(tl.int32), mask=inside)


_Graphs = list[tuple[torch.cuda.CUDAGraph, SampledRows]]  # `_COPIES`, with results


class _SampleGraphs:
    """Replaces a model runner's `sample` and runs supported steps as CUDA graphs."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._original = runner, runner.sample
        self._graphs: dict[tuple[int, int], _Graphs] = {}  # by rows and largest top-k
        self._at = 0  # memory address of the hidden states that the graphs read
        self._copy = 0
        self._last: tuple[Tensor, _Graphs] | None = None  # rows in the fixed buffers
        self._failed = False
        self._rows = _SamplingRows.allocate(runner.max_num_reqs, runner.device)
        self._places = torch.arange(runner.max_num_reqs, device=runner.device)
        self._most = runner.max_num_reqs
        self._stream = torch.cuda.Stream()
        self._pool: tuple[int, int] = (0, 0)  # memory pool that all graphs share

    def sample(
        self, hidden_states: Tensor, input_batch: InputBatch, grammar_output: Any
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        if grammar_output is None and (graphs := self._prepare_graphs(hidden_states, input_batch)):
            self._copy = (self._copy + 1) % _COPIES
            graph, result = graphs[self._copy]
            graph.replay()
            rows = input_batch.num_reqs
            sampled, rejected = self._runner.sampler.one_and_none[:, :rows]
            masks = self._runner.sampler.masks(input_batch.idx_mapping_np)
            return (
                _to_sampler_output(_first_rows(result, rows, masks=masks), sampled, rejected),
                sampled,
                rejected,
            )
        return self._original(hidden_states, input_batch, grammar_output)

    def _prepare_graphs(self, hidden_states: Tensor, batch: InputBatch) -> _Graphs:
        """Fill the fixed buffers and return the graphs for a batch, or [] if the batch isn't
        supported."""
        last, self._last = self._last, None
        if last and last[0] is batch.idx_mapping and hidden_states.data_ptr() == self._at:
            self._last = last  # the same requests, in a reused step
            return last[1]
        if not self._covers(hidden_states, batch):
            return []
        states, size = self._runner.sampler.sampling_states, batch.num_tokens_after_padding
        width = int(states.top_k.np[batch.idx_mapping_np].max())
        _fill_rows(  # before a graph is made, too: its first pass is over these rows
            self._rows,
            batch.idx_mapping,
            self._most,
            temperature=states.temperature.gpu,
            top_k=states.top_k.gpu,
            top_p=states.top_p.gpu,
            seeds=states.seeds.gpu,
        )
        graphs = self._get_graphs(size, width)
        self._last = batch.idx_mapping, graphs
        return graphs

    def _covers(self, hidden_states: Tensor, batch: InputBatch) -> bool:
        kept: _OneTokenSampler = self._runner.sampler
        fixed = self._graph_inputs()
        return (
            fixed is not None
            and hidden_states.data_ptr() == fixed.data_ptr()
            and not batch.has_prefill
            and batch.num_draft_tokens == 0
            and batch.num_tokens == batch.num_reqs
            and batch.num_tokens_after_padding <= self._most
            and kept.get_logprobs_dims(batch.idx_mapping_np) == (0, 0)
            and kept.only_truncates(batch.idx_mapping_np)
        )

    def _graph_inputs(self) -> Any:
        return self._runner.cudagraph_manager.hidden_states

    def _get_graphs(self, size: int, width: int) -> _Graphs:
        """Return the graphs for a batch size, capturing them if necessary, or [] if capturing
        failed."""
        fixed = self._graph_inputs()
        if self._at != fixed.data_ptr():
            self._at = fixed.data_ptr()
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs is invalid
        if (known := self._graphs.get((size, width))) is not None or self._failed:
            return known or []
        most = min(self._most, len(fixed))
        try:
            # The largest first: smaller ones then fit into its working memory.
            for rows in dict.fromkeys([*([] if self._graphs else [most]), size]):
                self._graphs[rows, width] = self._capture(rows, width)
        except Exception:  # vLLM's own way gives the same result
            self._failed = True
            self._graphs.clear()
            _LOG.warning(
                "sampling could not be captured as a CUDA graph, so small steps are slower",
                exc_info=True,
            )
            return []
        return self._graphs[size, width]

    def _draw(self, size: int, width: int) -> SampledRows:
        runner, rows, fixed = self._runner, self._rows.first(size), self._graph_inputs()
        return draw(
            runner.model.compute_logits(fixed[:size]),
            self._places[:size],
            runner.input_buffers.positions[:size],
            sampled=rows.sampled,
            temperature=rows.temperature,
            seeds=rows.seeds,
            width=width,
            record=runner.sampler.return_sampling_mask,
            truncation=Truncation(rows.top_k, rows.top_p),
        )

    def _capture(self, size: int, width: int) -> _Graphs:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _disable_gc():
            trial = self._draw(size, width)  # compiles kernels outside of the graph
            made = [(torch.cuda.CUDAGraph(), _empty_like(trial)) for _ in range(_COPIES)]
            for graph, result in made:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    _copy(self._draw(size, width), result)
                finally:
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return made


@contextmanager
def _disable_gc() -> Iterator[None]:
    """Disable garbage collection inside this context, because freeing a tensor would abort a
    capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _first_rows(sampled: SampledRows, rows: int, *, masks: bool) -> SampledRows:
    all_masks = sampled.masks if masks else None
    first = all_masks and StepMasks(
        all_masks.counts[:rows], all_masks.flat, all_masks.ids[:rows], None
    )
    return SampledRows(sampled.tokens[:rows], sampled.logp[:rows], first)


def _copy(source: SampledRows, target: SampledRows) -> None:
    for to, tensor in zip(tree_leaves(target), tree_leaves(source), strict=True):
        if to is not None:  # no masks
            to.copy_(tensor)


def _empty_like(sampled: SampledRows) -> SampledRows:
    return tree_map_only(Tensor, torch.empty_like, sampled)


def install_graphs(runner: Any) -> None:
    """Make a model runner sample with CUDA graphs, provided it uses one GPU and keeps few enough
    steps in flight."""
    alone = runner.vllm_config.parallel_config.world_size == 1
    few = runner.vllm_config.max_concurrent_batches <= _COPIES
    if alone and few and runner.device.type == "cuda" and runner.cudagraph_manager is not None:
        runner.sample = _SampleGraphs(runner).sample
