"""One rank of benchmarks/training/__main__.py: builds engines, times their steps, writes a row for
each."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.batch_shape import KL_COEF, Row, made_config
from benchmarks.common.synthetic import SyntheticEngine, draw_micro_batch, with_even_routes
from benchmarks.common.trace import covered, own_time, spent, table
from benchmarks.training.cases import Case, estimates, model_of, with_stock_layers
from keel.model.layers.fused import use_fused_layers
from keel.model.load import ModelFacts, facts_of
from keel.rl.packing import TrainBatch
from keel.trainer.engine import layer_compile, policy
from keel.trainer.engine.policy import Inputs
from keel.trainer.planning.gpus import Machine
from keel.trainer.planning.memory import GIB
from keel.trainer.planning.step_time import body_parameters

MEAN_SET = 8
H200 = Machine()
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is started for."""

    cases: list[Case]
    rank: int
    ranks: int
    store: str
    """File that the ranks meet at."""
    rows: str
    """File that rank 0 adds rows to, one JSON object a line."""
    seconds: float
    """No case begins later than this after the start."""
    rounds: int
    profile: bool
    small: bool
    stock: bool
    """Layers as transformers has them."""

    @staticmethod
    def read(path: Path) -> Job:
        known = json.loads(path.read_text())
        return Job(**{**known, "cases": [Case(**case) for case in known["cases"]]})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class TimedEngine(SyntheticEngine):
    """Marks the parts of a step on the GPU's clock (on a CPU: the host's)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._marks: list[tuple[str, Any]] = []
        self._engine.register_forward_pre_hook(lambda *_: self.mark("forward"))
        self._engine.register_forward_hook(lambda *_: self.mark("loss"))
        backward = self._engine.backward

        def marked(loss: Tensor, **options: Any) -> None:
            self.mark("backward")
            backward(loss, **options)
            self.mark("between")

        self._engine.backward = marked  # type: ignore[method-assign]
        if self._reference is not None:
            logp = self._reference.logp

            def scored(inputs: Inputs) -> Tensor:
                self.mark("reference")
                found = logp(inputs)
                self.mark("between")
                return found

            self._reference.logp = scored  # type: ignore[method-assign]

    def _apply_gradients(self) -> float:
        self.mark("optimizer")
        norm = super()._apply_gradients()
        self.mark("between")
        return norm

    def mark(self, begins: str) -> None:
        if self._device.type == "cuda":
            stamp: Any = torch.cuda.Event(enable_timing=True)
            stamp.record()
        else:
            stamp = time.perf_counter()
        self._marks.append((begins, stamp))

    def timed(self, batch: TrainBatch) -> tuple[float, dict[str, float]]:
        """Seconds of a step, and of its parts: `between` is what the host does from one
        micro-batch to the next while the GPU has nothing to do."""
        synchronize(self._device)
        if self._world_size > 1:
            dist.barrier()
        self._marks.clear()
        began = time.perf_counter()
        self.mark("between")
        self.step([batch])
        self.mark("end")
        synchronize(self._device)
        seconds = time.perf_counter() - began
        parts: dict[str, float] = defaultdict(float)
        for (name, start), (_, stop) in pairwise(self._marks):
            on_gpu = self._device.type == "cuda"
            parts[name] += start.elapsed_time(stop) / 1e3 if on_gpu else stop - start
        return seconds, dict(parts)


def run(job: Job) -> None:
    """Measure the job's cases. A case that fails is a row too; on several ranks it is the last,
    since the others are then out of step."""
    began = time.monotonic()
    file = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
    store = file(job.store, job.ranks) if job.ranks > 1 else None
    if job.small:
        layer_compile.BACKEND = "aot_eager"  # the same graphs, without minutes of C++ to compile
        torch.set_num_threads(1)
    if job.stock:
        policy.use_fused_layers = lambda _: None
    for _, cases in groupby(job.cases, lambda case: case.engine):
        engine: TimedEngine | None = None
        for case in cases:
            late = time.monotonic() - began > job.seconds
            if agreed(late):
                put(job, {"case": asdict(case), "name": str(case), "skipped": "out of time"})
                continue
            try:
                model = model_of(case.shape, small=job.small)
                facts = facts_of(model)
                row = case.row(facts.vocab_size)
                config = made_config(row, case.trainer(), reference=case.reference)
                if engine is None:
                    plain = replace(config.trainer, activation_checkpointing=False)
                    start = replace(config, trainer=plain)
                    engine = TimedEngine(
                        model, start, rank=job.rank, world_size=job.ranks, store=store
                    )
                put(job, measure(engine, case, facts, job))
            except Exception as error:  # one case must not cost the others
                put(job, {"case": asdict(case), "name": str(case), "failed": repr(error)[:600]})
                if job.ranks > 1:
                    raise
                release(engine)
                engine = None
        release(engine)
        engine = None
        free()


def measure(engine: TimedEngine, case: Case, facts: ModelFacts, job: Job) -> dict[str, Any]:
    device, row = engine._device, case.row(facts.vocab_size)
    batch = step_batch(case, row, facts, device)
    kept = batch.micro_batches[0].kept
    assert kept is not None
    with recomputing(engine, case):
        free()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine.timed(batch)
        rounds = [engine.timed(batch) for _ in range(job.rounds)]
        memory = memory_used(device)
        seconds = statistics.median(total for total, _ in rounds)
        _, parts = min(rounds, key=lambda each: abs(each[0] - seconds))
        found = profiled(engine, case, batch, job) if job.profile and job.rank == 0 else {}
        if job.profile and job.rank > 0:
            engine.timed(batch)
    flops = step_flops(case, row, facts, len(kept.ids))
    policy_flops = flops["body"] + flops["attention"] + flops["head"]
    stock = policy.use_fused_layers is not use_fused_layers
    known = with_stock_layers(facts) if stock else facts
    estimate, planned = estimates(case, known, gpu=device.type == "cuda")
    planned /= GIB
    rate = case.ranks * H200.flops * seconds
    return {
        "name": str(case),
        "case": asdict(case),
        "parameters": facts.parameters,
        "active_parameters": facts.active_parameters,
        "mean_set": len(kept.ids) / max(1, int((kept.sizes() > 0).sum())),
        "seconds": seconds,
        "all_seconds": [total for total, _ in rounds],
        "tokens_per_second_per_gpu": case.step_tokens / seconds / case.ranks,
        "mfu": policy_flops / rate,
        "mfu_with_reference": (policy_flops + flops["reference"]) / rate,
        "mfu_with_full_head": (flops["body"] + flops["attention"] + flops["full head"]) / rate,
        "tflop": {name: value / 1e12 for name, value in flops.items()},
        "parts": parts,
        "memory": memory,
        "estimated_seconds": estimate,
        "time_estimate_ratio": estimate / seconds,
        "estimated_gib": planned,
        "memory_estimate_ratio": planned / memory["gpu_gib"] if memory["gpu_gib"] else None,
        "stock": stock,
        "experts": getattr(engine._network.config, "_experts_implementation", None),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        **found,
    }


def step_batch(case: Case, row: Row, facts: ModelFacts, device: torch.device) -> TrainBatch:
    """A rank's share of a step: one micro-batch, over and over, the same on all ranks."""
    torch.manual_seed(0)
    kl_coef = KL_COEF if case.reference else 0.0
    drawn = draw_micro_batch(row, MEAN_SET, device, kl_coef=kl_coef)
    batch = with_even_routes(drawn, facts, device)
    return TrainBatch(
        micro_batches=(batch,) * case.micro_batches,
        total_sequences=case.step_tokens // case.length,
    )


