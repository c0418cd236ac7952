"""Describes an engine, the environment of its process, and its errors. Imports nothing slow."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from keel.configs.schema import Config, Dtype, RolloutConfig
from keel.model.batch_invariant import variables
from keel.model.hub import from_anywhere
from keel.rl.turns import TurnRequest
from keel.rl.types import Prompt

STORED_BYTES = 16_384
"""Recordings of at least this size stay in Ray's object store on the engine's node."""
WIDEST_MASK = 1024
"""The top_k of evaluation requests that do not set one, because an engine that returns masks needs
a limit on their size. Also the largest top_k of the kernels in `keel.rollout.vllm_fast`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything an engine process needs to start."""

    model_path: str  # folder or hub name of a safetensors checkpoint
    tokenizer: str
    config: RolloutConfig
    dtype: Dtype
    max_model_len: int  # maximum total number of tokens in a prompt and its completion
    seed: int
    keep_routing: bool  # whether to record routes. Ignored if the model has no experts.
    keep_sampling_mask: bool  # whether to record the sampling masks of truncated requests
    keep_selection: bool = False  # record the selections of sparse attention, if the model has any
    conversations: int = 0  # open conversations per engine whose prefixes fit the KV cache
    chat_template: str = ""  # replaces the tokenizer's own, unless empty
    thinking_marks: tuple[str, ...] = ()
    gpu_gib: float = 0.0  # `run.gpu_gib`: GiB of GPU memory for the run, or 0 for all
    batch_invariant: bool = False
    residual_dtype: Literal["model", "float32"] = "model"
    cache_bytes: int = 0  # of the KV cache. If 0, vLLM measures the free memory meanwhile.
    spread: bool = False  # its workers are Ray actors on several nodes, one per bundle of its group

    @classmethod
    def of(cls, config: Config, model: str, *, cache_bytes: int = 0) -> Self:
        """Build the spec for the engines of a run. `model` is the folder or hub name from which
        they load weights."""
        return cls(
            model_path=model,
            tokenizer=from_anywhere(config.model.tokenizer or model),
            config=config.rollout,
            dtype=config.engine_dtype,
            max_model_len=config.max_context,
            seed=config.run.seed,
            keep_routing=config.algorithm.keep_routing,
            keep_sampling_mask=config.algorithm.keep_sampling_mask,
            keep_selection=config.algorithm.keep_selection,
            conversations=-(-config.max_episodes() // config.rollout.engines)
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
        return self.residual_dtype == "float32" != self.dtype

    def gpu_share(self, gpu_gib: float) -> float:
        """Return the fraction of GPU memory that the engine may use on a GPU with `gpu_gib` GiB."""
        allowed = min(1.0, self.gpu_gib / gpu_gib) if self.gpu_gib else 1.0
        return self.config.gpu_memory_utilization * allowed


@dataclass(frozen=True, slots=True)
class GroupRequest:
    prompt: Prompt
    size: int
    draw: int = 0  # number of groups already sampled for this prompt with the same weights

    @property
    def label(self) -> str:
        return f"group of prompt {self.prompt.prompt_id}"


SampleRequest = GroupRequest | TurnRequest


class EngineProgress(NamedTuple):
    steps: int = 0
    longest_s: float = 0.0
    requests: int = 0  # number of groups and turns that are in flight


class EngineError(RuntimeError):
    """Raised if an engine can't continue. Another engine can take over its work."""


class LostTurn(OSError):
    """Raised if the recording of a turn is unusable. As with any OSError, the episode is then
    dropped (`keel.agents.episode`)."""


class RecordingError(RuntimeError):
    """Raised if the engine failed to record data that the trainer needs for replay."""


def env_vars(config: RolloutConfig, *, gpu: bool, batch_invariant: bool = False) -> dict[str, str]:
    """Return the environment variables that an engine process needs before it imports torch."""
    common = {
        # vLLM in the worker's process: the recorder and weight updates need its objects.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # FlashInfer's fused sampler returns neither sampling masks nor their probabilities.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Ray sends smaller results to the driver instead of storing them (by default 100 KB).
        "RAY_max_direct_call_object_size": str(STORED_BYTES),
    }
    if gpu and batch_invariant:
        # vLLM would split its CUDA graphs at GEMMs of compiled layers, which Keel does not compile.
        common |= {**variables(batch_invariant), "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
    if gpu:
        return {**common, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    return {
        **common,
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        # Spinning threads would starve the other actors of the machine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
