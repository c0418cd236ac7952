"""Which model is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from keel.configs.sections.base import require

TINY_MODEL = "tiny"
"""The model that needs no download, by its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartConfig:
    """Supervised warm-up of the tiny model on generated solutions."""

    max_seconds: float = 3600.0
    """Seconds; a minute is usual, on a busy machine many more. A slower cold start fails: a model
    cut short would start from somewhere else."""
    steps: int = 320
    """Optimizer steps, about a tenth of a second each; 0: leave the weights random."""
    batch_size: int = 64
    """Solutions per step."""
    questions: int = 16384
    """Questions generated over all sources; a longer cold start repeats them."""
    lr: float = 5e-3
    """Learning rate of the cold start, at its peak."""
    worked_fraction: float = 0.45
    """Fraction of the solutions in the last part that are worked out and right. The others skip the
    working and are wrong: that is what is left for reinforcement learning."""

    def __post_init__(self) -> None:
        knob = "model.tiny.cold_start"
        require(
            0 <= self.worked_fraction <= 1,
            f"{knob}.worked_fraction",
            self.worked_fraction,
            "must be in [0, 1]",
        )
        require(
            self.max_seconds > 0, f"{knob}.max_seconds", self.max_seconds, "must be positive (s)"
        )
        require(self.steps >= 0, f"{knob}.steps", self.steps, "must not be negative")
        for name in ("batch_size", "questions"):
            require(getattr(self, name) >= 1, f"{knob}.{name}", getattr(self, name), "must be >= 1")
        require(self.lr > 0, f"{knob}.lr", self.lr, "must be positive")


