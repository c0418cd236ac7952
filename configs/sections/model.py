"""`model`: the model to train."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keel.configs.sections.base import Section, knob

TINY_MODEL = "tiny"
"""Value of `model.path` for the small model that Keel builds itself."""
EXPERTS = "experts"
"""Value in `model.lora.targets` for the routed experts of all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartConfig(Section, path="model.tiny.cold_start"):
    """Settings for the tiny model's supervised warm-up on generated solutions."""

    max_seconds: float = knob(3600.0, gt=0, resumable=True)
    """Timeout in seconds. A slower cold start fails, because a model cut short would be a different
    starting point. A minute is typical."""
    steps: int = knob(320, ge=0)
    """Number of optimizer steps, about 0.1 seconds each. 0: keep the random weights."""
    batch_size: int = knob(64, ge=1)
    """Number of solutions per step."""
    questions: int = knob(16384, ge=1)
    """Number of questions to generate over all sources. A longer cold start repeats them."""
    lr: float = knob(5e-3, gt=0)
    """Peak learning rate."""
    worked_fraction: float = knob(0.45, ge=0, le=1)
    """Fraction of correct, worked-out solutions in the last part. The others skip the work and are
    wrong, which leaves room for reinforcement learning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelConfig(Section, path="model.tiny"):
    """Shape of the tiny mixture-of-experts model. Its random weights depend on the run's seed."""

    family: Literal["qwen3_moe", "deepseek_v32"] = "qwen3_moe"
    """Architecture. deepseek_v32 has latent and sparse attention. No engine serves it at this size,
    so it can only be trained on given text (docs/sparse-attention.md)."""
    hidden_size: int = knob(64, ge=32)
    """Hidden size, a multiple of 32."""
    layers: int = knob(3, ge=1)
    """Number of decoder layers, each with a mixture of experts."""
    heads: int = knob(4, ge=1)
    """Number of attention heads per layer."""
    kv_heads: int = knob(2, ge=1)
    """qwen3_moe: number of key and value heads. It must divide `heads`."""
    head_dim: int = knob(32, ge=1)
    """Size of one attention head."""
    latent_size: int = knob(64, ge=1)
    """deepseek_v32: size of the latents for queries and for keys and values, without the half head
    of rotary embedding."""
    index_heads: int = knob(4, ge=1)
    """deepseek_v32: number of indexer heads, of `head_dim` each."""
    index_top_k: int = knob(64, ge=1)
    """deepseek_v32: number of tokens that each token attends to."""
    experts: int = knob(8, ge=1)
    """Number of experts per layer."""
    experts_per_token: int = knob(2, ge=1)
    """Number of experts that each token is routed to."""
    expert_size: int = knob(64, ge=32)
    """Intermediate size of one expert, a multiple of 32 for the CPU kernel."""
    initializer_range: float = knob(0.05, gt=0, le=1)
    """Standard deviation of the random weights. Use about 0.02 for hidden sizes of 512 and more."""
    phrases: tuple[str, ...] = ()
    """Texts that become one token each, such as tool descriptions. All other text is one token per
    byte. This shortens conversations to what a small model can handle."""
    max_context: int = knob(512, ge=32)
    """Maximum sequence length (prompt and completion) in tokens."""
    cache_dir: str = knob("", resumable=True)
    """Folder for cold-started models. Empty: `keel` in the user's cache folder."""
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)

    def check(self) -> None:
        for name in ("hidden_size", "expert_size"):
            self.require(getattr(self, name) % 32 == 0, name, "must be a multiple of 32")
        ok = all(phrase and phrase.isascii() for phrase in self.phrases)
        self.require(ok, "phrases", "must be non-empty ASCII texts")
        ok = self.family == "qwen3_moe" or self.head_dim % 4 == 0
        self.require(ok, "head_dim", "must be a multiple of 4 for deepseek_v32")
        rule = f"must divide model.tiny.heads = {self.heads}"
        self.require(self.heads % self.kv_heads == 0, "kv_heads", rule)
        rule = f"must be at most model.tiny.experts = {self.experts}"
        self.require(self.experts_per_token <= self.experts, "experts_per_token", rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(Section, path="model.lora"):
    """Settings for low-rank adapters, which train a small fraction of the parameters."""

    rank: int = knob(0, ge=0)
    """Rank of the adapters. 0: train all parameters."""
    alpha: float = knob(32.0, gt=0)
    """Scale of the adapters: their output is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers with adapters, such as q_proj. Empty: all in attention and, in
    dense models, in MLPs. In a mixture of experts: attention; add `experts` for the routed experts.
    Each expert has adapters of its own."""
    dropout: float = 0.0
    """Must be 0, because engines sample from the merged weights, which have no dropout."""

    def check(self) -> None:
        ok = all(name.isidentifier() for name in self.targets)
        rule = "must be names of linear layers, such as q_proj, or empty for all of them"
        self.require(ok, "targets", rule)
        rule = "must be 0, because engines sample from merged weights, which have no dropout"
        self.require(self.dropout == 0, "dropout", rule)

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    @property
    def adapts_experts(self) -> bool:
        return self.enabled and EXPERTS in self.targets

    def names(self, projections: Mapping[str, int]) -> list[str]:
        """Return the names of the layers with adapters. `projections` is the model's
        `ModelFacts.projections`."""
        linear = [name for name in projections if name != EXPERTS]
        return [name for name in self.targets or linear if name in projections]

    def parameters(self, projections: Mapping[str, int]) -> int:
        """Return the number of adapter parameters."""
        return self.rank * sum(projections[name] for name in self.names(projections))


Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Section, path="model"):
    """Settings for the model, its tokenizer and its precision."""

    path: str = TINY_MODEL
    """Local folder or hub name, or `tiny` for a small model that needs no download."""
    tokenizer: str = ""
    """Tokenizer folder or hub name. Empty: the model's."""
    chat_template: str = ""
    """Jinja chat template, as text or as a file, to replace the tokenizer's. The run stores its
    text, and the exported model includes it."""
    thinking_marks: tuple[str, ...] = ()
    """Opening and closing mark of the model's reasoning, as in `["<think>", "</think>"]`. Empty:
    detected from the chat template and the tokenizer. Rewards always see `<think>` and
    `</think>`."""
    dtype: Literal["float32", "bfloat16", "float16"] = knob("bfloat16", auto=True)
    """Precision of the engine's weights (unless `rollout.dtype` is set) and of the trainer's
    compute on a GPU. Master weights, and the trainer on a CPU, are always float32. auto: bfloat16,
    or float32 on a CPU without bfloat16 instructions; a resumed run keeps its own. float16 rounds
    eight times less than bfloat16, so engine and trainer differ less (docs/stability.md), but
    overflows at 65,504: the loss is scaled, and steps with overflowing gradients are skipped."""
    batch_invariant: bool = False
    """Use vLLM's batch-invariant kernels in engines and trainer. Hidden states on the same weights
    are then bit-identical, so probability ratios are 1 except for rounding in the float32 head.
    Works with Llama, Qwen2, Qwen3 and Qwen3-MoE on GPUs, and is slower (docs/stability.md)."""
    residual_dtype: Literal["model", "float32"] = "model"
    """Precision of the residual stream in engines and trainer. float32 avoids rounding at each
    addition, so engine and trainer differ less (docs/stability.md), but takes slightly more time
    and memory. Works with Llama, Mistral, Mixtral, Qwen2 and Qwen3 if each engine has one GPU."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)

    def check(self) -> None:
        self.require(bool(self.path), "path", "must name a folder or a hub model")
        self.require(self.path != "embedded", "path", f"renamed to {TINY_MODEL}")
        if self.path == TINY_MODEL:
            for name in ("tokenizer", "thinking_marks", "chat_template"):
                self.require(not getattr(self, name), name, "cannot be set with model.path: tiny")
        if self.batch_invariant:
            rule = "must be model with model.batch_invariant, whose kernels add in model.dtype"
            self.require(self.residual_dtype == "model", "residual_dtype", rule)
            rule = "needs heads of 128, which the tiny model does not have"
            self.require(self.path != TINY_MODEL, "batch_invariant", rule)
            rule = "needs model.dtype bfloat16 or float16"
            self.require(self.dtype != "float32", "batch_invariant", rule)
        if self.lora.enabled:
            self.require(
                not self.batch_invariant, "batch_invariant", "must be false with model.lora"
            )
            rule = "must be model with model.lora"
            self.require(self.residual_dtype == "model", "residual_dtype", rule)
        marks = {mark for mark in self.thinking_marks if mark.strip()}
        ok = not self.thinking_marks or len(marks) == len(self.thinking_marks) == 2
        rule = 'must be two different texts such as ["<think>", "</think>"]'
        self.require(ok, "thinking_marks", rule)

    @property
    def wide_residual(self) -> bool:
        """True if the residual stream has higher precision than the inputs and outputs of the
        blocks."""
        return self.residual_dtype == "float32" != self.dtype
