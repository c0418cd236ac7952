"""One rank of the training benchmark: builds engines and writes a row for each timed step."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.synthetic import SyntheticEngine, draw_micro_batch, with_even_routes
from benchmarks.training.cases import Case, estimates, model_of
from benchmarks.training.support_head import synchronize
from keel.model.load import ModelFacts, facts_of
from keel.rl.packing import TrainBatch
from keel.trainer.engine import zero
from keel.trainer.placement.hardware import GpuSpec
from keel.trainer.placement.memory import GIB
from keel.trainer.placement.step_time import body_parameters

H200 = GpuSpec()


@dataclass(frozen=True, kw_only=True)
class Job:
    cases: list[Case]
    rank: int
    ranks: int
    store: str
    """File for the rendezvous of the ranks."""
    rows: str
    """File for one JSON line per case, written by rank 0."""
    seconds: float
    """Time limit for starting further cases."""
    rounds: int
    small: bool


def timed(engine: SyntheticEngine, batch: TrainBatch) -> float:
    """Return the seconds of a step."""
    synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    began = time.perf_counter()
    engine.step([batch])
    synchronize()
    return time.perf_counter() - began


def run(job: Job) -> None:
    """Measure the job's cases and record failures as rows.

    With several ranks a failure ends the job, because the ranks are then out of step.
    """
    began = time.monotonic()
    file = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
    store = file(job.store, job.ranks) if job.ranks > 1 else None
    if job.small:
        zero.BACKEND = "aot_eager"  # the same graphs without compiling C++
        torch.set_num_threads(1)
    for _, cases in groupby(job.cases, lambda case: case.engine):
        engine: SyntheticEngine | None = None
        for case in cases:
            if agreed(time.monotonic() - began > job.seconds):
                put(job, {"case": asdict(case), "name": str(case), "skipped": "out of time"})
                continue
            try:
                model = model_of(case.shape, small=job.small)
                facts = facts_of(model)
                if engine is None:
                    first = replace(case, recompute=False)
                    config = first.config(facts.vocab_size)
                    engine = SyntheticEngine(model, config, rank=job.rank, store=store)
                put(job, measure(engine, case, facts, job))
            except Exception as error:  # the other cases still run
                put(job, {"case": asdict(case), "name": str(case), "failed": repr(error)[:600]})
                if job.ranks > 1:
                    raise
                release(engine)
                engine = None
        release(engine)
        engine = None
        free()


def measure(engine: SyntheticEngine, case: Case, facts: ModelFacts, job: Job) -> dict[str, Any]:
    device = engine.device
    batch, kept_ids = step_batch(case, facts, device)
    with adapted(engine, case):
        free()
        timed(engine, batch)
        seconds = statistics.median(timed(engine, batch) for _ in range(job.rounds))
        gib = memory_used(device)
    flops = step_flops(case, facts, kept_ids)
    planned_s, planned_bytes = estimates(case, facts, gpu=device.type == "cuda")
    rate = case.ranks * H200.flops * seconds
    common = flops["body"] + flops["attention"]
    return {
        "name": str(case),
        "case": asdict(case),
        "parameters": facts.parameters,
        "active_parameters": facts.active_parameters,
        "seconds": seconds,
        "tokens_per_second_per_gpu": case.step_tokens / seconds / case.ranks,
        "mfu": (common + flops["head"]) / rate,
        "mfu_with_full_head": (common + flops["full head"]) / rate,
        "gpu_gib": gib,
        "estimated_seconds": planned_s,
        "time_estimate_ratio": planned_s / seconds,
        "estimated_gib": planned_bytes / GIB,
        "memory_estimate_ratio": planned_bytes / GIB / gib if gib else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def step_batch(case: Case, facts: ModelFacts, device: torch.device) -> tuple[TrainBatch, int]:
    """Return a rank's share of a step, one micro-batch repeated, and its number of kept ids."""
    torch.manual_seed(0)
    batch = draw_micro_batch(case.row(facts.vocab_size), case.mean_set, device)
    if case.routes:
        batch = with_even_routes(batch, facts, device)
    assert batch.sampling_mask is not None
    kept_ids = len(batch.sampling_mask.ids)
    if not case.masks:
        batch = replace(batch, sampling_mask=None)
    micro_batches = (batch,) * case.micro_batches
    sequences = case.step_tokens // case.length
    return TrainBatch(micro_batches=micro_batches, total_sequences=sequences), kept_ids


def step_flops(case: Case, facts: ModelFacts, kept_ids: int) -> dict[str, float]:
    """FLOPs of the model, forward and backward, for a step; recomputation is not counted.

        body       6 × (active parameters − embedding and output layer) per token
        attention  3 × 2 × length × heads × head size per token and layer: half of the context for
                   scores and for values
        head       6 × hidden size for each kept id of each sampled token, as computed
        full head  6 × hidden size × vocabulary for each sampled token: a head without masks

    An embedding lookup is no GEMM. Softmax, norms and the optimizer are not counted.
    """
    row, tokens = case.row(facts.vocab_size), case.step_tokens
    micro_batches = case.micro_batches * case.groups
    sampled = row.segments * row.completion * micro_batches
    full = 6.0 * facts.hidden_size * facts.vocab_size * sampled
    return {
        "body": 6.0 * body_parameters(facts) * tokens,
        "attention": 6.0 * case.length * facts.attention_width * facts.layers * tokens,
        "head": 6.0 * facts.hidden_size * kept_ids * micro_batches if case.masks else full,
        "full head": full,
    }


def memory_used(device: torch.device) -> float:
    """Peak GiB of the GPU including CUDA and NCCL; the allocator's cache makes it a peak."""
    if device.type != "cuda":
        return 0.0
    free_bytes, total = torch.cuda.mem_get_info()
    return (total - free_bytes) / GIB


@contextmanager
def adapted(engine: SyntheticEngine, case: Case) -> Iterator[None]:
    """Set the engine to a case's recomputation and routing replay."""
    replays = engine._replays
    engine._replays = replays and case.routes
    if case.recompute:
        engine.checkpoint_activations(keep_attention=case.flash4)
    try:
        yield
    finally:
        engine._replays = replays
        if case.recompute:
            engine._network.model.gradient_checkpointing_disable()


def agreed(flag: bool) -> bool:
    """Return True if the flag is set on any rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    device = "cuda" if torch.cuda.is_available() else "cpu"
    votes = torch.tensor([int(flag)], device=device)
    dist.all_reduce(votes)
    return bool(votes.item())


def put(job: Job, row: Mapping[str, Any]) -> None:
    if job.rank == 0:
        with open(job.rows, "a") as file:
            file.write(json.dumps(row, default=float) + "\n")
        shown = ("name", "seconds", "mfu", "failed", "skipped")
        print({key: row.get(key) for key in shown}, flush=True)


def release(engine: SyntheticEngine | None) -> None:
    """Free an engine's weights and optimizer state despite remaining references."""
    if engine is None:
        return
    tensors: list[Tensor] = list(engine._network.parameters())
    for group in engine._adam.param_groups:
        tensors += [*group["params"], *(p.grad for p in group["params"] if p.grad is not None)]
    for state in engine._adam.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    optimizer: Any = engine._engine.optimizer
    for value in vars(optimizer).values():
        if isinstance(value, list):
            tensors += [item for item in value if isinstance(item, Tensor)]
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.untyped_storage().resize_(0)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
