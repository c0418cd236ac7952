"""Engines of Keel and of plain vLLM, each in its own process, which take turns on one GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.common import worker_process
from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Group, Prompt
from keel.rollout.chat.render import render_prompt
from keel.rollout.spec import EngineSpec, GroupRequest, env_vars

STOCK = "stock"
"""Arm of plain vLLM."""
START_S, RUN_S = 300.0, 240.0
CACHE_BYTES = 2**33
"""Size of a KV cache that avoids preemption and lets the engines of all arms share a GPU."""


@dataclass(frozen=True)
class Batch:
    """Completions that are sampled together."""

    name: str
    texts: Sequence[str]
    """User message of each prompt."""
    sampling: SamplingConfig
    group: int = 1
    """Number of completions per prompt."""

    @property
    def prompts(self) -> list[Prompt]:
        return [
            Prompt(
                prompt_id=f"{self.name}-{index}",
                domain="benchmark",
                messages=({"role": "user", "content": text},),
            )
            for index, text in enumerate(self.texts)
        ]


def engine_spec(
    folder: str,
    sampling: SamplingConfig,
    *,
    sequences: int,
    context: int,
    record: bool = True,
    **knobs: Any,
) -> EngineSpec:
    """Describe an arm's engine for the model in `folder`.

    sequences: largest number at a time. context: largest number of tokens in a prompt and its
    completion. record: whether to record sampling masks and routes. knobs: more knobs of `rollout`.
    """
    config = RolloutConfig(
        sampling=sampling,
        max_num_seqs=sequences,
        gpu_memory_utilization=0.04,  # unused, but vLLM checks that it is free
        threads=2,
        timeout_s=RUN_S,
        **knobs,
    )
    return EngineSpec(
        model_path=folder,
        tokenizer=folder,
        config=config,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=context,
        seed=0,
        keep_routing=record,
        keep_sampling_mask=record,
        cache_bytes=CACHE_BYTES,
    )


class Stock:
    """Drives `vllm.LLM` the way its users would."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM  # noqa: PLC0415

        args: dict[str, Any] = {
            "kv_cache_memory_bytes": spec.cache_bytes,
            "gpu_memory_utilization": spec.config.gpu_memory_utilization,
        }
        if not torch.cuda.is_available():
            args = {"kv_cache_memory_bytes": 2**28, "enforce_eager": True, "block_size": 32}
        self._llm = LLM(
            model=spec.model_path,
            dtype=spec.dtype,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.config.max_num_seqs,
            **args,
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(spec.tokenizer)

    def run(self, batch: Batch) -> tuple[int, list[Group]]:
        """Sample a batch and return its number of tokens; plain vLLM has no groups."""
        from vllm import SamplingParams  # noqa: PLC0415

        requests: list[Any] = [
            {"prompt_token_ids": render_prompt(self._tokenizer, prompt)[0]}
            for prompt in batch.prompts
            for _ in range(batch.group)
        ]
        sampling = batch.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        )
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs), []

    def thread_s(self) -> float:
        """Return the CPU seconds of the thread that steps the engine."""
        return time.thread_time()


class Keel:
    """Drives an `EngineThread` with a `VllmEngine`, as a rollout worker does."""

    def __init__(self, spec: EngineSpec) -> None:
        from keel.rollout.engine.vllm_engine import VllmEngine  # noqa: PLC0415
        from keel.rollout.engine.worker import EngineThread  # noqa: PLC0415

        self._record, self._timeout_s = spec.keep_sampling_mask, spec.config.timeout_s
        self._engine = EngineThread(lambda: VllmEngine(spec), spec.config)

    def run(self, batch: Batch) -> tuple[int, list[Group]]:
        sampling, record = batch.sampling, self._record
        requests = [GroupRequest(prompt, batch.group) for prompt in batch.prompts]
        futures = [self._engine.sample(r, sampling=sampling, record=record) for r in requests]
        groups: Any = [future.result(timeout=self._timeout_s).result() for future in futures]
        return sum(t.sampled_tokens for group in groups for t in group.trajectories), groups

    def thread_s(self) -> float:
        return self._engine._enqueue(lambda _: time.thread_time()).result(timeout=RUN_S)

    def close(self) -> None:
        self._engine.close()


