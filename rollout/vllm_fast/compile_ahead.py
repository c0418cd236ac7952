"""Keel's kernels compiled on a thread of their own, while vLLM still loads and traces: most of it
goes on outside of Python. The first step would else wait for it, some ten seconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from keel.rollout.spec import EngineSpec
from keel.rollout.vllm_fast.cascade.kernels import attend
from keel.rollout.vllm_fast.cascade.plan import PAGE, Heads, Scratch, plan
from keel.rollout.vllm_fast.sample_graphs import Rows, gather
from keel.rollout.vllm_fast.sample_kernels import Cuts, draw
from keel.rollout.vllm_fast.truncate_kernels import WIDEST_TOP_K

_LOG = logging.getLogger(__name__)
PADDED = 64
"""vLLM's heads have a multiple of so many rows."""


def compile_ahead(
    spec: EngineSpec, vocabulary: int, heads: Heads | None = None
) -> threading.Thread | None:
    """Of steps that sample as the recipe says, and of attention with these `heads`; None where
    steps take another way than the short one (`KeptSampler.only_truncates`) and no heads are given.
    Nothing depends on it: what it has not compiled, or otherwise than is wanted, is compiled when
    it is."""
    sampling, parts = spec.config.sampling, list[Callable[[], None]]()
    if heads is not None and heads.covered:  # first: vLLM's graphs want it
        parts.append(lambda: _attention(spec, heads))
    if 0 < sampling.top_k <= WIDEST_TOP_K and sampling.temperature > 0:
        parts.append(lambda: _sampling(spec, vocabulary))
        parts.append(lambda: _between(spec))
    if not parts:
        return None

    def run() -> None:
        for part in parts:
            try:
                part()
            except Exception:  # whatever it is, the engine meets it when it compiles them itself
                _LOG.info("kernels were not compiled ahead", exc_info=True)

    thread = threading.Thread(target=run, name="keel-compile-ahead", daemon=True)
    thread.start()
    return thread


def _on_meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _sampling(spec: EngineSpec, vocabulary: int) -> None:
    sampling, rows = spec.config.sampling, spec.config.max_num_seqs
    dtype = "float32" if spec.config.head_dtype == "float32" else spec.dtype
    padded = -(-vocabulary // PADDED) * PADDED
    draw(
        _on_meta(rows, padded, dtype=getattr(torch, dtype))[:, :vocabulary],
        _on_meta(rows, dtype=torch.int64),
        _on_meta(rows, dtype=torch.int64),
        sampled=_on_meta(rows, dtype=torch.int32),
        temperature=_on_meta(rows, dtype=torch.float32),
        seeds=_on_meta(rows, dtype=torch.int64),
        width=sampling.top_k,
        record=spec.keep_sampling_mask,
        cuts=Cuts(_on_meta(rows, dtype=torch.int32), _on_meta(rows, dtype=torch.float32)),
    )


def _between(spec: EngineSpec) -> None:
    """What is done from one step to the next."""
    from keel.rollout.vllm_fast.step_reuse import advance  # noqa: PLC0415  (vLLM may have changed)

    rows, meta = spec.config.max_num_seqs, torch.device("meta")
    number, small = (_on_meta(rows, dtype=kind) for kind in (torch.int64, torch.int32))
    states = Rows.of(rows, meta)
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
        table=_on_meta(rows, -(-spec.max_model_len // PAGE), dtype=torch.int32),
        page=PAGE,
        positions=number,
        lengths=small,
        ids=small,
        slots=number,
    )


def _attention(spec: EngineSpec, heads: Heads) -> None:
    rows, dtype = spec.config.max_num_seqs, getattr(torch, spec.dtype)
    blocks = -(-spec.max_model_len // heads.page)
    table, lengths = (_on_meta(*shape, dtype=torch.int32) for shape in ((rows, blocks), (rows,)))
    scratch = Scratch(heads, rows, torch.device("meta"))
    plan(scratch, table, lengths)
    # As vLLM lays out its cache, and its projections what they give.
    cache = _on_meta(rows, heads.keys, heads.page, 2 * heads.size, dtype=dtype)
    keys, values = cache.transpose(1, 2).split(heads.size, dim=-1)
    width = heads.queries + 2 * heads.keys
    query = _on_meta(rows, width, heads.size, dtype=dtype)[:, : heads.queries]
    out = _on_meta(rows, heads.queries, heads.size, dtype=dtype)
    attend(scratch, query, keys, values, table, lengths, heads.size**-0.5, out)
