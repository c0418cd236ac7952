"""The ways to sample that `benchmarks/rollout/__main__.py` compares: `vllm.LLM`, and Keel's
engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
from transformers import AutoConfig

from benchmarks.rollout.model import Size
from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import Group, Prompt
from keel.rollout.engine.conversion import render_prompt
from keel.rollout.spec import EngineSpec

RUN_DEADLINE_S = 240.0
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Batch sizes with a CUDA graph: few, because each costs start-up time."""


@dataclass(frozen=True)
class Arm:
    """What is different about one way to sample."""

    name: str
    keel: bool
    record: bool = False
    """Sampling masks, and routes where the model has experts."""
    logprobs: bool = False
    """Stock only; Keel's engines always return them."""
    own_process: bool = False
    """vLLM's engine core in a process of its own, as `LLM` has it."""
    asynchronous: bool | None = None
    """Asynchronous scheduling; None: vLLM's choice, which is yes."""
    recorder: Literal["auto", "packed"] = "auto"
    gpu_only: bool = False
    cascade: bool = True
    """`rollout.cascade_attention`"""
    graph: bool = True
    """A step's sampling is a CUDA graph."""
    steady: bool = True
    """A step with the rows of the one before is not prepared anew."""
    bursts: bool = True
    """Several such steps are begun at once."""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of vLLM's engine arguments."""

    def environment(self) -> dict[str, str]:
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if self.own_process else "0"}


def packed(name: str, **changes: Any) -> Arm:
    return Arm(name, keel=True, recorder="packed", record=True, gpu_only=True, changes=changes)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock", keel=False, own_process=True),
        Arm("stock+logprobs", keel=False, own_process=True, logprobs=True),
        Arm(
            "stock+recording",
            keel=False,
            own_process=True,
            logprobs=True,
            record=True,
            gpu_only=True,
        ),
        Arm("keel-plain", keel=True),
        Arm("keel", keel=True, record=True),
        Arm("packed-plain", keel=True, recorder="packed", gpu_only=True),
        packed("packed"),
        # Where time goes, not part of the comparison:
        Arm("stock+logprobs-inproc", keel=False, logprobs=True),
        Arm("keel-plain-sync", keel=True, asynchronous=False),
        packed("packed-fa2", attention_config={"flash_attn_version": 2}),
        packed("packed-triton", attention_backend="TRITON_ATTN"),
        replace(packed("packed-no-cascade"), cascade=False),
        replace(packed("packed-no-graph"), graph=False),
        replace(packed("packed-no-steady"), steady=False),
        replace(packed("packed-no-bursts"), bursts=False),
        replace(packed("packed-before"), cascade=False, graph=False, steady=False),
        packed("packed-head-rounded", hf_overrides={"head_dtype": "model"}),
        packed("packed-page64", block_size=64),
        packed("packed-page256", block_size=256),
    )
}


class Steps:
    """Counts the steps that the model makes, those of a burst one by one, and adds up the time of
    their parts.

    The parts are those of this process: where vLLM's core runs in another one, only `process` and
    the wait for it are seen, and calls of the engine are counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self.parts: dict[str, float] = {}
        self.hooks: dict[int, Callable[[], None]] = {}
        """Called before the first call of the engine after so many steps."""

    def reset(self) -> None:
        self.count, self.parts = 0, {}

    def watch(self, engine: Any) -> None:
        """`engine`: a vLLM `LLMEngine`."""
        from keel.rollout.fastpath.bursts import steps_in  # noqa: PLC0415  (imports vLLM)

        def steps_of(output: Any, **_: Any) -> int:
            return steps_in(output) if output.total_num_scheduled_tokens else 0

        core = getattr(engine.engine_core, "engine_core", None)
        self._time(engine, "step", "step", steps=None if core else lambda: 1, hooked=True)
        self._time(engine.output_processor, "process_outputs", "outputs")
        if core is None:
            self._time(engine.engine_core, "get_output", "wait for the core")
            return
        self._time(core.scheduler, "schedule", "schedule")
        self._time(core.scheduler, "update_from_output", "update")
        self._time(core.model_executor, "execute_model", "launch model", steps=steps_of)
        self._time(core.model_executor, "sample_tokens", "launch sampling")
        with suppress(ImportError):
            from vllm.v1.worker.gpu.async_utils import AsyncOutput  # noqa: PLC0415

            self._split_wait(AsyncOutput)

    def _time(
        self,
        owner: Any,
        name: str,
        part: str,
        *,
        steps: Callable[..., int] | None = None,
        hooked: bool = False,
    ) -> None:
        """steps: how many a call was, by its arguments, once it has returned."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            while hooked and self.hooks and (due := min(self.hooks)) <= self.count:
                self.hooks.pop(due)()
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - began
                self.count += steps(*args, **kwargs) if steps else 0

        setattr(owner, name, timed)

    def _split_wait(self, kind: Any) -> None:
        inner, parts = kind.get_output, self

        def get_output(output: Any) -> Any:
            began = time.perf_counter()
            output.copy_event.synchronize()
            arrived = time.perf_counter()
            result = inner(output)
            for part, seconds in (
                ("wait for the GPU", arrived - began),
                ("to lists", time.perf_counter() - arrived),
            ):
                parts.parts[part] = parts.parts.get(part, 0.0) + seconds
            return result

        kind.get_output = get_output


