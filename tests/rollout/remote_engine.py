"""Runs an engine in a separate process."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.turns import TurnRequest
from keel.rl.types import Group, Prompt
from keel.rollout.engine.worker import EngineThread
from keel.rollout.recording.base import core_of
from keel.rollout.spec import EngineSpec, GroupRequest, env_vars
from keel.weights.channel import Bucket, Checksum, SharedMemory
from tests.buckets import pack_buckets, pack_flat
from tests.forked import forked_from
from tests.rl.rollouts import with_segments
from tests.waiting import PATIENCE_S, wait_for

DEADLINE_S = 600
Kind = Literal["", "fast"]
Item = tuple[Prompt, int, SamplingConfig | None, bool] | TurnRequest
"""A prompt or a turn to sample. A prompt comes with its group size, its sampling parameters (None
means the engine's) and whether to record it."""
TRUNCATED = SamplingConfig(temperature=0.8, top_p=0.9, top_k=12, max_tokens=40)
OPEN = SamplingConfig(temperature=1.3, max_tokens=24)


def engine_spec(folder: Path, **changes: Any) -> EngineSpec:
    """Return an engine spec with prefill chunks of 48 tokens and a KV cache that a few sequences
    fill up."""
    config = {
        "sampling": TRUNCATED,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "kv_cache_gib": 20 * 64 / 2**20,  # 20 blocks of 32 tokens, 2 KiB a token
        "timeout_s": DEADLINE_S,
        **changes,
    }
    return EngineSpec(
        model_path=str(folder),
        tokenizer=str(folder),
        config=RolloutConfig(**config),
        dtype="float32",
        max_model_len=256,
        seed=3,
        keep_routing=True,
        keep_sampling_mask=True,
    )


def prompts(count: int, *, shared: int, own: int, tag: str = "p") -> list[Prompt]:
    common = ("The quick brown fox jumps over the lazy dog. " * 9)[:shared]
    return [
        Prompt(
            prompt_id=f"{tag}{i}",
            domain="test",
            messages=({"role": "user", "content": common + (f"{tag}{i}:" + "ab cd" * own)[:own]},),
        )
        for i in range(count)
    ]


@dataclass
class Watch:
    """Counts of events, so that a test of preemption can check that preemptions really happened."""

    preempted: int = 0
    cached_tokens: int = 0
    discarded: int = 0
    """Number of tokens that were sampled in unfinished prefills. vLLM discards them."""
    steps: int = 0
    pause_at: int = 0
    """Number of the step after which the engine waits for a command."""
    fast_steps: int = 0
    """Number of steps by `keel.rollout.vllm_fast.scheduler` since the engine started."""
    reused_steps: int = 0
    """Number of steps by `keel.rollout.vllm_fast.install` since the engine started."""


# These run inside the engine process.

_ENGINE: Any = None
_WATCH = Watch()


def _start(
    spec: EngineSpec,
    blocks: int | None,
    kind: Kind,
    amx: bool | None,
    environment: Mapping[str, str],
) -> None:
    global _ENGINE
    os.environ.update(environment)  # a forked process inherits its server's
    if amx is not None:
        torch.cpu._is_amx_tile_supported = lambda: amx
    # Keeps vLLM out of the pytest process.
    from keel.rollout.engine import vllm_engine  # noqa: PLC0415
    from keel.rollout.vllm_fast.scheduler import _FastPath  # noqa: PLC0415

    class Watched(vllm_engine.VllmEngine):
        def __init__(self, spec: EngineSpec) -> None:
            super().__init__(spec)
            scheduler = core_of(self._llm).scheduler
            preempt, step = scheduler._preempt_request, self._llm.step
            worker = getattr(self._llm.model_executor, "driver_worker", None)  # if in this process

            def counted_preempt(*args: Any, **kwargs: Any) -> None:
                _WATCH.preempted += 1
                preempt(*args, **kwargs)

            def counted_step() -> Any:
                outputs = step()
                _WATCH.steps += 1
                _WATCH.fast_steps = getattr(scheduler, "fast_steps", 0)
                if worker is not None:
                    steps = worker.worker.model_runner.execute_model.__self__
                    _WATCH.reused_steps = getattr(steps, "reused", 0)
                _WATCH.cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
                lagging = (r.num_computed_tokens < r.num_tokens - 1 for r in scheduler.running)
                _WATCH.discarded += sum(lagging)
                if _WATCH.steps == _WATCH.pause_at:  # otherwise sampling could finish first
                    wait_for(lambda: not _ENGINE._commands.empty(), "the next command")
                return outputs

            scheduler._preempt_request, self._llm.step = counted_preempt, counted_step

    make_args = vllm_engine.engine_args

    def changed_args(*args: Any) -> Any:
        changed = make_args(*args)
        changed.num_gpu_blocks_override = blocks
        if kind == "fast":
            changed.scheduler_cls = _FastPath
        return changed

    vllm_engine.engine_args = changed_args
    _ENGINE = EngineThread(lambda: Watched(spec), spec.config)


def update_kind(worker: Any) -> str:
    if worker.keel_plan is not None:
        return "copies"
    return worker.keel_tracer.refusal if worker.keel_tracer is not None else ""


def _on_engine(function: Callable[[Any], Any]) -> Any:
    return _ENGINE._enqueue(function).result(timeout=DEADLINE_S)


def _submit(items: Sequence[Item]) -> list[Future[Any]]:
    return [
        _ENGINE.sample(item, sampling=_ENGINE._config.sampling, record=True)
        if isinstance(item, TurnRequest)
        else _ENGINE.sample(
            GroupRequest(*item[:2]), sampling=item[2] or _ENGINE._config.sampling, record=item[3]
        )
        for item in items
    ]


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of the jobs. The recordings of groups are loaded."""
    results = [future.result(timeout=DEADLINE_S).result() for future in futures]
    return [
        with_segments(each, lambda segment: segment.loaded({})) if isinstance(each, Group) else each
        for each in results
    ]


def _fingerprint(worker: Any) -> dict[str, str]:
    return {
        name: blake2b(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        ).hexdigest()
        for name, tensor in worker.model_runner.get_model().named_parameters()
    }


def _shut_down_workers() -> None:
    _on_engine(lambda engine: engine._llm.model_executor.shutdown())


def _expire(_: Any) -> None:
    for flight in _ENGINE._in_flight.values():
        flight.deadline = 0.0


class _Host:
    """The methods that `RemoteEngine` calls."""

    @staticmethod
    def sample_items(items: Sequence[Item]) -> list[Any]:
        return _results(_submit(items))

    @staticmethod
    def cancel(prompts: Sequence[Prompt], group_size: int) -> int:
        items: list[Item] = [(prompt, group_size, None, True) for prompt in prompts]
        return sum(future.cancel() for future in _submit(items))

    @staticmethod
    def load(version: int, buckets: Sequence[Any], checksum: int | None = None) -> None:
        _ENGINE.begin_update()
        for bucket in buckets:
            _ENGINE.load_bucket(bucket)
        _ENGINE.finish_update(version, checksum)

    @staticmethod
    def updates() -> list[str]:
        """Return "copies" for each worker that updates with a copy plan, and otherwise the reason
        for using vLLM's loader, or "" before the first update."""
        return _on_engine(lambda engine: engine._llm.collective_rpc(update_kind))

    @staticmethod
    def on_workers(function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with each of vLLM's workers. Returns the results by rank."""
        return _on_engine(lambda engine: engine._llm.collective_rpc(function))

    @staticmethod
    def fingerprint() -> dict[str, str]:
        return _on_engine(lambda engine: engine._llm.collective_rpc(_fingerprint)[0])

    @staticmethod
    def interrupt(
        items: Sequence[Item], version: int, buckets: Sequence[Any], cut: bool
    ) -> list[Any]:
        """Run 20 steps and then let the deadlines expire (`cut`), update the weights, or both."""
        _WATCH.pause_at = _WATCH.steps + 20
        futures = _submit(items)
        wait_for(lambda: _WATCH.steps >= _WATCH.pause_at, "20 steps")
        if buckets:
            _ENGINE.begin_update()
        if cut:
            _on_engine(_expire)
        if buckets:
            for bucket in buckets:
                _ENGINE.load_bucket(bucket)
            _ENGINE.finish_update(version)
        return _results(futures)

    @staticmethod
    def blocks() -> int:
        pool = _on_engine(lambda e: core_of(e._llm).scheduler.kv_cache_manager.block_pool)
        return pool.num_gpu_blocks

    @staticmethod
    def sleep() -> None:
        _ENGINE.sleep()

    @staticmethod
    def version() -> int:
        return _on_engine(lambda engine: engine.version)

    @staticmethod
    def pending() -> int:
        """Return the number of requests and recordings in the engine."""
        return _on_engine(lambda e: len(_ENGINE._in_flight) + len(e._recorder._options))

    @staticmethod
    def watch() -> Watch:
        """Return the events that were counted since the last call."""
        global _WATCH
        watch = _WATCH
        _WATCH = Watch(fast_steps=watch.fast_steps, reused_steps=watch.reused_steps)
        return watch


def _call(name: str, *args: Any, **named: Any) -> Any:
    return getattr(_Host, name)(*args, **named)


# These run inside the test process.


@dataclass(frozen=True)
class RemoteEngine:
    """Controls an engine in another process. Has the methods of `_Host`, too."""

    process: ProcessPoolExecutor
    sleeps: bool
    """True if the engine can sleep. On GPUs, tests/gpu tests sleep instead."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.process.submit(_call, name, *args, **named).result(
            timeout=DEADLINE_S
        )

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int = 1,
        sampling: SamplingConfig | None = None,
        record: bool = True,
    ) -> list[Group]:
        return self.sample_items([(prompt, group_size, sampling, record) for prompt in prompts])

    def update(self, version: int, tensors: dict[str, torch.Tensor], bucket: int = 40_000) -> None:
        self.load(version, list(pack_buckets(tensors.items(), bucket)))

    def update_in_place(
        self, version: int, tensors: dict[str, torch.Tensor], bucket: int = 40_000
    ) -> None:
        on_gpu = ((name, tensor.cuda()) for name, tensor in tensors.items())
        checksum, flat_buckets = Checksum(), list(pack_flat(on_gpu, bucket))
        for _, flat in flat_buckets:
            checksum.add(flat)
        memories = [SharedMemory() for _ in flat_buckets]
        buckets = [
            Bucket(entries=entries, data=memory.write(flat))
            for memory, (entries, flat) in zip(memories, flat_buckets, strict=True)
        ]
        self.load(version, buckets, checksum.value())

    def sample_interrupted(
        self,
        items: Sequence[Item],
        version: int = 0,
        tensors: dict[str, torch.Tensor] | None = None,
        *,
        cut: bool = False,
    ) -> list[Any]:
        """Sample, and in the middle update to `tensors`. If `cut` is set, all deadlines expire in
        the middle as well."""
        buckets = list(pack_buckets((tensors or {}).items(), 40_000))
        return self.interrupt(items, version, buckets, cut)


CPU_ENVIRONMENT = env_vars(RolloutConfig(), gpu=False)


@contextmanager
def vllm_process(
    environment: Mapping[str, str] = CPU_ENVIRONMENT, *, forked: bool = True
) -> Iterator[ProcessPoolExecutor]:
    """Start a process with these environment variables, forked from one that has loaded vLLM."""
    saved = dict(os.environ)
    os.environ.update(environment)  # torch and vLLM read it on import
    context = forked_from("tests.rollout.preloaded") if forked else get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
        started = process.submit(os.getpid)
        os.environ.clear()
        os.environ.update(saved)
        started.result(timeout=DEADLINE_S)
        yield process


@contextmanager
def running_engine(
    spec: EngineSpec,
    *,
    gpu: bool,
    blocks: int | None = None,
    variables: Mapping[str, str] | None = None,
    kind: Kind = "",
    amx: bool | None = None,
) -> Iterator[RemoteEngine]:
    """Run an engine in a separate process. `blocks` is the size of the KV cache on a GPU.
    `variables` are added to the environment. If `kind` is "fast", the V1 recorder runs with the
    packed recorder's scheduler. `amx` overrides vLLM's AMX detection."""
    environment = env_vars(spec.config, gpu=gpu) | dict(variables or {})
    # Forking from a process with the imports saves seconds for each engine.
    with vllm_process(environment, forked=not (gpu or variables)) as process:
        started = process.submit(_start, spec, blocks, kind, amx, environment)
        started.result(timeout=DEADLINE_S)
        try:
            yield RemoteEngine(process, spec.config.time_share or not gpu)
        finally:
            if spec.config.tensor_parallel > 1:  # the process waits for its workers when it exits
                process.submit(_shut_down_workers).result(timeout=PATIENCE_S)
            if gpu:  # vLLM's exit handler can hang when it destroys the process group
                for each in list(process._processes.values()):
                    each.kill()
