"""The end of a decoding step as one CUDA graph: head, truncation, draw.

A step of few sequences takes its host longer than its GPU, and a fifth of that is starting the
kernels after the last layer. vLLM captures what comes before them alone. Here they are captured
for each size of batch that vLLM has a graph for and each largest top-k, when they first come, and
twice, since a step is begun before the host has what the one before it drew. What differs from step
to step (whose rows they are) is gathered into fixed places by one kernel before. All graphs share
the memory that they only work with; what they draw is copied out of it.
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

import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from keel.rollout.vllm_fast.sample_kernels import Cuts, Drawn, draw
from keel.rollout.vllm_fast.sampler import KeptSampler, as_vllm
from keel.rollout.vllm_fast.sampling_mask import StepSets
from keel.rollout.vllm_fast.truncate_kernels import launch

_LOG = logging.getLogger(__name__)
TURNS = 2
"""Steps that may be in flight."""
BLOCK = 256


class Rows(NamedTuple):
    """What the rows of a step sample with, each [rows] on the device: in fixed places."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    sampled: Tensor
    """1, and 0 of a row that is nobody's."""

    @staticmethod
    def of(rows: int, device: torch.device) -> Rows:
        kinds = (torch.float32, torch.int32, torch.float32, torch.int64, torch.int32)
        return Rows(*(torch.zeros(rows, dtype=kind, device=device) for kind in kinds))

    def first(self, rows: int) -> Rows:
        return Rows(*(each[:rows] for each in self))


def gather(
    into: Rows,
    requests: Tensor,
    size: int,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
) -> None:
    """Fill the first `size` rows: those of `requests` [at most size], and nobody's. The others are
    by request."""
    grid, rows = (triton.cdiv(size, BLOCK),), len(requests)
    launch(
        _gather, grid, requests, temperature, top_k, top_p, seeds, *into, rows, size, BLOCK=BLOCK
    )