COUNTS = (
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "latent_size",
    "index_heads",
    "index_top_k",
    "experts",
    "experts_per_token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelConfig:
    """Shape of the small mixture of experts that is built from the run's seed."""

    family: Literal["qwen3_moe", "deepseek_v32"] = "qwen3_moe"
    """deepseek_v32: latent and sparse attention. No engine serves it at this size, so it is for the
    trainer's side alone (docs/sparse-attention.md)."""
    hidden_size: int = 64
    """Numbers of a token's hidden state; a multiple of 32."""
    layers: int = 3
    """Decoder layers, each with a mixture of experts."""
    heads: int = 4
    """Attention heads of a layer."""
    kv_heads: int = 2
    """qwen3_moe"""
    head_dim: int = 32
    """Numbers of one head's queries, keys and values."""
    latent_size: int = 64
    """deepseek_v32: numbers of the latent that queries are made from, and of that of keys and
    values; a half head of rotary embedding comes beside it."""
    index_heads: int = 4
    """deepseek_v32: heads of the indexer, of `head_dim` each."""
    index_top_k: int = 64
    """deepseek_v32: tokens that are attended to."""
    experts: int = 8
    """Experts of a layer."""
    experts_per_token: int = 2
    """Experts that each token is routed to."""
    expert_size: int = 64
    """Intermediate size of one expert; the CPU kernel wants multiples of 32."""
    initializer_range: float = 0.05
    """Standard deviation of the random weights; about 0.02 suits a hidden size of 512 and more."""
    phrases: tuple[str, ...] = ()
    """Texts that are one token each, such as a tool's description or the fixed words of a task,
    where all else is a token a byte: conversations become short enough for so small a model."""
    max_context: int = 512
    """Longest sequence, prompt and completion together, in tokens."""
    cache_dir: str = ""
    """Where cold-started models are kept; empty: `keel` under the user's cache folder."""
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)

    def __post_init__(self) -> None:
        knob = "model.tiny"
        for name in ("hidden_size", "expert_size"):
            value = getattr(self, name)
            require(
                value >= 32 and value % 32 == 0,
                f"{knob}.{name}",
                value,
                "must be a multiple of 32 (the CPU expert kernel works in blocks of 32)",
            )
        for name in COUNTS:
            require(getattr(self, name) >= 1, f"{knob}.{name}", getattr(self, name), "must be >= 1")
        for phrase in self.phrases:
            require(
                bool(phrase) and phrase.isascii(),
                f"{knob}.phrases",
                phrase,
                "must be text, and ASCII: a byte beyond that is part of a character",
            )
        require(
            self.family == "qwen3_moe" or self.head_dim % 4 == 0,
            f"{knob}.head_dim",
            self.head_dim,
            "must be a multiple of 4 for deepseek_v32: half of it is turned in pairs",
        )
        require(
            self.heads % self.kv_heads == 0,
            f"{knob}.kv_heads",
            self.kv_heads,
            f"must divide {knob}.heads = {self.heads}",
        )
        require(
            self.experts_per_token <= self.experts,
            f"{knob}.experts_per_token",
            self.experts_per_token,
            f"must be at most {knob}.experts = {self.experts}",
        )
        require(
            0 < self.initializer_range <= 1,
            f"{knob}.initializer_range",
            self.initializer_range,
            "must be in (0, 1]",
        )
        require(self.max_context >= 32, f"{knob}.max_context", self.max_context, "must be >= 32")


Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained, and in which precision."""

    path: str = TINY_MODEL
    """A local folder, a hub name, or `tiny` for the small model that needs no download."""
    tokenizer: str = ""
    """Tokenizer folder or hub name; empty: the model's own."""
    chat_template: str = ""
    """A Jinja template in place of the tokenizer's: its text, or a file. The run keeps the text,
    and the model that it exports has it."""
    thinking_marks: tuple[str, ...] = ()
    """The two texts that open and close the model's thinking, as in `["<think>", "</think>"]`;
    empty: those of its family, by the chat template and the tokenizer. Rewards see `<think>` and
    `</think>` in their place."""
    dtype: Dtype = "bfloat16"
    """Precision of the engine's weights (but see `rollout.dtype`) and of the trainer's compute on a
    GPU; master weights, and the trainer on a CPU, are always float32. auto: bfloat16, and float32
    on a CPU without bfloat16 instructions; a run that goes on keeps its own. float16 is eight times
    as exact as bfloat16, so engine and trainer differ less (docs/stability.md), but ends at 65,504:
    the loss is scaled, a step whose gradients overflow is skipped, and a model with larger
    activations needs bfloat16."""
    batch_invariant: bool = False
    """Engines run vLLM's batch-invariant kernels and the trainer the same ones: on the same weights
    a token's hidden states are equal to the last bit, so ratios are 1 but for the head's rounding
    in float32. For Llama, Qwen2 and Qwen3 on GPUs; slower (docs/stability.md)."""
    residual_dtype: Literal["model", "float32"] = "model"
    """Of the residual stream, to which blocks add their output, in engines and trainer. float32: it
    is not rounded at each sum, so the two differ less (docs/stability.md), for a little more time
    and memory. For Llama, Mistral, Mixtral, Qwen2 and Qwen3, one GPU an engine."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)

    def __post_init__(self) -> None:
        require(
            not self.batch_invariant or self.residual_dtype == "model",
            "model.residual_dtype",
            self.residual_dtype,
            "must be model with model.batch_invariant: its kernels add up in model.dtype, the same "
            "bits on both sides",
        )
        require(
            not self.batch_invariant or self.path != "tiny",
            "model.batch_invariant",
            self.batch_invariant,
            "is for dense models of Llama's, Qwen2's and Qwen3's kind, and the tiny one is a "
            "mixture of experts; leave it out, or set model.path",
        )
        require(
            not self.batch_invariant or self.dtype != "float32",
            "model.batch_invariant",
            self.batch_invariant,
            "needs model.dtype bfloat16 or float16: there are no such kernels for float32",
        )
        require(bool(self.path), "model.path", self.path, "must name a folder or a hub model")
        require(self.path != "embedded", "model.path", self.path, f"renamed to {TINY_MODEL}")
        require(
            self.path != "tiny" or not self.tokenizer,
            "model.tokenizer",
            self.tokenizer,
            "the tiny model has one of its own; leave it empty, or set model.path",
        )
        require(
            not self.thinking_marks
            or (len(set(self.thinking_marks)) == 2 and all(map(str.strip, self.thinking_marks))),
            "model.thinking_marks",
            self.thinking_marks,
            'must be two different texts, [open, close], such as ["<think>", "</think>"]',
        )
        require(
            self.path != "tiny" or not self.thinking_marks,
            "model.thinking_marks",
            self.thinking_marks,
            "the tiny model has its own; leave it empty, or set model.path",
        )
        require(
            self.path != "tiny" or not self.chat_template,
            "model.chat_template",
            self.chat_template,
            "the tiny model has one of its own; leave it empty, or set model.path",
        )

    @property
    def wide_residual(self) -> bool:
        """Whether the residual stream is wider than what blocks take and give."""
        return self.residual_dtype == "float32" != self.dtype
