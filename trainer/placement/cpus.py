"""Chooses the dtype of a run on a CPU and estimates its speed."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import torch

from keel.configs.auto import DTYPE
from keel.configs.load import load_config
from keel.configs.schema import Config
from keel.model.load import ModelFacts
from keel.trainer.placement.hardware import GpuSpec
from keel.trainer.placement.memory import packed
from keel.trainer.placement.step_time import Rates, StepTime, step_time
from keel.trainer.run import checkpoint

CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""CPU flags that indicate hardware support for bfloat16 matrix multiplication."""
_MEMORY_BYTES = 10e9
"""Nominal memory bandwidth shared by two or more cores, in bytes per second."""
_GEMM_SHARE = 0.8
_RATES = Rates(
    gemm_share=_GEMM_SHARE,
    attention_share=_GEMM_SHARE,
    head_mfu=_GEMM_SHARE,
    prefill_mfu=_GEMM_SHARE,
    memory_share=1.0,
    cache_share=1.0,
    layer_step_s=3e-3,
    optimizer_bytes=28.0,
)
"""Rates fitted to runs of a 135 M parameter model on two cores. They are accurate to within a
factor of two."""


@cache
def has_bfloat16() -> bool:
    """Return True if this CPU has bfloat16 instructions."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return not _BFLOAT16.isdisjoint(flags)


def with_dtype(config: Config, remaining: frozenset[str], *, gpu: bool) -> Config:
    """Return the config with `model.dtype: auto` replaced by a dtype. A resumed run keeps its
    dtype. A new run uses float32 on a CPU without bfloat16 instructions, and otherwise the schema's
    default, bfloat16."""
    if DTYPE not in remaining:
        return config
    folder = Path(config.run.dir).expanduser()
    saved = folder / "config.yaml"
    if saved.is_file() and checkpoint.latest(folder / "checkpoints"):
        dtype = load_config(saved).model.dtype
    else:
        dtype = config.model.dtype if gpu or has_bfloat16() else "float32"
    return replace(config, model=replace(config.model, dtype=dtype))


def slow_dtype(config: Config, *, gpu: bool) -> str:
    """Return a warning if the CPU has to emulate bfloat16, or an empty string."""
    if gpu or config.engine_dtype != "bfloat16" or has_bfloat16():
        return ""
    knob = "rollout.dtype" if config.rollout.dtype else DTYPE
    return (
        f"{knob} = bfloat16: this CPU has no bfloat16 instructions and emulates them several times "
        f"slower; use {knob}=float32"
    )


@cache
def _gemm_flops(dtype: torch.dtype) -> float:
    """Return the GEMM rate of this process in FLOP/s, measured over 0.3 s."""
    rows, width = 512, 1024
    a, b = torch.ones(rows, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    times, end = list[float](), time.perf_counter() + 0.3
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    return 2 * rows * width * width / median(times)


def cpu_time(
    config: Config, facts: ModelFacts, *, prompt_tokens: int, flops: float = 0.0
) -> StepTime:
    """Estimate how many seconds each part of a step takes on this CPU. `prompt_tokens` is the mean
    prompt length. `flops` is the GEMM rate in FLOP/s, which is measured if `flops` is 0."""
    flops = flops or _gemm_flops(getattr(torch, config.model.dtype))
    config = replace(config, data=replace(config.data, max_prompt_tokens=prompt_tokens))
    estimate = step_time(
        config,
        facts,
        micro_batches=packed(config)[0] * config.algorithm.updates_per_batch,
        spec=GpuSpec(
            name=f"this CPU ({flops / 1e9:.0f} GFLOP/s measured)",
            flops=flops,
            memory_bytes=_MEMORY_BYTES,
            link_bytes=_MEMORY_BYTES,
            flash4=False,
        ),
        rates=_RATES,
    )
    return replace(estimate, cpu=True)