@triton.jit(do_not_specialize=["rows", "size"])
def _gather(
    requests_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    to_temperature_ptr,
    to_top_k_ptr,
    to_top_p_ptr,
    to_seeds_ptr,
    to_sampled_ptr,
    rows,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, inside = row < rows, row < size
    request = tl.load(requests_ptr + row, mask=there, other=0)
    temperature = tl.load(temperature_ptr + request, mask=there, other=1.0)
    tl.store(to_temperature_ptr + row, temperature, mask=inside)
    tl.store(to_top_k_ptr + row, tl.load(top_k_ptr + request, mask=there, other=1), mask=inside)
    tl.store(to_top_p_ptr + row, tl.load(top_p_ptr + request, mask=there, other=1.0), mask=inside)
    tl.store(to_seeds_ptr + row, tl.load(seeds_ptr + request, mask=there, other=0), mask=inside)
    tl.store(to_sampled_ptr + row, there.to(tl.int32), mask=inside)


class SampleGraphs:
    """Stands before a model runner's `sample`, whose steps it takes where it can."""

    def __init__(self, runner: Any) -> None:
        """`runner`: of one GPU, with a `KeptSampler`."""
        self._runner, self._theirs = runner, runner.sample
        self._graphs: dict[tuple[int, int], list[tuple[torch.cuda.CUDAGraph, Drawn]]] = {}
        """By rows of the batch, nobody's included, and the largest top-k."""
        self._at = 0
        """Where vLLM's graphs left the hidden states that ours begin with."""
        self._turn = 0
        self._last: tuple[Tensor, list[tuple[torch.cuda.CUDAGraph, Drawn]]] | None = None
        """Whose rows the fixed places have, and their graphs."""
        self._failed = False
        self._rows = Rows.of(runner.max_num_reqs, runner.device)
        self._places = torch.arange(runner.max_num_reqs, device=runner.device)
        self._most = runner.max_num_reqs
        self._beside = torch.cuda.Stream()
        self._pool: tuple[int, int] = (0, 0)
        """Of the memory that graphs work with."""

    def sample(
        self, hidden_states: Tensor, input_batch: InputBatch, grammar_output: Any
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        """As vLLM's: what was drawn, and how many tokens of each row were sampled and rejected."""
        if grammar_output is None and (graphs := self._for(hidden_states, input_batch)):
            self._turn = (self._turn + 1) % TURNS
            graph, drawn = graphs[self._turn]
            graph.replay()
            rows = input_batch.num_reqs
            sampled, rejected = self._runner.sampler.one_and_none[:, :rows]
            masks = self._runner.sampler.masks(input_batch.idx_mapping_np)
            return as_vllm(first(drawn, rows, masks=masks), sampled, rejected), sampled, rejected
        return self._theirs(hidden_states, input_batch, grammar_output)

    def _for(
        self, hidden_states: Tensor, batch: InputBatch
    ) -> list[tuple[torch.cuda.CUDAGraph, Drawn]]:
        """The graphs of a batch, whose rows are in their places then; none if it has none."""
        last, self._last = self._last, None
        if last and last[0] is batch.idx_mapping and hidden_states.data_ptr() == self._at:
            self._last = last  # the same requests, as `steady_steps` has them
            return last[1]
        if not self._covers(hidden_states, batch):
            return []
        states, size = self._runner.sampler.sampling_states, batch.num_tokens_after_padding
        width = int(states.top_k.np[batch.idx_mapping_np].max())
        gather(  # before a graph is made, too: its first pass is over these rows
            self._rows,
            batch.idx_mapping,
            self._most,
            temperature=states.temperature.gpu,
            top_k=states.top_k.gpu,
            top_p=states.top_p.gpu,
            seeds=states.seeds.gpu,
        )
        graphs = self._of(size, width)
        self._last = batch.idx_mapping, graphs
        return graphs

    def _covers(self, hidden_states: Tensor, batch: InputBatch) -> bool:
        """Whether a step is one that decodes, from the fixed place of vLLM's graphs, and draws as
        `KeptSampler` does by itself."""
        kept: KeptSampler = self._runner.sampler
        fixed = self._fixed()
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

    def _fixed(self) -> Tensor | None:
        """Where vLLM's graphs leave the last hidden states."""
        manager = self._runner.cudagraph_manager
        return None if manager is None else manager.hidden_states

    def _of(self, size: int, width: int) -> list[tuple[torch.cuda.CUDAGraph, Drawn]]:
        """The graphs of a batch; none where they could not be captured."""
        fixed = self._fixed()
        assert fixed is not None
        if self._at != fixed.data_ptr():
            self._at = fixed.data_ptr()
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # one without graphs is none any more
        if (known := self._graphs.get((size, width))) is not None or self._failed:
            return known or []
        most = min(self._most, len(fixed))
        try:
            # The largest first, since smaller ones have room in what it works with.
            for rows in dict.fromkeys([*([] if self._graphs else [most]), size]):
                self._graphs[rows, width] = self._capture(rows, width)
        except Exception:  # whatever it is, vLLM's way is the same but for the time
            self._failed = True
            self._graphs.clear()
            _LOG.warning(
                "sampling could not be captured as a CUDA graph; steps of few sequences are slower",
                exc_info=True,
            )
            return []
        return self._graphs[size, width]

    def _draw(self, size: int, width: int) -> Drawn:
        """What a graph holds: of the first rows, from fixed places."""
        runner, rows, fixed = self._runner, self._rows.first(size), self._fixed()
        assert fixed is not None
        return draw(
            runner.model.compute_logits(fixed[:size]),
            self._places[:size],
            runner.input_buffers.positions[:size],
            sampled=rows.sampled,
            temperature=rows.temperature,
            seeds=rows.seeds,
            width=width,
            record=runner.sampler.return_sampling_mask,
            cuts=Cuts(rows.top_k, rows.top_p),
        )

    def _capture(self, size: int, width: int) -> list[tuple[torch.cuda.CUDAGraph, Drawn]]:
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside), no_collection():
            tried = self._draw(size, width)  # what has to be compiled is, outside of the graph
            made = [(torch.cuda.CUDAGraph(), like(tried)) for _ in range(TURNS)]
            for graph, drawn in made:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    copy(self._draw(size, width), drawn)
                finally:
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._beside)
        return made


@contextmanager
def no_collection() -> Iterator[None]:
    """A tensor whose memory went back to the GPU would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def first(drawn: Drawn, rows: int, *, masks: bool) -> Drawn:
    """Of the first rows alone, without `masks` if nobody asks for them."""
    sets = drawn.sets if masks else None
    kept = sets and StepSets(sets.counts[:rows], sets.flat, sets.ids[:rows], None)
    return Drawn(drawn.tokens[:rows], drawn.logp[:rows], kept)


def tensors(drawn: Drawn) -> list[Tensor]:
    masks = drawn.sets and [drawn.sets.counts, drawn.sets.flat, drawn.sets.ids]
    return [drawn.tokens, drawn.logp, *(masks or [])]


def copy(drawn: Drawn, into: Drawn) -> None:
    for mine, theirs in zip(tensors(into), tensors(drawn), strict=True):
        mine.copy_(theirs)


def like(drawn: Drawn) -> Drawn:
    """Room for the same."""
    tokens, logp, *masks = (torch.empty_like(each) for each in tensors(drawn))
    return Drawn(tokens, logp, StepSets(*masks, None) if masks else None)


def install(runner: Any) -> None:
    """Have a model runner with a `KeptSampler` go this way, if it is of one GPU and no more steps
    are in flight than there are turns."""
    alone = runner.vllm_config.parallel_config.world_size == 1
    few = runner.vllm_config.max_concurrent_batches <= TURNS
    if alone and few and runner.device.type == "cuda" and runner.cudagraph_manager is not None:
        runner.sample = SampleGraphs(runner).sample
