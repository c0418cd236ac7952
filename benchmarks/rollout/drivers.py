"""Runs and times the engines that the benchmark compares: `vllm.LLM` and Keel's engine."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from transformers import AutoConfig

from benchmarks.rollout.model import Size, make_prompts
from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Group, Prompt
from keel.rollout.engine.conversion import render_prompt
from keel.rollout.spec import EngineSpec, GroupRequest

RUN_TIMEOUT_S = 240.0
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Batch sizes for which CUDA graphs are captured. Each one adds to the startup time."""


@dataclass(frozen=True)
class Arm:
    name: str
    keel: bool
    record: bool = False
    """Whether to record sampling masks and routes."""
    recorder: Literal["auto", "packed"] = "auto"
    gpu_only: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Changes to vLLM's engine arguments."""


PACKED = Arm("packed", keel=True, recorder="packed", record=True, gpu_only=True)
ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock", keel=False),
        Arm("keel-plain", keel=True),
        Arm("keel", keel=True, record=True),
        replace(PACKED, name="packed-plain", record=False),
        PACKED,
        replace(
            PACKED, name="packed-head-rounded", changes={"hf_overrides": {"head_dtype": "model"}}
        ),
    )
}


class Driver(Protocol):
    def run(self, prompts: list[Prompt], completion: int) -> list[Group]:
        """Sample completions and return their groups. Stock vLLM returns none."""
        ...

    def on_thread(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the thread that steps the engine, and return its result."""
        ...


class Stock:
    """Drives `vllm.LLM` the way its users would."""

    def __init__(self, arm: Arm, folder: str, size: Size) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415
        from vllm import LLM  # noqa: PLC0415

        args: dict[str, Any] = {"max_num_seqs": size.sequences, **engine_args(arm, folder, size)}
        args |= {"dtype": size.dtype, "max_model_len": context(size)}
        self._llm = LLM(model=folder, **args)
        self._size = size
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def run(self, prompts: list[Prompt], completion: int) -> list[Group]:
        from vllm import SamplingParams  # noqa: PLC0415

        requests = [
            {"prompt_token_ids": render_prompt(self._tokenizer, prompt).token_ids}
            for prompt in prompts
            for _ in range(self._size.group)
        ]
        params = SamplingParams(
            temperature=1.0,
            top_p=self._size.top_p,
            top_k=self._size.top_k,
            max_tokens=completion,
        )
        outputs = self._llm.generate(requests, params, use_tqdm=False)  # type: ignore[arg-type]
        check_lengths({len(output.outputs[0].token_ids) for output in outputs}, completion)
        return []

    def on_thread(self, call: Callable[[], Any]) -> Any:
        return call()


class Keel:
    """Drives an `EngineThread` with a `VllmEngine`, as a rollout worker does."""

    def __init__(self, arm: Arm, folder: str, size: Size) -> None:
        from keel.rollout.engine import vllm_engine  # noqa: PLC0415
        from keel.rollout.engine.thread import EngineThread  # noqa: PLC0415

        built = vllm_engine.engine_args

        def bounded(*args: Any) -> Any:
            return replace(built(*args), **engine_args(arm, folder, size))

        vllm_engine.engine_args = bounded
        self._arm, self._size = arm, size
        self._config = RolloutConfig(
            sampling=sampling(size, size.completion),
            max_num_seqs=size.sequences,
            recorder=arm.recorder,
            timeout_s=RUN_TIMEOUT_S,
        )
        spec = EngineSpec(
            model_path=folder,
            tokenizer=folder,
            config=self._config,
            dtype=size.dtype,  # type: ignore[arg-type]
            max_model_len=context(size),
            seed=0,
            keep_routing=arm.record,
            keep_sampling_mask=arm.record,
        )
        self._engine = EngineThread(lambda: vllm_engine.VllmEngine(spec), self._config)

    def run(self, prompts: list[Prompt], completion: int) -> list[Group]:
        parameters = sampling(self._size, completion)
        futures = [
            self._engine.sample(
                GroupRequest(prompt, self._size.group),
                sampling=parameters,
                record=self._arm.record,
            )
            for prompt in prompts
        ]
        groups = [future.result(timeout=RUN_TIMEOUT_S) for future in futures]
        check_lengths({t.sampled_tokens for g in groups for t in g.trajectories}, completion)
        return groups

    def on_thread(self, call: Callable[[], Any]) -> Any:
        return self._engine._enqueue(lambda _: call()).result(timeout=RUN_TIMEOUT_S)


def check_lengths(lengths: set[int], expected: int) -> None:
    if lengths != {expected}:
        raise RuntimeError(f"completions have {lengths} tokens instead of {expected}")


def context(size: Size) -> int:
    return size.prompt + size.completion + 16


def sampling(size: Size, completion: int) -> SamplingConfig:
    return SamplingConfig(top_p=size.top_p, top_k=size.top_k, max_tokens=completion)


def engine_args(arm: Arm, folder: str, size: Size) -> dict[str, Any]:
    """Return the engine arguments for an arm.

    The KV cache is large enough to avoid preemption and small enough for all arms to share the GPU.
    """
    if not torch.cuda.is_available():
        return {
            "kv_cache_memory_bytes": 2**28,
            "enforce_eager": True,
            "block_size": 32,
            "disable_log_stats": True,
            **arm.changes,
        }
    model = AutoConfig.from_pretrained(folder)
    token = model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_dim * 2
    return {
        "kv_cache_memory_bytes": int(1.2 * token * size.sequences * context(size)) + 2**28,
        "gpu_memory_utilization": 0.04,  # unused, but vLLM checks that it is free
        "cudagraph_capture_sizes": [n for n in GRAPHS if n <= 2 * size.sequences],
        **arm.changes,
    }


def timed_run(driver: Driver, size: Size, salt: str) -> dict[str, Any]:
    """Run one batch and measure its time, from the first request to the last group."""
    prompts = make_prompts(size, salt)
    cpu = driver.on_thread(time.thread_time)
    began = time.perf_counter()
    groups = driver.run(prompts, size.completion)
    seconds = time.perf_counter() - began
    cpu = driver.on_thread(time.thread_time) - cpu
    return {
        "seconds": seconds,
        "tokens_per_second": size.tokens / seconds,
        "ms_per_token_row": 1e3 * seconds / size.completion,
        "thread_ms_per_token_row": 1e3 * cpu / size.completion,
        **({"mean_kept": mean_kept(groups)} if groups else {}),
    }


def mean_kept(groups: Sequence[Group]) -> float:
    """Return the mean number of ids in the recorded sampling masks, or 0 without masks."""
    segments = [s for group in groups for t in group.trajectories for s in t.segments]
    sampled = sum(int(segment.trainable_T.sum()) for segment in segments)
    masks = [s.sampling_mask for s in segments if s.sampling_mask is not None]
    return sum(len(mask.ids) for mask in masks) / sampled