_driver: Stock | Keel
"""Engine of an arm's process."""


def start(name: str, spec: EngineSpec, warm: Sequence[Batch]) -> float:
    """Start an arm's engine in this process, and return the seconds it took."""
    global _driver
    began = time.perf_counter()
    _driver = (Stock if name == STOCK else Keel)(spec)
    for batch in warm:
        _driver.run(batch)
    return time.perf_counter() - began


def timed_run(batch: Batch) -> dict[str, float]:
    """Run one batch and measure its time, from the first request to the last group."""
    cpu = _driver.thread_s()
    began = time.perf_counter()
    tokens, groups = _driver.run(batch)
    seconds = time.perf_counter() - began
    cpu = _driver.thread_s() - cpu
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "thread_ms_per_token_row": 1e3 * cpu / batch.sampling.max_tokens,
        **({"mean_kept": mean_kept(groups)} if groups else {}),
    }


def mean_kept(groups: Sequence[Group]) -> float:
    """Return the mean number of ids in the recorded sampling masks, or 0 without masks."""
    segments = [s for group in groups for t in group.trajectories for s in t.segments]
    sampled = sum(int(segment.trainable_T.sum()) for segment in segments)
    sizes = [s.mask_sizes_T for s in segments if s.mask_sizes_T is not None]
    return sum(int(each.sum()) for each in sizes) / sampled


class Engines:
    """Engines of all arms, each in its own process."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        """Errors by arm. The other arms continue."""
        self._processes: dict[str, ProcessPoolExecutor] = {}

    @staticmethod
    @contextmanager
    def started(
        specs: Mapping[str, EngineSpec], warm: Sequence[Batch], out: Path
    ) -> Iterator[Engines]:
        """Start all arms and wait until they have sampled the batches `warm`, which compile kernels
        and allocate memory. Their logs are written to `out`."""
        engines, starting = Engines(), dict[str, Future[float]]()
        with ExitStack() as stack:
            for name, spec in specs.items():
                variables = env_vars(spec.config, gpu=torch.cuda.is_available())
                variables["HF_HUB_OFFLINE"] = "1"
                if name == STOCK:  # plain vLLM keeps its sampler and its process
                    del variables["VLLM_USE_FLASHINFER_SAMPLER"]
                    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
                process = stack.enter_context(worker_process(variables, out / f"log_{name}.txt"))
                engines._processes[name] = process
                starting[name] = process.submit(start, name, spec, warm)
            for name, future in starting.items():
                if (seconds := engines._answer(name, future, START_S)) is not None:
                    print(f"  {name}: ready after {seconds:.0f} s", flush=True)
            yield engines

    def take_turns(
        self, batch: Batch, *, backwards: bool = False
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Let one arm after the other sample a batch; yield its name and measurements."""
        names = list(self._processes)
        for name in reversed(names) if backwards else names:
            future = self._processes[name].submit(timed_run, batch)
            if (row := self._answer(name, future, RUN_S)) is not None:
                yield name, row

    def _answer(self, name: str, future: Future[Any], timeout_s: float) -> Any:
        try:
            return future.result(timeout=timeout_s)
        except Exception as error:
            self.fail(name, f"{type(error).__name__}: {error}")

    def fail(self, name: str, error: str) -> None:
        """Leave an arm out of all further turns. Raises SystemExit if no arm is left."""
        print(f"  {name}: {error}", flush=True)
        self.failed[name] = error
        del self._processes[name]
        if not self._processes:
            raise SystemExit("all arms have failed")
