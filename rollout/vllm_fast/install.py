"""Installs everything that makes vLLM faster for an engine with the packed recorder.

`prepare` runs before the engine is built. `AsyncFastScheduler` and `FastExtension` are passed to
the engine as arguments (`keel.rollout.recording.packed`). Afterwards,
`FastExtension.keel_install_fast` replaces parts of each worker's model runner.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from keel.rollout.spec import EngineSpec
from keel.rollout.vllm_fast import sample_graphs, sampler, step_reuse
from keel.rollout.vllm_fast.cascade.kernels import PAGE, Heads, Scratch, attend, heads_of, plan
from keel.rollout.vllm_fast.routed_experts import SlotRoutes
from keel.rollout.vllm_fast.sample_graphs import SamplingRows, gather
from keel.rollout.vllm_fast.sample_kernels import Truncation, draw
from keel.rollout.vllm_fast.step_reuse import advance
from keel.rollout.vllm_fast.truncate_kernels import WIDEST_TOP_K
from keel.weights.loader import WeightsExtension, moe_runners

_LOG = logging.getLogger(__name__)
_CASCADE = "keel.rollout.vllm_fast.cascade.backend"
_HEAD_ALIGNMENT = 64
"""vLLM pads the number of rows in the output head to a multiple of this number."""


def prepare(spec: EngineSpec, text: PreTrainedConfig) -> None:
    """Choose the attention backend for engines that are built afterwards, and start to compile
    kernels.

    `text` is the configuration of the model's language part.
    """
    cascades = share_prompts(spec)
    compile_ahead(spec, text.vocab_size, heads_of(text) if cascades else None)


def share_prompts(spec: EngineSpec) -> bool:
    """Install or remove the attention that reads a group's prompt only once. Returns True if it was
    installed."""
    plain = not spec.batch_invariant and spec.dtype != "float32"
    enabled = plain and spec.config.cascades(full_attention=True)
    if enabled or _CASCADE in sys.modules:
        import_module(_CASCADE).install(enabled=enabled)
    return enabled


class FastExtension(WeightsExtension):
    """Methods that vLLM adds to its workers. They run on every rank."""

    def keel_install_fast(self, routes: bool) -> None:
        """Replace the last part of the sampler, repeated steps and, if `routes` is set, route
        capture.

        Raises ValueError if the KV cache does not have one slot per token.
        """
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
        """Return the routes [tokens − first, L, K] of a request with these cache blocks."""
        return self.model_runner.aux_output_connector.rows(self._keel_slots(blocks)[first:tokens])

    def keel_finished_routes(
        self, requests: Sequence[tuple[Sequence[int], int]]
    ) -> list[NDArray[np.int16]]:
        """Return the routes [slots from `first` on, L, K] of several requests that finished in the
        last step.

        Each request is given as (cache blocks, first).
        """
        slots = [self._keel_slots(blocks)[first:] for blocks, first in requests]
        rows = self.model_runner.aux_output_connector.rows(np.concatenate(slots), stored=True)
        return np.split(rows, np.cumsum([len(each) for each in slots])[:-1])

    def _keel_slots(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        first = np.asarray(blocks, np.int64) * self._keel_block_size
        return (first[:, None] + np.arange(self._keel_block_size)).ravel()


def compile_ahead(
    spec: EngineSpec, vocabulary: int, heads: Heads | None = None
) -> threading.Thread | None:
    """Compile Keel's kernels on a thread while vLLM loads, which makes the first step ten seconds
    faster.

    If `heads` are given, the attention kernels are compiled for them. Returns None if there is
    nothing to compile. Other kernel variants are compiled when they are first used.
    """
    sampling, parts = spec.config.sampling, list[Callable[[], None]]()
    if heads is not None and heads.covered:  # first, because vLLM's graphs need it
        parts.append(lambda: _compile_attention(spec, heads))
    if 0 < sampling.top_k <= WIDEST_TOP_K and sampling.temperature > 0:
        parts.append(lambda: _compile_sampling(spec, vocabulary))
        parts.append(lambda: _compile_step_reuse(spec))
    if not parts:
        return None

    def run() -> None:
        for part in parts:
            try:
                part()
            except Exception:  # the engine raises it when it compiles the kernel itself
                _LOG.info("kernels were not compiled ahead", exc_info=True)

    thread = threading.Thread(target=run, name="keel-compile-ahead", daemon=True)
    thread.start()
    return thread


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _compile_sampling(spec: EngineSpec, vocabulary: int) -> None:
    sampling, rows = spec.config.sampling, spec.config.max_num_seqs
    dtype = "float32" if spec.config.head_dtype == "float32" else spec.dtype
    padded = -(-vocabulary // _HEAD_ALIGNMENT) * _HEAD_ALIGNMENT
    draw(
        _meta(rows, padded, dtype=getattr(torch, dtype))[:, :vocabulary],
        _meta(rows, dtype=torch.int64),
        _meta(rows, dtype=torch.int64),
        sampled=_meta(rows, dtype=torch.int32),
        temperature=_meta(rows, dtype=torch.float32),
        seeds=_meta(rows, dtype=torch.int64),
        width=sampling.top_k,
        record=spec.keep_sampling_mask,
        truncation=Truncation(_meta(rows, dtype=torch.int32), _meta(rows, dtype=torch.float32)),
    )


def _compile_step_reuse(spec: EngineSpec) -> None:
    rows = spec.config.max_num_seqs
    number, small = (_meta(rows, dtype=kind) for kind in (torch.int64, torch.int32))
    states = SamplingRows.of(rows, torch.device("meta"))
    gather(
        states,
        number,
        rows,
        temperature=states.temperature,
        top_k=states.top_k,
        top_p=states.top_p,
        seeds=states.seeds,
    )
    advance(
        number,
        computed=small,
        sampled=number[:, None],
        table=_meta(rows, -(-spec.max_model_len // PAGE), dtype=torch.int32),
        page=PAGE,
        positions=number,
        lengths=small,
        ids=small,
        slots=number,
    )


def _compile_attention(spec: EngineSpec, heads: Heads) -> None:
    rows, dtype = spec.config.max_num_seqs, getattr(torch, spec.dtype)
    blocks = -(-spec.max_model_len // heads.page)
    table, lengths = (_meta(*shape, dtype=torch.int32) for shape in ((rows, blocks), (rows,)))
    scratch = Scratch(heads, rows, torch.device("meta"))
    plan(scratch, table, lengths)
    # Layouts of vLLM's cache and of its projections' outputs.
    cache = _meta(rows, heads.keys, heads.page, 2 * heads.size, dtype=dtype)
    keys, values = cache.transpose(1, 2).split(heads.size, dim=-1)
    width = heads.queries + 2 * heads.keys
    query = _meta(rows, width, heads.size, dtype=dtype)[:, : heads.queries]
    out = _meta(rows, heads.queries, heads.size, dtype=dtype)
    attend(scratch, query, keys, values, table, lengths, heads.size**-0.5, out)