def step_flops(case: Case, row: Row, facts: ModelFacts, kept_ids: int) -> dict[str, float]:
    """Of the model, forward and backward, for a step's tokens; recomputation is not counted.

        body       6 × (active parameters − embedding and output layer) a token
        attention  3 × 2 × length × heads × head size a token and layer: half of the context for
                   scores and for values
        head       6 × hidden size for each kept id of each sampled token: what is computed
        full head  6 × hidden size × vocabulary for each sampled token: what is not
        reference  a third of body, attention and head, where there is one: forward alone

    An embedding lookup is no GEMM. Softmax, norms and the optimizer are not counted.
    """
    tokens, micro_batches = case.step_tokens, case.micro_batches * case.groups
    sampled = row.segments * row.completion * micro_batches
    trained = {
        "body": 6.0 * body_parameters(facts) * tokens,
        "attention": 6.0 * case.length * facts.attention_width * facts.layers * tokens,
        "head": 6.0 * facts.hidden_size * kept_ids * micro_batches,
    }
    return {
        **trained,
        "reference": sum(trained.values()) / 3 if case.reference else 0.0,
        "full head": 6.0 * facts.hidden_size * facts.vocab_size * sampled,
    }


def memory_used(device: torch.device) -> dict[str, float]:
    """Peaks in GiB. `gpu_gib`: all that the driver has given away on this GPU, context and NCCL
    included; nothing is handed back before it is read, so it is a peak."""
    if device.type != "cuda":
        return {"allocated_gib": 0.0, "reserved_gib": 0.0, "gpu_gib": 0.0}
    room, total = torch.cuda.mem_get_info()
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "gpu_gib": (total - room) / GIB,
    }


