"""Time to transfer new weights from the trainer to the engine.

    python -m benchmarks.transfer              # one shared GPU (CUDA IPC)
    python -m benchmarks.transfer --gpus 2     # one GPU each (NCCL)
    python -m benchmarks.transfer --small      # smoke test on CPUs

A real trainer (`keel.trainer.learner.Learner`) updates a vLLM engine `--rounds` times. The time
covers the whole update: the engine pauses, the bytes are sent and written in place, and caches are
cleared. *first* is the first update, which records the destination of each tensor.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import MIXTURE, SMALL_MIXTURE, arguments
from benchmarks.peers.shape import write_model
from benchmarks.synthetic import SOURCE
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from keel.model.load import readable_tensors
from keel.rollout.engine.worker import RayEngine
from keel.rollout.pool import RolloutPool
from keel.rollout.spec import EngineSpec
from keel.trainer.learner import Learner
from keel.trainer.placement.nodes import start_ray
from keel.weights.sync import WeightSync

GB = 1e9
TIMEOUT_S = 300.0
BUCKET_MIB = 256


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure all updates and print the results."""
    gpus, small = options.gpus, options.small
    shape = SMALL_MIXTURE if small else MIXTURE
    parameters = write_model(folder, shape, seed=0, sharpness=1.0)
    config = Config(
        model=ModelConfig(path=str(folder), dtype="float32" if small else "bfloat16"),
        data=DataConfig(sources=(SOURCE,), max_prompt_tokens=64),
        algorithm=AlgorithmConfig(),
        rollout=RolloutConfig(
            engines=1,
            weight_transfer="direct",
            sampling=SamplingConfig(top_p=0.95, top_k=64, max_tokens=64),
            gpu_memory_utilization=0.25,
            enforce_eager=True,
            max_num_seqs=8,
        ),
        trainer=TrainerConfig(ranks=1, zero_stage=0 if small else 1, publish_bucket_mib=BUCKET_MIB),
    )
    each = {} if small else {"num_gpus": 1 if gpus > 1 else 0.5, "num_cpus": 1}
    gigabytes = parameters * (4 if small else 2) / GB
    row: dict[str, Any] = {
        "tensors": len(readable_tensors(str(folder), "np")),
        "gigabytes": gigabytes,
        "device": "cpu" if small else torch.cuda.get_device_name(),
    }
    learner = Learner(str(folder), config, gpu=not small, actor_options=lambda _: each)
    try:
        learner.start()
        row["first_s"], *times = timed(learner, config, each, options)
        row["seconds"] = middle = statistics.median(times)
        row["gb_s"] = gigabytes / middle
        print(json.dumps(row, indent=1), flush=True)
    finally:
        learner.shutdown()


def timed(
    learner: Learner, config: Config, each: Mapping[str, Any], options: argparse.Namespace
) -> list[float]:
    """Return the seconds of each update of a new engine."""
    spec = EngineSpec.of(config, config.model.path)
    build = partial(RayEngine, spec, gpu=not options.small, options=lambda _: each)
    pool = RolloutPool(config.rollout, build, startup_timeout_s=TIMEOUT_S)
    times: list[float] = []
    try:
        pool.start()
        for _ in range(options.rounds + 1):
            began = time.perf_counter()
            WeightSync(learner, pool).push(0).result(timeout=TIMEOUT_S)
            times.append(time.perf_counter() - began)
        return times
    finally:
        pool.shutdown()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="use CPUs and a tiny model")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path.cwd()))
    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
