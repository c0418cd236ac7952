"""Memory that a batch takes on the driver's node.

    python -m benchmarks.driver_memory --groups 4 8 16 32

On two Ray nodes of this machine, stand-ins for an engine and two ranks run on one node and the
driver on the other. The driver samples a batch of groups of 8 and takes a step on it. Trajectories
have 1,000 prompt and 16,000 sampled tokens, the routes of a model with 58 MoE layers (8 of 256
experts per token), sampling masks of 8 ids, and 8 characters of text per token. Memory is the
largest private memory of the driver plus the pages of its node's object store, less both before the
batch. Each batch size runs in a separate process.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster

from benchmarks.common import arguments
from benchmarks.synthetic import SOURCE
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    RolloutConfig,
    TrainerConfig,
)
from keel.rl.recordings import Recordings, SamplingMasks, StoredRecordings
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory
from keel.rollout.engine import worker
from keel.rollout.engine.worker import RolloutWorker, detach
from keel.rollout.spec import GroupRequest
from keel.trainer import learner
from keel.trainer.learner import StepReport, TrainerWorker

GROUP, PROMPT, SAMPLED, KEPT = 8, 1_000, 16_000, 8
LAYERS, EXPERTS, TOP_K = 58, 256, 8
TARGET = 4_096
TIMEOUT_S = 500.0


class Sampler(RolloutWorker):
    """Stands for an engine."""

    def __init__(self, spec: Any) -> None:
        self._random = np.random.default_rng(0)

    async def sample(self, request: Any, sampling: Any, record: bool) -> list[Any]:
        trajectories = tuple(self._trajectory(number) for number in range(GROUP))
        return detach(request, Group(prompt=request.prompt, trajectories=trajectories))

    def _trajectory(self, sibling: int) -> Trajectory:
        random, tokens = self._random, PROMPT + SAMPLED
        trainable = np.arange(tokens) >= PROMPT
        recordings = Recordings(
            routes_TLK=random.integers(EXPERTS, size=(tokens - 1, LAYERS, TOP_K), dtype=np.int16),
            sampling_mask=SamplingMasks(
                ids=random.integers(129_280, size=KEPT * SAMPLED, dtype=np.int32),
                offsets=KEPT * np.arange(SAMPLED + 1),
            ),
        )
        stored = StoredRecordings.of(recordings, PROMPT)
        text = random.integers(97, 123, 4 * SAMPLED, np.uint8).tobytes().decode()
        segment = Segment(
            prompt_id="p",
            token_ids_T=random.integers(129_280, size=tokens, dtype=np.int32),
            trainable_T=trainable,
            logp_old_T=np.where(trainable, -random.random(tokens), 0).astype(np.float32),
            version_T=np.where(trainable, 3, -1).astype(np.int32),
            stored=StoredRecordings.concat([(PROMPT, stored)], tokens),
        )
        return Trajectory(
            prompt_id="p",
            sibling=sibling,
            segments=(segment,),
            finish_reason="stop",
            messages=({"role": "assistant", "content": text, "raw": text[1:]},),
        )


class Rank(TrainerWorker):
    """Stands for a trainer rank, which only packs."""

    def prepare(self) -> None: ...

    def step(self) -> StepReport:
        self._packed = []
        return StepReport(version=1, metrics={})


def store_bytes(cluster: Cluster) -> int:
    """Return the size of the pages that the head node's object store has ever used."""
    head: Any = cluster.head_node
    raylet = head.all_processes["raylet"][0].process.pid
    for file in Path(f"/proc/{raylet}/fd").iterdir():
        if "/plasma" in os.readlink(file) and (blocks := file.stat().st_blocks):
            return 512 * blocks
    raise OSError("no object store")


class Peak:
    """Samples the private memory of this process, in bytes, every 50 ms."""

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        process = psutil.Process()
        while True:
            self.bytes = max(self.bytes, process.memory_full_info().uss)
            time.sleep(0.05)


def measure(groups: int) -> dict[str, float]:
    """Sample and train on a batch. Returns GB of memory on the driver's node."""
    sizes: dict[str, Any] = {"object_store_memory": 5 << 30, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    cluster.add_node(**sizes, resources={"gpus": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    learner.TrainerWorker = Rank  # type: ignore[misc]
    worker.RolloutWorker = Sampler  # type: ignore[misc]
    place = {"num_cpus": 0, "resources": {"gpus": 0.1}}
    spec: Any = SimpleNamespace(config=RolloutConfig(), batch_invariant=False)
    engine = worker.RayEngine(spec, 0, gpu=False, options=lambda _: place)
    config = Config(
        data=DataConfig(sources=(SOURCE,)),
        rollout=RolloutConfig(engines=1),
        algorithm=AlgorithmConfig(prompts_per_step=groups, group_size=GROUP),
        trainer=TrainerConfig(ranks=2, micro_batch_tokens=PROMPT + SAMPLED),
    )
    ranks = learner.Learner("", config, gpu=False, actor_options=lambda _: place)
    peak = Peak()
    time.sleep(1.0)
    before, store = peak.bytes, store_bytes(cluster)
    batch: list[ScoredGroup] = []
    for number in range(groups):
        prompt = Prompt(prompt_id=f"p{number}", domain="d", messages=({"role": "user"},))
        future = engine.sample(
            GroupRequest(prompt, GROUP), sampling=config.rollout.sampling, record=True
        )
        rewards = np.arange(GROUP, dtype=np.float32)
        batch.append(
            ScoredGroup(
                group=future.result(TIMEOUT_S),
                rewards_G=rewards,
                parts_G=({},) * GROUP,
                advantages_G=rewards - rewards.mean(),
            )
        )
    ranks.step(batch)
    time.sleep(0.2)
    return {
        "trajectories": groups * GROUP,
        "private_gb": (peak.bytes - before) / 1e9,
        "store_gb": (store_bytes(cluster) - store) / 1e9,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--one", action="store_true", help="measure in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.groups[0])), flush=True)
        os._exit(0)  # Ray's nodes end with it
    rows: list[dict[str, float]] = []
    for groups in options.groups:
        command = [sys.executable, "-m", __spec__.name, "--one", "--groups", str(groups)]
        rows.append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
        print(rows[-1], flush=True)
    counts = [row["trajectories"] for row in rows]
    for name in ("private_gb", "store_gb"):
        slope, start = np.polyfit(counts, [row[name] for row in rows], 1)
        total = start + slope * TARGET
        print(f"{name}: {start:.3f} + {1e3 * slope:.3f} MB per trajectory, {total:.2f} at {TARGET}")


if __name__ == "__main__":
    main()