@contextmanager
def recomputing(engine: TimedEngine, case: Case) -> Iterator[None]:
    if case.recompute:
        engine.recompute(keep_attention=case.keep_attention)
    try:
        yield
    finally:
        if case.recompute:
            engine._network.model.gradient_checkpointing_disable()


def profiled(engine: TimedEngine, case: Case, batch: TrainBatch, job: Job) -> dict[str, Any]:
    """One more step under torch.profiler: two micro-batches of it, where this rank is alone."""
    if job.ranks == 1:
        batch = replace(batch, micro_batches=batch.micro_batches[:2])
    on_gpu = engine._device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as session:
        seconds, _ = engine.timed(batch)
    result: Any = session.profiler
    events = list(result.kineto_results.events())
    host = [event for event in events if "CPU" in str(event.device_type())]
    device = [event for event in events if "CUDA" in str(event.device_type())]
    counts = Counter(event.name() for event in host)
    name = str(case).replace(", ", "-").replace(" ", "")
    own = own_time(host)
    waited = sum(own.get(wait, (0.0, 0))[0] for wait in WAITS)
    worked = sum(each for each, _ in own.values()) - waited
    busy = covered(device)
    lines = [
        f"{case}: {seconds:.3f} s under the profiler",
        f"GPU busy {busy:.3f} s; host: {worked:.3f} s of work and {waited:.3f} s of waits, "
        "summed over its threads",
    ]
    lines += table("kernels", spent((e.name(), e.duration_ns()) for e in device), seconds)
    lines += table("host, without what is called inside", own, seconds)
    Path(job.rows).with_name(f"profile-{name}.txt").write_text("\n".join(lines) + "\n")
    return {
        "profile": {
            "micro_batches": len(batch.micro_batches),
            "seconds": seconds,
            "gpu_busy": busy / seconds,
            "gpu_seconds": busy,
            "host_seconds": worked,
            "host_wait_seconds": waited,
            "kernels": len(device),
            "launches": sum(n for name, n in counts.items() if "LaunchKernel" in name),
            "waits": {name: counts[name] for name in (*WAITS, "cudaMemcpy", "aten::item")},
        }
    }


def agreed(flag: bool) -> bool:
    """Whether it is so on any rank."""
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
        print(
            {key: row.get(key) for key in ("name", "seconds", "mfu", "failed", "skipped")},
            flush=True,
        )


def release(engine: TimedEngine | None) -> None:
    """Take the weights and the optimizer's state away from an engine, whoever still knows it."""
    if engine is None:
        return
    kept: list[Tensor] = list(engine._network.parameters())
    if engine._reference is not None:
        kept += engine._reference.network.parameters()
    for group in engine._adam.param_groups:
        kept += [*group["params"], *(p.grad for p in group["params"] if p.grad is not None)]
    for state in engine._adam.state.values():
        kept += [value for value in state.values() if isinstance(value, Tensor)]
    optimizer: Any = engine._engine.optimizer
    for value in vars(optimizer).values():
        if isinstance(value, list):
            kept += [item for item in value if isinstance(item, Tensor)]
    for tensor in kept:
        if tensor.is_cuda:
            tensor.untyped_storage().resize_(0)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
