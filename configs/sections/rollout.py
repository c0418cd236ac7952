"""The engines and how they sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from keel.configs.sections.base import require


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How the engine samples. Only what the engine records exactly is offered."""

    temperature: float = 1.0
    """Logits are divided by it, in engine and trainer alike."""
    top_p: float = 1.0
    """Sample from the likeliest ids that reach this probability together; 1: from all."""
    top_k: int = 0
    """Keep at most this many ids; 0: all. Truncation by top_p needs it too: it bounds the mask."""
    max_tokens: int = 256
    """Longest completion, in tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings: each ends a completion and stays part of it."""

    def __post_init__(self) -> None:
        knob = "rollout.sampling"
        require(
            0.01 <= self.temperature <= 10,  # vLLM takes lower ones for 0.01
            f"{knob}.temperature",
            self.temperature,
            "must be in [0.01, 10]; greedy completions have no probability to learn from",
        )
        require(0 < self.top_p <= 1, f"{knob}.top_p", self.top_p, "must be in (0, 1]")
        require(self.top_k >= 0, f"{knob}.top_k", self.top_k, "must not be negative (0: keep all)")
        require(
            self.top_p == 1 or self.top_k > 0,
            f"{knob}.top_k",
            self.top_k,
            f"must be above 0 with top_p = {self.top_p}: it bounds the sampling mask (try 512)",
        )
        require(self.max_tokens >= 1, f"{knob}.max_tokens", self.max_tokens, "must be at least 1")
        require("" not in self.stop, f"{knob}.stop", list(self.stop), "must not hold empty strings")

    @property
    def truncated(self) -> bool:
        """Whether tokens are sampled from less than the whole vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def greedy(self) -> bool:
        """Whether only the likeliest token can be sampled."""
        return self.top_k == 1


CUT_S = 60.0
"""Longest that a completion may continue, in seconds, once it is to be cut: until its next
token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """vLLM engines, and how long they may take."""

    engines: int = 1
    """vLLM engines, one Ray actor each. auto: one beside each trainer rank, or on the GPUs that
    have none, whichever is faster by the time model; 1 on a CPU."""
    tensor_parallel: int = 1
    """GPUs per engine."""
    colocated: bool = False
    """Put engine i on the GPU of trainer rank i (as many engines as ranks, of one GPU each);
    `gpu_memory_utilization` is then the engine's share of the GPU. A single GPU is always
    shared. auto: whichever is faster by the time model."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Of the engine's weights and compute; empty: `model.dtype`."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Of the engine's logits. float32, as the trainer's are: rounded to bfloat16, a logit of 20 is
    off by up to 0.06. model: the engine's dtype."""
    time_share: bool = False
    """Engine and trainer time-share the memory of a GPU that they share. While the trainer works,
    the engine gives up weights and KV cache; while the engine samples, what the trainer holds and
    there is no room for waits in host memory (but see `trainer.offload_while_sampling`).
    `gpu_memory_utilization` may then be nearly 1. auto: where it is faster by the time model than
    what fits side by side; never on a CPU."""
    recorder: Literal["auto", "native", "packed", "v1"] = "auto"
    """native: what vLLM's Model Runner V2 returns (GPUs). packed: the same with arrays for whole
    steps instead of objects for each token, and a scheduler that skips uneventful steps. v1: on a
    CPU. auto: packed on GPUs where every layer has full attention and `tensor_parallel` is 1, else
    native; v1 on a CPU."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How completions are sampled in training; evaluations have `eval`."""
    max_num_seqs: int = 128
    """Most sequences that an engine works on at once. auto: all that a step needs of it, or
    an equal part where all have no room in the KV cache, and 128 for evaluations where their keys
    and values are small; 128 on a CPU."""
    max_num_batched_tokens: int = 4096
    """Most tokens that an engine computes in one step; longer prompts are prefilled in chunks."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of prompts and earlier turns for requests that begin alike."""
    cascade_attention: bool = True
    """GPU: read a prompt's keys and values once for its completions that are sampled together, and
    not once for each. With `recorder: packed`, `enable_prefix_caching` and engines of one GPU, and
    where every layer has full attention."""
    enforce_eager: bool = False
    """GPU: run without CUDA graphs (slower, starts sooner)."""
    gpu_memory_utilization: float = 0.85
    """GPU: fraction of its memory for weights, activations and KV cache. auto: what those need so
    that no sequence waits, or what the trainer leaves of a GPU that is shared."""
    kv_cache_gib: float = 0.5
    """CPU: memory of the KV cache, in GiB."""
    threads: int = 1
    """CPU: threads per engine."""
    weight_updates: Literal["in_flight", "drain"] = "in_flight"
    """What becomes of completions that are being sampled when new weights arrive
    (`algorithm.max_lag`). in_flight: they pause and resume with the new weights; each token carries
    its version. drain: they are finished first, so that a completion has one version."""
    timeout_s: float = 600.0
    """Seconds per group, from when its engine begins it; those in which the engine takes weights
    or sleeps do not count. Then its completions are cut where they are, as by `max_tokens`, and
    counted (`rollout/deadline_cuts`). One without a token by then is dropped."""
    weight_transfer: Literal["auto", "direct", "store"] = "auto"
    """How new weights reach the engines. direct: from the trainer's ranks over NCCL, or in place
    where engine and rank share a GPU (between CPUs: gloo). store: through host memory, by Ray's
    object store. auto: direct on GPUs, store on CPUs."""
    copy_weights: bool = True
    """Watch what vLLM's loader does with the first weights that come, and copy later ones straight
    to where it put those. Has no effect where the loader does more than copy (CPUs, quantization).
    false: the loader for every update."""
    update_timeout_s: float = 300.0
    """Longest wait in seconds for an engine to take new weights, and to drain before that. A rank
    that sends to several engines has as long for each."""

    def __post_init__(self) -> None:
        for name in (
            "engines",
            "tensor_parallel",
            "max_num_seqs",
            "max_num_batched_tokens",
            "threads",
        ):
            value = getattr(self, name)
            require(value >= 1, f"rollout.{name}", value, "must be >= 1")
        require(
            0 < self.gpu_memory_utilization < 1,
            "rollout.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "must be in (0, 1)",
        )
        for name in ("kv_cache_gib", "timeout_s", "update_timeout_s"):
            require(getattr(self, name) > 0, f"rollout.{name}", getattr(self, name), "must be > 0")

    @property
    def silent_s(self) -> float:
        """Seconds after which an engine that has not returned a group is taken for dead. One that
        is alive cuts it or gives it up (`CUT_S`); `update_timeout_s` is how long it may be away
        from its orders, in one step, and its clock leaves out what it does between steps."""
        return 1.05 * self.timeout_s + CUT_S + max(CUT_S, self.update_timeout_s)

    def cascades(self, *, full_attention: bool) -> bool:
        """Whether attention reads a prompt once for completions of its group, on GPUs."""
        alone = self.tensor_parallel == 1 and self.enable_prefix_caching
        return self.cascade_attention and alone and self.packs(full_attention=full_attention)

    def packs(self, *, full_attention: bool) -> bool:
        """Whether an engine on GPUs has the packed recorder. `full_attention`: see
        `keel.model.load.full_attention`."""
        if self.recorder == "auto":
            return full_attention and self.tensor_parallel == 1
        return self.recorder == "packed"
