"""What an engine is built from, and what can go wrong with it. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from keel.configs.schema import Config, Dtype, RolloutConfig
from keel.model.batch_invariant import variables
from keel.model.hub import from_anywhere

CAPTURED = 512
"""Tokens of the largest step that vLLM captures as a CUDA graph by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything an engine needs to start, anywhere."""

    model_path: str
    """A local folder or a hub name, with a safetensors checkpoint."""
    tokenizer: str
    config: RolloutConfig
    dtype: Dtype
    max_model_len: int
    """Context of the engine: prompt and completion, in tokens."""
    seed: int
    keep_routing: bool
    """Record routes. Has no effect on a model without experts."""
    keep_sampling_mask: bool
    """Record sampling masks of requests whose sampling is truncated."""
    conversations: int = 0
    """Conversations that may be open at once. The keys and values of those that wait for a tool are
    worth keeping, beside those of `config.max_num_seqs` that are being sampled."""
    chat_template: str = ""
    """In place of the tokenizer's; empty: its own."""
    thinking_marks: tuple[str, ...] = ()
    """`model.thinking_marks`"""
    gpu_gib: float = 0.0
    """Of a GPU that has more, what the run may take: `run.gpu_gib`."""
    batch_invariant: bool = False
    """`model.batch_invariant`"""
    residual_dtype: Literal["model", "float32"] = "model"
    """`model.residual_dtype`"""
    cache_bytes: int = 0
    """What its share of a GPU leaves the KV cache for certain; 0: vLLM measures it as it starts,
    while nobody else may take memory of that GPU."""

    @classmethod
    def of(cls, config: Config, model: str, *, cache_bytes: int = 0) -> Self:
        """An engine of this run; model: folder of the weights."""
        return cls(
            model_path=model,
            tokenizer=from_anywhere(config.model.tokenizer or model),
            config=config.rollout,
            dtype=config.engine_dtype,
            max_model_len=config.max_context,
            seed=config.run.seed,
            keep_routing=config.algorithm.keep_routing,
            keep_sampling_mask=config.algorithm.keep_sampling_mask,
            conversations=-(-config.agents.max_concurrent_episodes // config.rollout.engines)
            if config.with_agents
            else 0,
            chat_template=config.model.chat_template,
            thinking_marks=config.model.thinking_marks,
            gpu_gib=config.run.gpu_gib,
            batch_invariant=config.model.batch_invariant,
            residual_dtype=config.model.residual_dtype,
            cache_bytes=cache_bytes,
        )

    @property
    def wide_residual(self) -> bool:
        """Whether blocks' outputs are added up in more than they are computed in."""
        return self.residual_dtype == "float32" != self.dtype

    def gpu_share(self, gpu_gib: float) -> float:
        """The engine's, of a GPU of so many GiB: `rollout.gpu_memory_utilization` of what the run
        may take of it."""
        allowed = min(1.0, self.gpu_gib / gpu_gib) if self.gpu_gib else 1.0
        return self.config.gpu_memory_utilization * allowed


@dataclass(frozen=True, slots=True)
class Started:
    """Result of an engine's start."""

    pid: int
    """Process id of the engine."""
    warnings: tuple[str, ...] = ()
    """Warnings that Keel logged in the engine's process, such as a missing fast path."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds spent in each phase of the start, by the phase's name."""


class Progress(NamedTuple):
    """How far an engine has come."""

    steps: int = 0
    """That it has finished."""
    longest_s: float = 0.0
    """Of these, in seconds."""
    orders: int = 0
    """Groups and turns that it is at."""


class EngineError(RuntimeError):
    """The engine cannot continue; another one may."""


class LostTurn(OSError):
    """A turn that nothing can be learned from: its conversation is left out, and no other. An
    `OSError`, as what an episode is lost over (`keel.agents.episode`)."""


class RecordingError(RuntimeError):
    """The engine did not record what the trainer must replay."""


def parallel_args(config: RolloutConfig) -> dict[str, Any]:
    """vLLM's arguments for the GPUs that an engine's actor has been given.

    Several are worked by child processes: inside a placement group vLLM would choose Ray by itself,
    and look for GPUs beside those that the actor holds already.
    """
    if config.tensor_parallel == 1:
        return {"tensor_parallel_size": 1}
    return {
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "mp",
    }


def environment(
    config: RolloutConfig, *, gpu: bool, batch_invariant: bool = False
) -> dict[str, str]:
    """Environment variables of an engine's process. They must be set before torch is imported."""
    common = {
        # vLLM in the worker's own process: the recorder and weight updates need its objects.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Its fused sampler shows neither sampling masks nor their probabilities.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if gpu and batch_invariant:
        # vLLM would cut its CUDA graphs into pieces, so that GEMMs of compiled layers find their
        # tiles; with Keel batch-invariant layers are not compiled.
        common |= {**variables(batch_invariant), "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
    if gpu:
        return {**common, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return {
        **common,
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        # Threads that spin while they wait would starve the other actors of the machine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def captured_sizes(seqs: int, most: int) -> list[int]:
    """Tokens of the steps that are captured as CUDA graphs, for a batch of `seqs` and at `most` so
    many tokens a step: vLLM's own, to twice the batch, and eight more, to four times that. Turns
    of conversations begin with some 30 tokens each (what a tool said, and the rest of a KV block),
    beside a whole batch that goes on; 30 of 256 do so at once. Launched kernel by kernel, such a
    step kept the host for 23 ms in a profile, a seventh of its time (1.2 B parameters, H200)."""
    own = min(2 * seqs, CAPTURED)
    finely = [1, 2, 4, *range(8, 256, 8), *range(256, CAPTURED + 1, 16)]
    wider = [own * quarters // 4 for quarters in (5, 6, 7, 8, 10, 12, 14, 16)]
    sizes = [*(size for size in finely if size < own), own, min(seqs, own), *wider]
    return sorted({min(size, most) for size in sizes})
