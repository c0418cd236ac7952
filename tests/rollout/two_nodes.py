"""Runs an engine on two Ray nodes of one GPU each, all on this machine.

Without GPUs, the nodes only say that they have one, and vLLM's workers compute on the CPU. Nothing
is recorded there, because `V1Recorder` needs vLLM in its own process.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from keel.configs.schema import Config, DataConfig
from keel.model import ray_timeouts
from keel.rl.futures import on_thread
from keel.rl.types import Group, Prompt
from keel.rollout.engine import worker
from keel.rollout.engine.worker import RayEngine, RolloutWorker
from keel.rollout.pool import RolloutPool
from keel.rollout.recording.base import Recorder, RecordingOptions
from keel.rollout.spec import EngineSpec, env_vars
from keel.trainer.placement.hardware import ENGINE
from keel.trainer.placement.nodes import QUOTED_PYTHON, reserve_gpus
from keel.trainer.placement.ray_internals import skip_unused_processes
from keel.weights.sender import Sender
from keel.weights.sync import Transfer
from tests.buckets import pack_buckets, pack_flat
from tests.trainer.placement.shapes import SOURCE
from tests.waiting import PATIENCE_S, patiently

GPU = torch.cuda.is_available()
BUCKET_BYTES = 40_000
ROOT = Path(__file__).parents[2]


class _NoRecorder(Recorder):
    def attach(self, engine: Any) -> None: ...

    def sampling_args(self, sampling: Any, options: Any) -> dict[str, Any]:
        return {"logprobs": 0}

    def expect(self, request_id: str, options: RecordingOptions) -> None:
        super().expect(request_id, RecordingOptions(routes=False, sampling_mask=False))

    def _logprobs(self, request_id: str, output: Any) -> Any:
        rows = zip(output.token_ids, output.logprobs, strict=True)
        return np.array([row[token].logprob for token, row in rows], np.float32)

    def _sampling_masks(self, request_id: str, output: Any) -> Any: ...

    def _routes(self, request_id: str, output: Any, first: int, last: int) -> Any: ...


def prepare_process() -> None:
    """Let Ray's executor run on vLLM's CPU platform, in the processes of an engine."""
    if "engine" in os.environ.get(ray_timeouts.NAME, ""):
        from vllm.model_executor.layers import vocab_parallel_embedding  # noqa: PLC0415
        from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

        from keel.rollout.engine import shims  # noqa: PLC0415

        CpuPlatform.ray_device_key = "GPU"
        # Compiled for CPUs without AVX-512, it returns wrong indices.
        masked: Any = vocab_parallel_embedding.get_masked_input_and_mask
        vocab_parallel_embedding.get_masked_input_and_mask = masked._torchdynamo_orig_callable
        shims.install()


def _place(worker: Any) -> tuple[str, int]:
    return ray.get_runtime_context().get_node_id(), os.getpid()


class _Worker(RolloutWorker):
    def __init__(self, spec: EngineSpec) -> None:
        from keel.rollout.engine import vllm_engine  # noqa: PLC0415

        assert spec.spread
        make_args = vllm_engine.engine_args

        def changed_args(spec: EngineSpec, *rest: Any) -> Any:
            if GPU:
                args = make_args(spec, *rest)
                # It asks whether the GPUs of a node, here one, reach each other.
                args.disable_custom_all_reduce = True
                return args
            config = replace(spec.config, tensor_parallel=1)
            args = make_args(replace(spec, config=config), *rest)
            args.tensor_parallel_size, args.distributed_executor_backend = 2, "ray"
            return args

        vllm_engine.engine_args = changed_args
        vllm_engine._RECORDERS = {**vllm_engine._RECORDERS, "v1": _NoRecorder}
        super().__init__(spec)

    async def workers(self) -> list[tuple[str, int]]:
        return self._engine._enqueue(lambda engine: engine._llm.collective_rpc(_place)).result()


@contextmanager
def engine_on_two_nodes(
    spec: EngineSpec, variables: Mapping[str, str] | None = None
) -> Iterator[RolloutPool]:
    """Start an engine with one GPU on each of two nodes. `variables` are added to the environment
    of its processes."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # the hook needs it
    cpu = {
        "worker_process_setup_hook": f"{__name__}.prepare_process",
        "env_vars": {"PYTHONPATH": path},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray uses it to count GPUs
        patch.setattr(worker, "RolloutWorker", _Worker)
        patch.setattr(worker, "env_vars", lambda config, **options: env_vars(config, gpu=GPU))
        cluster = Cluster()
        with skip_unused_processes():
            for gpu in "01":
                own = {**(variables or {}), "CUDA_VISIBLE_DEVICES": gpu}
                options = {"num_cpus": 4, "num_gpus": 1, "env_vars": own}
                patiently(partial(cluster.add_node, include_dashboard=False, **options))
        cluster.wait_for_nodes(PATIENCE_S)
        try:
            ray.init(
                cluster.address,
                runtime_env={**QUOTED_PYTHON, **({} if GPU else cpu)},
                log_to_driver=False,
            )
            config = Config(data=DataConfig(sources=(SOURCE,)), rollout=spec.config)
            with reserve_gpus(config, timeout_s=PATIENCE_S, only=ENGINE) as reservation:
                options = partial(reservation.options, ENGINE)
                pool = RolloutPool(
                    spec.config,
                    partial(RayEngine, spec, gpu=True, options=options),
                    startup_timeout_s=2 * PATIENCE_S,
                )
                try:
                    pool.start()
                    yield pool
                finally:
                    pool.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()


def sample(pool: RolloutPool, prompts: Sequence[Prompt], spec: EngineSpec) -> list[Group]:
    sampling = spec.config.sampling
    futures = [pool.submit(p, group_size=2, sampling=sampling, purpose="train") for p in prompts]
    return [future.result(timeout=2 * PATIENCE_S) for future in futures]


def workers(pool: RolloutPool) -> list[tuple[str, int]]:
    """Return the node and process of each of vLLM's workers, by rank."""
    actor = pool.slots[0].engine.actor
    return ray.get(actor.workers.remote(), timeout=PATIENCE_S)


def through_store(version: int, tensors: Mapping[str, torch.Tensor]) -> Transfer:
    buckets = [ray.put(bucket) for bucket in pack_buckets(tensors.items(), BUCKET_BYTES)]
    return lambda engines: {
        index: actor.update_from_store.remote(version, buckets).future()
        for index, actor in engines.items()
    }


def directly(sender: Sender, version: int, tensors: Mapping[str, torch.Tensor]) -> Transfer:
    """Send weights as a trainer rank does."""

    def transfer(engines: Mapping[int, Any]) -> dict[int, Future[Any]]:
        buckets = pack_flat(tensors.items(), BUCKET_BYTES)
        return {0: on_thread(lambda: sender.send(buckets, engines, version)[0], "sender")}

    return transfer
