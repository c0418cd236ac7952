"""The trainer and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keel.configs.sections.base import require

LONG = 4096
"""Tokens of a context from which attention takes a part of a step that other kernels and kept
results are worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Ranks, ZeRO, parallelism and AdamW."""

    ranks: int = 1
    """Data-parallel trainer processes (one GPU each where there are GPUs). auto: as many as there
    are GPUs, where each is shared with an engine or the time model says so; 1 on a CPU."""
    min_ranks: int = 0
    """The fewest ranks with which a run continues or starts where there is no room for all: a node
    is gone or not there, and no other in its place after `run.elastic_wait_s`. Engines become fewer
    alike, the batch stays as it is, and the next start uses all again where there is room. 0: all,
    or 1 where `ranks` is left open. docs/reliability.md"""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What DeepSpeed shards over the ranks. 0: nothing; 1: the optimizer's state; 2: gradients,
    too; 3: parameters, too. auto: the lowest that fits and is as fast; 0 on a CPU."""
    expert_parallel: int = 1
    """Ranks over which the experts of a layer are spread; tokens travel to them and back. Must
    divide `ranks` and the number of experts."""
    sequence_parallel: int = 1
    """Consecutive ranks over which each micro-batch's tokens are spread, for contexts too long for
    one (Ulysses). Must divide `ranks` and the model's attention heads."""
    micro_batch_tokens: int = 8192
    """Most tokens in a packed micro-batch (a longer segment gets one of its own, and
    the segments of a longer trajectory are spread over several); a rank holds
    1/`sequence_parallel` of them. auto: as many as fit, as long as more are faster by the time
    model, and at most 65,536; 8192 on a CPU. If a step runs out of memory, this is halved."""
    lr: float = 1e-6
    """Learning rate, after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0; 0: none."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, over `run.steps`."""
    min_lr: float = 0.0
    """Learning rate at which `linear` and `cosine` end."""
    weight_decay: float = 0.0
    """Of AdamW, on matrices alone; 0: none."""
    beta1: float = 0.9
    """Of Adam: decay of the mean of gradients."""
    beta2: float = 0.95
    """Of Adam: decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Of Adam: added to the denominator."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    attention: Literal["sparse", "warm-up", "dense"] = "sparse"
    """How a model with sparse attention is trained (docs/sparse-attention.md). warm-up: its
    indexers alone, from dense attention. dense: everything but its indexers, with dense attention.
    Engines attend as sparse says, so rollouts need that. Other models attend as they always do,
    and have nothing to warm up."""
    indexer_loss: float = 1.0
    """Weight of the indexers' own loss (DeepSeek-V3.2, Eq. 3 and 4): the sum over layers, the mean
    over a step's tokens. It reaches the indexers alone; 0: they stay as they are."""
    attention_kernels: Literal["auto", "torch", "flash4"] = "auto"
    """On GPUs: PyTorch's (flash attention 2), or FlashAttention-4's, on Hopper and Blackwell: up to
    twice as fast over long contexts. auto: the latter where a context may have 4,096 tokens, the
    package is there and its gradients are right for the model's heads, which a rank tries first."""
    share_prompts: bool = False
    """What trajectories of a group begin with alike (16 tokens at least; experts' recorded routes
    must be the same, too) is computed once for as many of them as share a micro-batch, where that
    makes a step shorter: the same gradient with fewer tokens. Trajectories of several contexts are
    left out; not for latent or sparse attention, nor for `model.batch_invariant`. auto: on GPUs,
    wherever it goes; never on a CPU. docs/performance.md"""
    activation_checkpointing: bool = False
    """Compute the activations of decoder layers again in the backward pass: less memory, about a
    third more work. auto: where they would not fit, or in too small micro-batches; never on a
    CPU."""
    keep_attention: bool = False
    """With `activation_checkpointing` (and `zero_stage` 0 to 2): what attention gave is kept, not
    computed again: a layer's input once more in memory, and a seventh less time at 65,536 tokens.
    auto: where a context may have 4,096 tokens, it saves 2 % of a step and fits; never on a CPU,
    nor for `model.batch_invariant`."""
    compile: bool = False
    """torch.compile of the decoder layers, all but attention and experts (`zero_stage` 0 to 2).
    auto: where it saves more in the run's steps than the 20 s that it takes at their start, of
    models whose norms are Keel's kernels; never on a CPU."""
    offload_optimizer: bool = False
    """Keep master weights and optimizer state in host memory, and update them there (ZeRO-Offload;
    `zero_stage` 1 or above). auto: only if nothing else fits; never on a CPU."""
    offload_while_sampling: bool = True
    """With `rollout.time_share`: of optimizer state, reference policy and weights waits in host
    memory
    what the engine has no room for while it samples, and of the optimizer's state what activations
    have none for. false: they stay on the GPU, and only what a step itself needs is freed. auto:
    only if there is no such room, or the engine were slower by it than the copies take."""
    threads: int = 2
    """CPU: threads per rank."""
    publish_bucket_mib: int = 256
    """Weights go to the engines in buckets of this size, in MiB."""
    timeout_s: float = 1800.0
    """Longest wait for one optimizer step, and for writing or reading a checkpoint, writing the
    model, and sending weights (beside `rollout.update_timeout_s`), in seconds. What takes longer
    is taken for lost: raise it where `run.dir` is slow and the model large."""

    @property
    def keeps_attention(self) -> bool:
        """Under ZeRO 3 weights are gathered inside what is computed again, and not as often then as
        before, which PyTorch takes for an error."""
        return self.activation_checkpointing and self.keep_attention and self.zero_stage != 3

    def flash4(self, longest: int) -> bool:
        """Whether attention in contexts of up to so many tokens is to be FlashAttention-4's, where
        GPU and packages are for it."""
        if self.attention_kernels == "auto":
            return longest >= LONG
        return self.attention_kernels == "flash4"

    def __post_init__(self) -> None:
        for name in (
            "ranks",
            "expert_parallel",
            "sequence_parallel",
            "micro_batch_tokens",
            "threads",
            "publish_bucket_mib",
        ):
            value = getattr(self, name)
            require(value >= 1, f"trainer.{name}", value, "must be >= 1")
        require(
            0 <= self.min_ranks <= self.ranks,
            "trainer.min_ranks",
            self.min_ranks,
            f"must be in 0 (all) to trainer.ranks = {self.ranks}",
        )
        for name in ("expert_parallel", "sequence_parallel"):
            require(
                self.ranks % getattr(self, name) == 0,
                f"trainer.{name}",
                getattr(self, name),
                f"must divide trainer.ranks = {self.ranks}",
            )
        require(
            self.attention != "warm-up" or self.indexer_loss > 0,
            "trainer.indexer_loss",
            self.indexer_loss,
            "must be above 0 with trainer.attention: warm-up, which trains by nothing else",
        )
        require(
            self.zero_stage > 0 or not self.offload_optimizer,
            "trainer.offload_optimizer",
            self.offload_optimizer,
            "needs trainer.zero_stage 1, 2 or 3: DeepSpeed offloads what ZeRO has sharded",
        )
        require(
            self.zero_stage < 3 or not self.compile,
            "trainer.compile",
            self.compile,
            "cannot be combined with trainer.zero_stage = 3: DeepSpeed gathers parameters before "
            "every module, so nothing is left to compile together. Use stage 2, or switch it off",
        )
        for name in ("lr", "eps", "timeout_s"):
            require(getattr(self, name) > 0, f"trainer.{name}", getattr(self, name), "must be > 0")
        for name in ("warmup_steps", "min_lr", "weight_decay", "grad_clip", "indexer_loss"):
            require(
                getattr(self, name) >= 0,
                f"trainer.{name}",
                getattr(self, name),
                "must not be negative",
            )
        for name in ("beta1", "beta2"):
            require(
                0 <= getattr(self, name) < 1,
                f"trainer.{name}",
                getattr(self, name),
                "must be in [0, 1)",
            )
        require(
            self.min_lr <= self.lr,
            "trainer.min_lr",
            self.min_lr,
            f"must not exceed trainer.lr = {self.lr}",
        )

    @property
    def groups(self) -> int:
        """Shares that a step's micro-batches are dealt into: one per group of ranks over which a
        micro-batch's tokens are spread."""
        return self.ranks // self.sequence_parallel
