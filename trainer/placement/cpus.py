"""Number format of a run on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from keel.configs.auto import DTYPE
from keel.configs.load import load_config
from keel.configs.schema import Config
from keel.trainer.run import checkpoint

CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""CPU flags that show that a processor multiplies bfloat16 matrices."""


@cache
def has_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return not _BFLOAT16.isdisjoint(flags)


def with_dtype(config: Config, remaining: frozenset[str], *, gpu: bool) -> Config:
    """Replace `model.dtype: auto` with a dtype. A resumed run keeps its dtype. A new run uses
    float32 on a CPU without bfloat16 instructions, and otherwise the default of the schema,
    bfloat16."""
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
    """Return a warning if the run uses bfloat16 on a CPU that only emulates it, or an empty
    string."""
    if gpu or config.engine_dtype != "bfloat16" or has_bfloat16():
        return ""
    knob = "rollout.dtype" if config.rollout.dtype else DTYPE
    return (
        f"{knob} = bfloat16: this CPU has no bfloat16 instructions and emulates them several times "
        f"slower; use {knob}=float32"
    )
