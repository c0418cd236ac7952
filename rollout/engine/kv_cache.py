"""No larger a KV cache than an engine's completions can fill.

vLLM takes all the memory that it is allowed. What `rollout.max_num_seqs` completions of full
length, or the conversations that are open, cannot fill is of no use, and with `rollout.time_share`
it costs time: a GPU gives out some 100 GiB a second, at each update.

It is done by a patch. A `worker_cls` whose `determine_available_memory` returns less would be
official, but stands in for the worker that vLLM chooses for a platform (two classes here, and a
third one elsewhere), for the sake of one number. `kv_cache_memory_bytes` is given to an engine that
starts beside a trainer on its GPU (`EngineSpec.cache_bytes`), before anybody knows vLLM's layers
and pages, by which completions are counted here; `num_gpu_blocks_override` would leave out the
memory that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.engine import core as engine_core

from keel.rollout.vllm_pin import check_parameters

core: Any = engine_core

SPARE = 1.25
"""For prompts of completions that have ended, which the next ones may share."""
RESERVE = 2**30
"""Bytes for CUDA graphs, which are captured later."""
SPARE_PAGES = 16
"""Of each completion: Keel's scheduler takes several at once where there are plenty."""


@dataclass(slots=True)
class Bound:
    asked: bool = False
    """Whether vLLM has asked for a size, and so was told ours."""
    added_gib: float = 0.0
    """What the cache takes beyond the engine's share, which had no room for one completion."""


@contextmanager
def bounded(conversations: int = 0) -> Iterator[Bound]:
    """For engines that are built in here, in this process; `conversations` as in `EngineSpec`."""
    original, bound = core.get_kv_cache_configs, Bound()
    check_parameters(original, "vllm_config kv_cache_specs available_memory")

    def get_kv_cache_configs(
        vllm_config: Any, kv_cache_specs: list[dict[str, Any]], available_memory: list[int]
    ) -> Any:
        bound.asked = True
        wanted: list[float | int] = []
        for spec, memory in zip(kv_cache_specs, available_memory, strict=True):
            room = enough(memory, least(vllm_config, spec), free)
            bound.added_gib = max(bound.added_gib, (room - memory) / 2**30)
            wanted.append(min(room, needed(vllm_config, spec, conversations)))
        return original(vllm_config, kv_cache_specs, wanted)

    core.get_kv_cache_configs = get_kv_cache_configs
    try:
        yield bound
    finally:
        core.get_kv_cache_configs = original


def enough(memory: int, one: float | int, unused: Callable[[], int]) -> int:
    """Bytes that a worker may give its cache: `memory` of its share. Where that does not hold the
    completion that vLLM refuses to start without (`one`), as much more as makes it do, of what the
    GPU has `unused`: how much an engine needs beside the cache is an estimate until it is there.
    Asked for only then: a process whose workers are others has no part of a GPU before."""
    return int(one) if memory < one and one <= max(0, memory) + unused() else memory


def free() -> int:
    """Bytes of this process's GPU that nobody has, but `RESERVE`; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return max(0, torch.cuda.mem_get_info()[0] - RESERVE)


def least(vllm_config: Any, layers: Mapping[str, Any]) -> int:
    """Bytes for one completion of full length; 0 where layers differ, as of `needed`."""
    if len({type(layer) for layer in layers.values()}) != 1:
        return 0
    return sum(layer.max_memory_usage_bytes(vllm_config) for layer in layers.values())


def needed(vllm_config: Any, layers: Mapping[str, Any], conversations: int = 0) -> float | int:
    """Bytes for all completions and conversations that one worker may have at once; infinite where
    layers differ, so that vLLM shares out pages in ways of its own. `layers`: vLLM's KV cache
    specs."""
    if len({(type(layer), layer.page_size_bytes) for layer in layers.values()}) != 1:
        return float("inf")
    completion = sum(
        layer.max_memory_usage_bytes(vllm_config) + SPARE_PAGES * layer.page_size_bytes
        for layer in layers.values()
    )
    contexts = max(vllm_config.scheduler_config.max_num_seqs, conversations)
    return int(SPARE * contexts * completion)
