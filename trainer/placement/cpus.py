"""Number format and speed of a run on a CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import torch

from keel.configs.auto import DTYPE
from keel.configs.load import load_config
from keel.configs.schema import Config
from keel.model.load import ModelFacts
from keel.trainer.placement.memory import BYTES
from keel.trainer.placement.step_time import body_parameters, passes, seconds
from keel.trainer.run import checkpoint

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""CPU flags that show that a processor multiplies bfloat16 matrices."""
SHARE = 0.8
"""Fraction of the rate of a plain float32 GEMM that sampling and training reach. Fitted to runs of
a 135 M parameter model on two cores, and accurate to a factor of two."""
MEMORY_BYTES = 10e9
"""Nominal memory bandwidth of two or more cores together, in bytes per second."""
LAYER_S = 3e-3
"""Seconds that a layer takes in a decoding step in addition to its GEMMs, for kernel launches and
attention."""
ADAM_BYTES = 28
"""Bytes that an AdamW update in float32 reads and writes per parameter."""
ROWS, WIDTH, MEASURE_S = 512, 1024, 0.3
SLOW_S = 600.0
"""Warn if the first step is expected to end more than this many seconds after sampling began."""


@cache
def has_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return not BFLOAT16.isdisjoint(flags)


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


@cache
def measured_flops() -> float:
    """Measure the float32 GEMM rate of this process's threads for 0.3 s, and return the median in
    FLOP/s."""
    a, b = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    times, end = list[float](), time.perf_counter() + MEASURE_S
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    return 2 * ROWS * WIDTH * WIDTH / median(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """Estimated seconds on a CPU if every completion reaches its length limit."""

    sampling: float
    training: float
    evaluation: float
    """Seconds for an evaluation; 0 if nothing is held out."""
    flops: float
    """The measured GEMM rate that the estimate is based on."""

    def lines(self, *, trains: bool = True) -> list[str]:
        """Format the estimate for `keel check`."""
        step = self.sampling + self.training
        parts = [
            f"{seconds(step)} per step (sampling {seconds(self.sampling)}, training "
            f"{seconds(self.training)})"
        ] * trains
        parts += [f"{seconds(self.evaluation)} per evaluation"] * (self.evaluation > 0)
        lines = [
            f"ESTIMATE, to a factor of two, for completions of full length: {', '.join(parts)}; by "
            f"{self.flops / 1e9:.0f} GFLOP/s measured on this CPU"
        ]
        if trains and self.evaluation + step > SLOW_S:
            lines.append(
                f"the first step ends after about {seconds(self.evaluation + step)}; lower "
                "rollout.sampling.max_tokens, algorithm.prompts_per_step or the holdout for a "
                "quicker start"
            )
        return lines if parts else []


def cpu_time(
    config: Config,
    facts: ModelFacts,
    *,
    prompt_tokens: float,
    heldout: int,
    flops: float = 0.0,
) -> CpuTime:
    """Estimate how long a step and an evaluation take.

    `prompt_tokens` is the mean length of a prompt, and `heldout` is the number of prompts in an
    evaluation. `flops` is the GEMM rate in FLOP/s, which is measured if it is 0.
    """
    flops = flops or measured_flops()
    algorithm, rate = config.algorithm, SHARE * flops
    weights = facts.active_parameters * BYTES[config.engine_dtype] / MEMORY_BYTES
    head = facts.vocab_size * facts.hidden_size
    per_token = 2 * (body_parameters(facts) + head)
    longest = config.rollout.sampling.max_tokens

    def sampled(prompts: int, samples: int) -> float:
        completions = prompts * samples
        at_once = min(completions, config.rollout.max_num_seqs * config.rollout.engines)
        waves = completions / max(1, at_once)
        step = facts.layers * LAYER_S + max(weights, per_token * at_once / rate)
        return waves * longest * step + per_token * prompts * prompt_tokens / rate

    completions = algorithm.prompts_per_step * algorithm.group_size
    tokens = completions * (prompt_tokens + longest)
    return CpuTime(
        sampling=sampled(algorithm.prompts_per_step, algorithm.group_size),
        training=passes(config) * per_token * tokens / rate
        + algorithm.updates_per_batch * facts.parameters * ADAM_BYTES / MEMORY_BYTES,
        evaluation=sampled(heldout, config.eval.samples) if heldout else 0.0,
        flops=flops,
    )