class Driver(Protocol):
    """What the arms have in common."""

    def run(self, prompts: list[Prompt], completion: int) -> list[Group]:
        """Blocks. Groups are returned by Keel's engines only."""
        ...

    def on_thread(self, call: Callable[[], Any]) -> Any:
        """The result of `call` on the thread that steps the engine."""
        ...


class Stock:
    """`vllm.LLM`, as its users call it."""

    def __init__(self, arm: Arm, folder: str, size: Size, steps: Steps) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415
        from vllm import LLM  # noqa: PLC0415

        args: dict[str, Any] = {"max_num_seqs": size.sequences, **engine_args(arm, folder, size)}
        if arm.record:
            args |= {
                "enable_return_routed_experts": size.experts > 0,
                "return_sampling_mask": True,
                "logprobs_mode": "processed_logprobs",
            }
        args |= {"dtype": size.dtype, "max_model_len": context(size)}
        self._llm = LLM(model=folder, **args)
        self._arm, self._size = arm, size
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        steps.watch(self._llm.llm_engine)

    def run(self, prompts: list[Prompt], completion: int) -> list[Group]:
        from vllm import SamplingParams  # noqa: PLC0415

        asked = [
            {"prompt_token_ids": render_prompt(self._tokenizer, prompt).token_ids}
            for prompt in prompts
            for _ in range(self._size.group)
        ]
        params = SamplingParams(
            temperature=1.0,
            top_p=self._size.top_p,
            top_k=self._size.top_k,
            max_tokens=completion,
            logprobs=0 if self._arm.logprobs else None,
        )
        outputs = self._llm.generate(asked, params, use_tqdm=False)  # type: ignore[arg-type]
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {completion}:
            raise RuntimeError(f"completions of {lengths} tokens where {completion} were asked for")
        return []

    def on_thread(self, call: Callable[[], Any]) -> Any:
        return call()


class Keel:
    """An `EngineThread` around a `VllmEngine`, as the workers have it."""

    def __init__(self, arm: Arm, folder: str, size: Size, steps: Steps) -> None:
        from keel.rollout.engine import vllm_engine  # noqa: PLC0415
        from keel.rollout.engine.thread import EngineThread  # noqa: PLC0415

        built = vllm_engine.engine_args

        def bounded(*args: Any) -> Any:
            return replace(built(*args), **engine_args(arm, folder, size))

        vllm_engine.engine_args = bounded
        for wanted, module, name, instead in (
            (arm.graph, "sample_graphs", "install", lambda runner: None),
            (arm.steady, "steady_steps", "install", lambda runner, **_: None),
            (arm.bursts, "bursts", "MOST", 1),
        ):
            if not wanted:
                setattr(import_module(f"keel.rollout.fastpath.{module}"), name, instead)
        self._arm, self._size = arm, size
        self._config = RolloutConfig(
            sampling=sampling(size, size.completion),
            max_num_seqs=size.sequences,
            recorder=arm.recorder,
            cascade_attention=arm.cascade,
            deadline_s=RUN_DEADLINE_S,
        )
        spec = EngineSpec(
            model_path=folder,
            tokenizer=folder,
            config=self._config,
            dtype=size.dtype,  # type: ignore[arg-type]
            max_model_len=context(size),
            seed=0,
            keep_routing=arm.record and size.experts > 0,
            keep_sampling_mask=arm.record,
        )

        def build() -> vllm_engine.VllmEngine:
            made = vllm_engine.VllmEngine(spec)
            steps.watch(made._llm)
            return made

        self._engine = EngineThread(build, self._config)

    def run(self, prompts: list[Prompt], completion: int) -> list[Group]:
        asked = sampling(self._size, completion)
        futures = [
            self._engine.submit(
                prompt, group_size=self._size.group, sampling=asked, record=self._arm.record
            )
            for prompt in prompts
        ]
        groups = [future.result(timeout=RUN_DEADLINE_S) for future in futures]
        lengths = {t.sampled_tokens for group in groups for t in group.trajectories}
        if lengths != {completion}:
            raise RuntimeError(f"completions of {lengths} tokens where {completion} were asked for")
        return groups

    def on_thread(self, call: Callable[[], Any]) -> Any:
        return self._engine._ask(lambda _: call()).result(timeout=RUN_DEADLINE_S)


def context(size: Size) -> int:
    return size.prompt + size.completion + 16


def sampling(size: Size, completion: int) -> SamplingConfig:
    return SamplingConfig(top_p=size.top_p, top_k=size.top_k, max_tokens=completion)


def engine_args(arm: Arm, folder: str, size: Size) -> dict[str, Any]:
    """Room for everything, so that nothing is preempted, and as many engines on the card as there
    are arms."""
    own = dict(arm.changes)
    if arm.asynchronous is not None:
        own["async_scheduling"] = arm.asynchronous
    if not torch.cuda.is_available():
        return {
            "kv_cache_memory_bytes": 2**28,
            "enforce_eager": True,
            "block_size": 32,
            "disable_log_stats": True,
            **own,
        }
    model = AutoConfig.from_pretrained(folder)
    token = model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_dim * 2
    return {
        "kv_cache_memory_bytes": int(1.2 * token * size.sequences * context(size)) + 2**28,
        "gpu_memory_utilization": 0.04,  # bounds nothing with the line above; must be free
        "cudagraph_capture_sizes": [n for n in GRAPHS if n <= 2 * size.sequences],
        **own,
    }
