"""`trainer`: parallelism, optimizer and memory."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from keel.configs.sections.base import Section, knob

LONG = 4096
"""Context length in tokens from which attention takes enough of the time for other kernels to pay
off."""
_BUCKET_ELEMENTS, _LONE_BUCKET_ELEMENTS = 500_000_000, 50_000_000
"""DeepSpeed's default gradient bucket size, and the size for a single rank, which has nothing to
reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(Section, path="trainer"):
    """Settings for the trainer: its ranks, ZeRO, parallelism and AdamW."""

    ranks: int = knob(1, ge=1, auto=True, resumable=True)
    """Number of data-parallel trainer processes, with one GPU each if there are GPUs. auto: the
    number of GPUs if each is shared with an engine, otherwise the number that the time model
    predicts to be fastest; 1 on a CPU."""
    min_ranks: int = knob(0, ge=0, resumable=True)
    """Minimum number of ranks to continue with when nodes are lost and not replaced within
    `run.elastic_wait_s`. The number of engines shrinks in proportion, the batch stays the same, and
    the next start uses all resources again. 0: all ranks, or 1 if `ranks` is auto.
    docs/reliability.md"""
    zero_stage: Literal[0, 1, 2, 3] = knob(0, auto=True, resumable=True)
    """DeepSpeed ZeRO stage. 0: no sharding; 1: shard optimizer state; 2: and gradients; 3: and
    parameters. auto: the lowest that fits and is as fast; 0 on a CPU."""
    hpz_partition_size: int = knob(1, ge=1, resumable=True)
    """With `zero_stage` 3: number of consecutive ranks, all on one node, that share a second copy
    of the parameters (hpZ of ZeRO++). Only the first gather after an update then crosses nodes.
    Must divide `ranks`. 1: no second copy."""
    expert_parallel: int = knob(1, ge=1, resumable=True)
    """Number of ranks to spread the experts of a layer over. Must divide `ranks` and the number of
    experts."""
    sequence_parallel: int = knob(1, ge=1, resumable=True)
    """Number of consecutive ranks to spread each micro-batch's tokens over (Ulysses), for contexts
    too long for one. Must divide `ranks` and, without sparse attention, the number of
    attention heads."""
    micro_batch_tokens: int = knob(8192, ge=1, auto=True, resumable=True)
    """Maximum number of tokens in a packed micro-batch. A longer segment gets a micro-batch of its
    own. Each rank holds 1/`sequence_parallel` of the tokens. auto: as many as fit while the time
    model predicts a gain, at most 65,536; 8192 on a CPU. The number is halved when a step runs out
    of memory."""
    lr: float = knob(1e-6, gt=0, resumable=True)
    """Peak learning rate, after the warmup."""
    warmup_steps: int = knob(0, ge=0, resumable=True)
    """Number of steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = knob("constant", resumable=True)
    """Learning rate schedule after the warmup, over `run.steps`."""
    min_lr: float = knob(0.0, ge=0, resumable=True)
    """Final learning rate of the linear and cosine schedules."""
    weight_decay: float = knob(0.0, ge=0)
    """AdamW weight decay, applied to matrices only."""
    beta1: float = knob(0.9, ge=0, lt=1)
    """Adam β1, the decay rate for the mean of the gradient."""
    beta2: float = knob(0.95, ge=0, lt=1)
    """Adam β2, the decay rate for the mean of the squared gradient."""
    eps: float = knob(1e-8, gt=0)
    """Adam ε, added to the denominator."""
    grad_clip: float = knob(1.0, ge=0)
    """Maximum gradient norm; indexers of sparse attention have their own. 0: no clipping."""
    attention: Literal["sparse", "warm-up", "dense"] = "sparse"
    """How models with sparse attention are trained. Other models ignore it
    (docs/sparse-attention.md). sparse: train everything, which rollouts require because engines
    attend sparsely. warm-up: train only the indexers, from dense attention; a DeepSeek-V3 model
    gets random ones first. dense: train everything except the indexers, with dense attention."""
    indexer_loss: float = knob(1.0, ge=0)
    """Weight of the indexer loss (DeepSeek-V3.2, Eq. 3 and 4): summed over layers, averaged over
    the tokens of a step. It trains the indexers only. 0: leave them unchanged."""
    indexer_lr: float = knob(0.0, ge=0, resumable=True)
    """Peak learning rate of the indexers, with the warmup of `lr`. 0: `lr`."""
    indexer_schedule: Literal["same", "constant", "linear", "cosine"] = knob("same", resumable=True)
    """Learning rate schedule of the indexers after the warmup. The final rate of linear and cosine
    is in proportion to `min_lr`. same: `schedule`."""
    attention_kernels: Literal["auto", "torch", "flash4"] = knob("auto", resumable=True)
    """Attention kernels on GPUs. torch: PyTorch's FlashAttention-2. flash4: FlashAttention-4 on
    Hopper and Blackwell (with PyTorch 2.13), up to twice as fast on long contexts; not for latent
    attention. auto: flash4 for contexts of 4,096 tokens or more if the package is installed and
    passes a gradient check at start-up."""
    share_prompts: bool = knob(False, auto=True, resumable=True)
    """Compute the common prefix of a group's trajectories once per micro-batch where that makes a
    step shorter. The gradient is the same, with fewer tokens. The prefix needs at least 16 tokens
    and equal recorded routes. Not for trajectories of several contexts, latent or sparse attention,
    or `model.batch_invariant`. auto: on GPUs where supported; never on a CPU. docs/performance.md
    """
    activation_checkpointing: bool = knob(False, auto=True, resumable=True)
    """Recompute the activations of decoder layers in the backward pass, which takes less memory but
    about a third more compute. auto: if they would not fit, or only in micro-batches that are too
    small; never on a CPU."""
    keep_attention: bool = knob(False, auto=True, resumable=True)
    """With `activation_checkpointing` and `zero_stage` 0 to 2: keep the attention output instead of
    recomputing it. Costs one more layer input of memory and saves a seventh of the time at 65,536
    tokens. auto: for contexts of 4,096 tokens or more if it saves 2 % of a step and fits; never on
    a CPU or with `model.batch_invariant`."""
    compile: bool = knob(False, auto=True, resumable=True)
    """Apply torch.compile to the decoder layers except attention and experts (`zero_stage` 0 to 2).
    auto: if it saves more over the run's steps than its 20 s of start-up, for models whose norms
    use Keel's kernels; never on a CPU."""
    offload_optimizer: bool = knob(False, auto=True, resumable=True)
    """Keep master weights and optimizer state in host memory and update them there (ZeRO-Offload;
    needs `zero_stage` 1 or above). auto: if a step is 1.2 times as fast, or if nothing else
    fits; never on a CPU."""
    offload_while_sampling: bool = knob(True, auto=True, resumable=True)
    """With `rollout.time_share`: move optimizer state, reference policy and weights to host memory
    while the engine samples if it has no room for them, and optimizer state that activations have
    no room for. false: keep them on the GPU and free only the memory of the step itself. auto: only
    if the room is missing, or if the engine would lose more time than the copies take."""
    threads: int = knob(2, ge=1, resumable=True)
    """CPU: number of threads per rank."""
    publish_bucket_mib: int = knob(256, ge=1, resumable=True)
    """Bucket size in MiB for sending weights to the engines."""
    timeout_s: float = knob(1800.0, gt=0, resumable=True)
    """Timeout in seconds for one optimizer step, for writing or reading a checkpoint, for writing
    the model, and for sending weights (in addition to `rollout.update_timeout_s`). Raise it for
    large models on slow storage."""

    @property
    def of_indexers(self) -> Self:
        """Settings whose learning rate and schedule are those of the indexers."""
        lr = self.indexer_lr or self.lr
        min_lr = lr * (self.min_lr / self.lr)  # rounding cannot exceed lr
        own = self.schedule if self.indexer_schedule == "same" else self.indexer_schedule
        return replace(self, lr=lr, min_lr=min_lr, schedule=own)

    @property
    def keeps_attention(self) -> bool:
        """True if attention outputs are kept for the backward pass. Under ZeRO-3 they can't be,
        because the recomputation would gather weights a different number of times, which PyTorch's
        checkpointing rejects."""
        return self.activation_checkpointing and self.keep_attention and self.zero_stage != 3

    def flash4(self, longest: int) -> bool:
        """Return whether to use FlashAttention-4 for contexts of up to `longest` tokens. Does not
        check that the GPU and the installed packages support it."""
        if self.attention_kernels == "auto":
            return longest >= LONG
        return self.attention_kernels == "flash4"

    def check(self) -> None:
        rule = f"must be at most trainer.ranks = {self.ranks}"
        self.require(self.min_ranks <= self.ranks, "min_ranks", rule)
        rule = f"must divide trainer.ranks = {self.ranks}"
        for name in ("expert_parallel", "sequence_parallel", "hpz_partition_size"):
            self.require(self.ranks % getattr(self, name) == 0, name, rule)
        ok = self.hpz_partition_size == 1 or self.zero_stage == 3
        self.require(ok, "hpz_partition_size", "needs trainer.zero_stage 3")
        ok = self.hpz_partition_size == 1 or self.expert_parallel == 1
        rule = "must be 1 with trainer.expert_parallel, which DeepSpeed does not support with it"
        self.require(ok, "hpz_partition_size", rule)
        rule = "must be above 0 with trainer.attention: warm-up, which has no other loss"
        self.require(self.attention != "warm-up" or self.indexer_loss > 0, "indexer_loss", rule)
        ok = self.zero_stage > 0 or not self.offload_optimizer
        self.require(ok, "offload_optimizer", "needs trainer.zero_stage 1, 2 or 3")
        rule = "cannot be combined with trainer.zero_stage = 3. Use stage 2, or switch it off"
        self.require(self.zero_stage < 3 or not self.compile, "compile", rule)
        rule = f"must be at most trainer.lr = {self.lr}"
        self.require(self.min_lr <= self.lr, "min_lr", rule)

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel replicas. `sequence_parallel` ranks form a replica, and split the
        tokens of each of its micro-batches."""
        return self.ranks // self.sequence_parallel

    def used_zero_stage(self, *, float32: bool) -> int:
        """Return the ZeRO stage to use. In dtypes other than float32 it is at least 1, because at
        stage 0 DeepSpeed keeps no float32 master weights."""
        return self.zero_stage if float32 else max(1, self.zero_stage)

    def sums_in_float32(self, dtype: str) -> bool:
        """Return True if DeepSpeed's bfloat16 optimizer sums gradients in float32."""
        return dtype == "bfloat16" and self.zero_stage <= 1 and not self.offload_optimizer

    @property
    def bucket_elements(self) -> int:
        """Maximum number of elements in a gradient bucket. A single rank uses a smaller bucket,
        except under ZeRO-2 without an offloaded optimizer."""
        lone = self.ranks == 1 and (self.zero_stage != 2 or self.offload_optimizer)
        return _LONE_BUCKET_ELEMENTS if lone else _BUCKET_ELEMENTS

    @property
    def reading_ranks(self) -> int:
        """Number of ranks that read the model from disk: only rank 0 under ZeRO-3, and otherwise
        the first rank that holds each expert. DeepSpeed broadcasts the weights to the others."""
        return 1 if self.zero_stage == 3 else self.expert_parallel
