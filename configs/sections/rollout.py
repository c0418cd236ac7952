"""`rollout`: the engines and how they sample."""

from dataclasses import dataclass, field
from typing import Literal

from keel.configs.sections.base import Section, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Section, path="rollout.sampling"):
    """Sampling parameters. Only those that the engine can record exactly are available."""

    temperature: float = knob(1.0, ge=0.01, le=10)  # vLLM raises lower values to 0.01
    """Sampling temperature, by which engine and trainer both divide the logits. Greedy sampling is
    not offered, because its probabilities carry no gradient."""
    top_p: float = knob(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely ids whose cumulative probability reaches this. 1:
    off."""
    top_k: int = knob(0, ge=0)
    """Number of most likely ids to keep. 0: all. Required with `top_p` below 1, because it bounds
    the size of the sampling mask."""
    max_tokens: int = knob(256, ge=1)
    """Maximum number of tokens per completion."""
    stop: tuple[str, ...] = ()
    """Stop strings. Each one ends a completion and remains part of it."""

    def check(self) -> None:
        rule = f"must be above 0 with top_p = {self.top_p}, to bound the sampling mask. Try 512"
        self.require(self.top_p == 1 or self.top_k > 0, "top_k", rule)
        self.require("" not in self.stop, "stop", "must not be empty text")

    @property
    def truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0

    @property
    def greedy(self) -> bool:
        return self.top_k == 1


CUT_S = 60.0
"""Maximum number of seconds between the decision to cut a completion and its next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Section, path="rollout"):
    """Settings for the vLLM engines, including their limits and how they receive new weights."""

    engines: int = knob(1, ge=1, auto=True, resumable=True)
    """Number of vLLM engines, each of which is one Ray actor. auto: one next to each trainer rank,
    or one on each GPU without a rank, whichever the time model predicts to be faster; 1 on a CPU.
    """
    tensor_parallel: int = knob(1, ge=1, resumable=True)
    """Number of GPUs per engine, over which vLLM splits every layer. If it exceeds the GPUs of the
    largest node, an engine takes several nodes, with the same number of GPUs on each."""
    expert_parallel: bool = knob(False, resumable=True)
    """Give each of the `tensor_parallel` GPUs whole experts of a mixture of experts instead of a
    slice of every expert."""
    colocated: bool = knob(False, auto=True, resumable=True)
    """Place engine i on the GPU of trainer rank i (needs as many engines as ranks, one GPU each).
    `gpu_memory_utilization` is then the engine's share of the GPU. A single GPU is always shared.
    auto: whichever the time model predicts to be faster."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Precision of the engine's weights and compute. Empty: `model.dtype`."""
    quantization: Literal["", "fp8"] = ""
    """fp8: hold the weights of linear layers except routers, and of experts, in FP8 (E4M3) with one
    scale per block of 128×128, a power of two if the checkpoint's scales are. Weights are quantized
    as they are loaded and in every update, and inputs of these layers per token. Needs a GPU (Ada,
    Hopper or newer)."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Precision of the engine's logits. float32 matches the trainer: bfloat16 rounds a logit of 20
    by up to 0.06. model: the engine's dtype."""
    time_share: bool = knob(False, auto=True, resumable=True)
    """Let engine and trainer take turns with the memory of a shared GPU. The engine frees weights
    and KV cache while the trainer works; the trainer moves what does not fit to host memory while
    the engine samples (see `trainer.offload_while_sampling`). `gpu_memory_utilization` may then be
    close to 1. auto: if the time model predicts it to be faster than sharing the memory; never on a
    CPU."""
    recorder: Literal["auto", "native", "packed", "v1"] = knob("auto", resumable=True)
    """How routes and sampling masks are recorded. native: as vLLM's Model Runner V2 returns them
    (GPUs). packed: the same data as arrays per step, with a scheduler that skips uneventful steps.
    v1: for CPUs. auto: packed on GPUs if every layer has full attention and `tensor_parallel` is 1,
    otherwise native; v1 on a CPU."""
    draft_tokens: int = knob(0, ge=0, le=16, resumable=True)
    """Speculative decoding: number of tokens per step that an engine on a GPU drafts by looking up
    the last 2 to 4 tokens in the prompt and completion (n-grams). Tokens keep their distribution
    and are recorded as without drafts, but by the native recorder. Drafts help if completions
    repeat earlier text and temperatures are low. A model of 135 M parameters was faster with the
    packed recorder and no drafts."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling parameters for training. Evaluations use those in `eval`."""
    max_num_seqs: int = knob(128, ge=1, auto=True, resumable=True)
    """Maximum number of sequences per engine iteration, as in vLLM. auto: all that a step needs, or
    waves of equal size if the KV cache cannot hold them all, and 128 for evaluations of models with
    a small cache; 128 on a CPU."""
    max_num_batched_tokens: int = knob(4096, ge=1, resumable=True)
    """Maximum number of tokens per engine iteration, as in vLLM. Longer prompts are prefilled in
    chunks."""
    enable_prefix_caching: bool = knob(True, resumable=True)
    """Reuse the KV cache of prompts and earlier turns for requests with the same prefix."""
    enforce_eager: bool = knob(False, resumable=True)
    """GPU: disable CUDA graphs. The engine starts sooner but is slower."""
    gpu_memory_utilization: float = knob(0.85, gt=0, lt=1, auto=True, resumable=True)
    """GPU: fraction of its memory for weights, activations and KV cache. auto: enough that no
    sequence waits, or the rest that the trainer leaves on a shared GPU."""
    kv_cache_gib: float = knob(0.5, gt=0, resumable=True)
    """CPU: size of the KV cache in GiB."""
    threads: int = knob(1, ge=1, resumable=True)
    """CPU: number of threads per engine."""
    weight_updates: Literal["in_flight", "drain"] = "in_flight"
    """Handling of in-flight completions when new weights arrive (`algorithm.max_lag`). in_flight:
    pause and resume with the new weights; each token records its version. drain: finish them first,
    so that each completion has a single version."""
    timeout_s: float = knob(600.0, gt=0, resumable=True)
    """Timeout in seconds for a group, counted from when its engine starts it. Weight updates and
    sleep do not count. After the timeout its completions are cut as by `max_tokens` and counted
    (`rollout/deadline_cuts`). A completion without a token is dropped."""
    weight_transfer: Literal["auto", "direct", "store"] = knob("auto", resumable=True)
    """Transport of new weights to the engines. direct: from the trainer ranks over NCCL, or in
    place on a shared GPU (between CPUs: gloo). store: through host memory and Ray's object store.
    auto: direct on GPUs, store on CPUs."""
    copy_weights: bool = knob(True, resumable=True)
    """Trace vLLM's loader on the first update and copy later updates straight to their destination.
    Has no effect if the loader does more than copy (CPUs, quantization). false: use the loader for
    every update."""
    update_timeout_s: float = knob(300.0, gt=0, resumable=True)
    """Timeout in seconds for one engine to load new weights, and to drain before that."""

    @property
    def capacity(self) -> int:
        """Maximum number of sequences that all engines sample at the same time."""
        return self.engines * self.max_num_seqs

    @property
    def silent_s(self) -> float:
        """Seconds an engine may go without finishing a group before it is considered dead. Work
        between steps doesn't count.

        A live engine cuts or drops late groups within `CUT_S`, and a weight update can keep it busy
        for `update_timeout_s`.
        """
        return 1.05 * self.timeout_s + CUT_S + max(CUT_S, self.update_timeout_s)

    def packs(self, *, full_attention: bool) -> bool:
        """Return whether an engine on a GPU uses the packed recorder. `full_attention` is the
        result of `keel.model.load.full_attention`."""
        if self.recorder == "auto":
            return full_attention and self.tensor_parallel == 1 and not self.draft_tokens
        return self.recorder == "packed"
