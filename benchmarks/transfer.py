"""How fast new weights reach the engines: straight from the trainer, and through the object store.

    python -m benchmarks.transfer                       # one GPU shared (CUDA IPC)
    python -m benchmarks.transfer --gpus 2              # a GPU each (NCCL)
    python -m benchmarks.transfer --gpus 4 --engines 3  # three engines
    python -m benchmarks.transfer --experts 256 --width 128  # 12,288 tensors of experts
    python -m benchmarks.transfer --small               # CPUs, seconds: to see that it runs

A real trainer (`keel.trainer.learner.Learner`) brings real vLLM engines to its weights, `--rounds`
times each way in turns. A time is that of the whole update: engines pause, bytes travel and are put
where kernels read, caches are emptied. *loader* is the same with vLLM's loader for every update
(`rollout.copy_weights: false`), in engines of their own; *first* the update that is watched. *wire*
is a channel alone, without trainer or engine: the link's limit, in buckets of the size that an
update uses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.common.batch_shape import SOURCE
from benchmarks.common.models import Mixture
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from keel.model.embedded.tokenizer import build_tokenizer
from keel.model.weight_transfer.buckets import Sent
from keel.model.weight_transfer.channel import Channel, Rendezvous
from keel.rollout.pool.ray_engines import ray_pool
from keel.rollout.spec import EngineSpec
from keel.rollout.weight_loading.manifest import checkpoint_names
from keel.trainer.cluster.nodes import start_ray
from keel.trainer.learner import Learner

GB = 1e9
DEADLINE_S = 300.0
FULL = Mixture()
SMALL = Mixture(hidden=64, layers=2, experts=8, per_token=2, expert=64, vocabulary=2048)


def write_model(folder: Path, config: Qwen3MoeConfig, *, small: bool) -> int:
    """Random weights; returns their number."""
    with torch.device("cpu" if small else "cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if small else torch.bfloat16
        )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class End:
    """One end of a bare channel."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
        if self.device.type == "cpu":
            self.device = torch.device("cpu")
        self.channel = Channel(
            rendezvous, "wire", rank=rank, size=2, device=self.device, deadline_s=DEADLINE_S
        )

    def move(self, size: int, count: int, *, send: bool) -> float:
        """Seconds for `count` buckets of `size` bytes, after one that is not counted."""
        flat = torch.zeros(size, dtype=torch.uint8, device=self.device)
        began = 0.0
        for index in range(count + 1):
            if index == 1:
                self._wait()
                began = time.perf_counter()
            if send:
                self.channel.send(flat)
            else:
                self.channel.receive(Sent(size))
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def wire(options: Mapping[str, Any], size: int, count: int) -> float:
    """GB/s of a bare channel between two processes."""
    host = ray.util.get_node_ip_address()
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, 0, is_master=True, wait_for_workers=False
    )
    remote: Any = ray.remote(End)
    ends = [remote.options(**options).remote((host, store.port), rank) for rank in range(2)]
    refs = [end.move.remote(size, count, send=rank == 0) for rank, end in enumerate(ends)]
    seconds = max(ray.get(refs, timeout=DEADLINE_S))
    for end in ends:
        ray.kill(end)
    return size * count / seconds / GB


def measure(options: argparse.Namespace, folder: Path, report: Callable[[Any], None]) -> None:
    """Calls `report` with what there is, after each part."""
    gpus, small = options.gpus, options.small
    sizes = SMALL if small else FULL
    sizes = replace(
        sizes, experts=options.experts or sizes.experts, expert=options.width or sizes.expert
    )
    parameters = write_model(folder, sizes.config(), small=small)
    build_tokenizer().save_pretrained(folder)
    config = Config(
        model=ModelConfig(path=str(folder), dtype="float32" if small else "bfloat16"),
        data=DataConfig(sources=(SOURCE,), max_prompt_tokens=64),
        algorithm=AlgorithmConfig(),
        rollout=RolloutConfig(
            engines=options.engines,
            sampling=SamplingConfig(top_p=0.95, top_k=64, max_tokens=64),
            gpu_memory_utilization=0.25,
            enforce_eager=True,
            max_num_seqs=8,
        ),
        trainer=TrainerConfig(
            ranks=1, zero_stage=0 if small else 1, publish_bucket_mib=options.bucket_mib
        ),
    )
    each = {} if small else {"num_gpus": 1 if gpus > 1 else 0.5, "num_cpus": 1}
    gigabytes = parameters * (4 if small else 2) / GB
    row: dict[str, Any] = {
        "parameters": parameters,
        "tensors": len(checkpoint_names(str(folder))),
        "gigabytes": gigabytes,
        "gpus": 0 if small else gpus,
        "engines": options.engines,
        "bucket_mib": options.bucket_mib,
        "device": "cpu" if small else torch.cuda.get_device_name(),
    }
    if small or gpus > 1:
        row["wire_gb_s"] = wire(each, options.bucket_mib << 20, 2 if small else 16)
    learner = Learner(str(folder), config, gpu=not small, actor_options=lambda _: each)
    try:
        learner.start()
        for suffix, copies in (("", True), ("_loader", False))[: 1 if options.direct else None]:
            chosen = replace(config, rollout=replace(config.rollout, copy_weights=copies))
            times, row[f"updates{suffix}"] = timed(learner, chosen, each, options)
            if copies:
                row["first_s"] = times["direct"][0]
            for way, (_, *seconds) in times.items():  # the first opens channels and warms up
                middle = statistics.median(seconds)
                row[f"{way}{suffix}_s"] = middle
                row[f"{way}{suffix}_gb_s"] = options.engines * gigabytes / middle
            if "store" in times and copies:
                pairs = zip(times["store"][1:], times["direct"][1:], strict=True)
                row["store_to_direct"] = statistics.median(a / b for a, b in pairs)
            report(row)
    finally:
        learner.shutdown()


def timed(
    learner: Learner, config: Config, each: Mapping[str, Any], options: argparse.Namespace
) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds of every update of new engines, by its way; whether the last ones were copies."""
    pool = ray_pool(
        EngineSpec.of(config, config.model.path),
        gpu=not options.small,
        startup_deadline_s=DEADLINE_S,
        options=lambda _: each,
    )
    ways: dict[str, Callable[[], Any]] = {"direct": partial(lambda: learner.send)}
    if not options.direct:
        ways["store"] = learner.store
    times: dict[str, list[float]] = {way: [] for way in ways}
    try:
        pool.start()
        for _ in range(options.rounds + 1):
            for way, publish in ways.items():
                began = time.perf_counter()
                pool.update(0, publish()).result(timeout=DEADLINE_S)
                times[way].append(time.perf_counter() - began)
        actor = pool._fleet.slots[0].engine.actor  # pyright: ignore[reportAttributeAccessIssue]
        return times, ray.get(actor.__ray_call__.remote(ways_of_workers), timeout=DEADLINE_S)
    finally:
        pool.shutdown()


def ways_of_workers(worker: Any) -> list[str]:
    """How each worker of an engine does its updates; runs in the engine's actor."""
    asked = worker._engine._ask(lambda engine: engine._llm.collective_rpc("keel_way"))
    return asked.result(timeout=DEADLINE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, help="of each layer")
    parser.add_argument("--width", type=int, help="of an expert")
    parser.add_argument("--direct", action="store_true", help="neither object store nor loader")
    parser.add_argument("--small", action="store_true", help="CPUs and a model of 0.3 M parameters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path.cwd()))
    start_ray()

    def report(row: Any) -> None:
        print(json.dumps(row, indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(row))

    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder), report)


if __name__ == "__main__":
    main()
