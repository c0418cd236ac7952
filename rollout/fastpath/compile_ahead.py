"""The sampler's kernels compiled on a thread of their own, while vLLM still loads and traces: most
of it goes on outside of Python. The first step would else wait for it, some ten seconds."""

from __future__ import annotations

import logging
import threading

import torch

from keel.rollout.fastpath.sample_kernels import Cuts, draw
from keel.rollout.fastpath.truncate_kernels import WIDEST_TOP_K
from keel.rollout.spec import EngineSpec

_LOG = logging.getLogger(__name__)
PADDED = 64
"""vLLM's heads have a multiple of so many rows."""


def compile_ahead(spec: EngineSpec, vocabulary: int) -> threading.Thread | None:
    """Of steps that sample as the recipe says; None where those take another way than the short
    one (`KeptSampler.only_truncates`). Nothing depends on it: what it has not compiled, or
    otherwise than is wanted, is compiled when it is."""
    sampling, rows = spec.config.sampling, spec.config.max_num_seqs
    dtype = "float32" if spec.config.head_dtype == "float32" else spec.dtype
    if not (0 < sampling.top_k <= WIDEST_TOP_K and sampling.temperature > 0):
        return None

    def on_meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def run() -> None:
        padded = -(-vocabulary // PADDED) * PADDED
        try:
            draw(
                on_meta(rows, padded, dtype=getattr(torch, dtype))[:, :vocabulary],
                on_meta(rows, dtype=torch.int64),
                on_meta(rows, dtype=torch.int64),
                sampled=on_meta(rows, dtype=torch.int32),
                temperature=on_meta(rows, dtype=torch.float32),
                seeds=on_meta(rows, dtype=torch.int64),
                width=sampling.top_k,
                record=spec.keep_sampling_mask,
                cuts=Cuts(on_meta(rows, dtype=torch.int32), on_meta(rows, dtype=torch.float32)),
            )
        except Exception:  # whatever it is, the engine meets it when it compiles the kernel itself
            _LOG.info("kernels were not compiled ahead", exc_info=True)

    thread = threading.Thread(target=run, name="keel-compile-ahead", daemon=True)
    thread.start()
    return thread
