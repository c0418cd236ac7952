"""Keel's extension of vLLM's workers, without an engine. The tests import vLLM, not this module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from keel.rl.types import NO_ROUTE

pytestmark = pytest.mark.e2e
CPU = torch.device("cpu")


def test_unfiled_slots_have_no_route() -> None:
    from keel.rollout.vllm_fast.install import SlotRoutes  # noqa: PLC0415

    captured = torch.zeros((4, 3, 2), dtype=torch.int32)
    routes = SlotRoutes(captured, torch.tensor([5, 6, 0, 0]), layers=[0, 2], size=8)
    routes.store(2)  # both tokens use expert 0 only, also under capture
    rows = routes.rows(np.array([5, 6, 7]))
    assert (rows[:2] == 0).all() and (rows[2] == NO_ROUTE).all()


def test_cache_is_bounded_by_completions() -> None:
    from vllm.v1.engine import core  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: PLC0415

    from keel.rollout.engine import patches as cache  # noqa: PLC0415

    shape: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=32)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    page = 2 * 16 * 2 * 64 * 2  # keys and values of 16 tokens
    enough = cache.SPARE * 8 * 2 * (7 + cache.SPARE_PAGES) * page  # 100 tokens are 7 pages
    calls: list[list[float]] = []

    def record(vllm_config: Any, kv_cache_specs: Any, available_memory: list[float]) -> str:
        calls.append(available_memory)
        return "configs"

    before, core.get_kv_cache_configs = core.get_kv_cache_configs, record
    try:
        with cache.bounded_kv_cache():
            both, mixed = {"0": full, "1": full}, {"0": full, "1": window}
            memory = [int(10 * enough), int(enough / 2), 10**12]
            built = core.get_kv_cache_configs(config, [both, both, mixed], memory)
        with cache.bounded_kv_cache(conversations=20):
            core.get_kv_cache_configs(config, [both], memory[:1])
        assert core.get_kv_cache_configs is record
    finally:
        core.get_kv_cache_configs = before
    assert built == "configs" and calls[0] == [enough, int(enough / 2), 10**12]
    # A share too small for one completion uses other free memory if that suffices.
    sizes = [cache.enough(room, 50, lambda: 30) for room in (60, 20, 19, -10)]
    assert sizes == [60, 50, 19, -10]
    assert cache.enough(60, 50, lambda: pytest.fail("it asks the GPU")) == 60
    assert calls[1:] == [[enough * 20 / 8]], "room for conversations that wait for a tool"
