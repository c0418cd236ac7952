"""No larger a KV cache than an engine's answers can fill.

vLLM takes all the memory that it is allowed. What `rollout.max_num_seqs` answers of full length
cannot fill is of no use, and with `rollout.sleep` it costs time: a GPU gives out some 100 GiB a
second, at each update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.v1.engine import core as engine_core

core: Any = engine_core

SPARE = 1.25
"""For prompts of answers that have ended, which the next ones may share."""
SPARE_PAGES = 16
"""Of each answer: Keel's scheduler takes several at once where there are plenty."""


@contextmanager
def bounded() -> Iterator[None]:
    """For engines that are built in here, in this process."""
    original = core.get_kv_cache_configs

    def get_kv_cache_configs(
        vllm_config: Any, specs: list[dict[str, Any]], available: list[int]
    ) -> Any:
        wanted = [
            min(memory, needed(vllm_config, spec))
            for spec, memory in zip(specs, available, strict=True)
        ]
        return original(vllm_config, specs, wanted)

    core.get_kv_cache_configs = get_kv_cache_configs
    try:
        yield
    finally:
        core.get_kv_cache_configs = original


def needed(vllm_config: Any, layers: Mapping[str, Any]) -> float | int:
    """Bytes for all answers that one worker may have at once; infinite where layers differ, so that
    vLLM shares out pages in ways of its own. `layers`: vLLM's KV cache specs."""
    if len({(type(layer), layer.page_size_bytes) for layer in layers.values()}) != 1:
        return float("inf")
    answer = sum(
        layer.max_memory_usage_bytes(vllm_config) + SPARE_PAGES * layer.page_size_bytes
        for layer in layers.values()
    )
    return int(SPARE * vllm_config.scheduler_config.max_num_seqs * answer)
