"""Which models the trainer can spread over ranks. Imports no heavy library: the driver asks
before it starts anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.configs.schema import Config, ConfigError, TrainerConfig
from keel.configs.sections.model import TINY_MODEL

if TYPE_CHECKING:
    from keel.model.load import ModelFacts

EXPERT_PARALLEL = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Those that DeepSpeed AutoEP has a preset for and whose routes can be replayed."""

SPARSE_ATTENTION = "DeepseekV32ForCausalLM"
"""With an indexer that selects what is attended to."""
SERVED_LATENTS = (512, 576)
"""Numbers of a token's latent entry for which vLLM has kernels of sparse attention, on GPUs."""

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head for which vLLM's CPU backend has a kernel of attention."""

NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types that vLLM refuses to run in float16: their activations outgrow it."""

FLOAT32_RESIDUAL = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose layers are sums of a residual and a block's output, behind RMS norms, in vLLM
as in transformers."""


def check_engine_dtype(config: Config, model_type: str) -> None:
    """Raise `ConfigError` for a dtype that vLLM does not start an engine in. `model_type`: that of
    config.json."""
    if config.engine_dtype == "float16" and model_type in NOT_IN_FLOAT16:
        knob = "rollout.dtype" if config.rollout.dtype else "model.dtype"
        raise ConfigError(
            f"{knob} = 'float16': vLLM refuses it for models of type {model_type}, which are "
            "numerically unstable in it. Set it to bfloat16"
        )


def check_residual(config: Config, model_type: str) -> None:
    """Raise `ConfigError` for layers that are not known to add up in float32 in engines and trainer
    alike. `model_type`: as above."""
    if config.model.residual_dtype == "float32" and model_type not in FLOAT32_RESIDUAL:
        raise ConfigError(
            f"model.residual_dtype = 'float32': not for models of type {model_type}, only "
            f"{', '.join(FLOAT32_RESIDUAL)}. Leave it out"
        )


def check_engine_heads(config: Config, *, heads: int, head_size: int, gpu: bool) -> None:
    """Raise `ConfigError` for attention that vLLM's CPU backend has no kernel for, which it says
    when the first prompt comes, for engines of several processes there, and for heads that cannot
    be dealt out to the GPUs of an engine. `head_size`: 0 for a latent cache."""
    wide = config.rollout.tensor_parallel
    if gpu and heads % wide:
        raise ConfigError(
            f"rollout.tensor_parallel = {wide}: must divide the model's {heads} attention heads; "
            f"set it to {max(n for n in range(1, wide) if heads % n == 0)}"
        )
    if not gpu and wide > 1:
        raise ConfigError(
            f"rollout.tensor_parallel = {wide}: on a CPU an engine is one process, so it must be 1"
        )
    if gpu or head_size in (0, *CPU_HEADS):
        return
    tiny = config.model.path == TINY_MODEL
    knob = "model.tiny.head_dim" if tiny else "model.path"
    value = head_size if tiny else f"{config.model.path!r} (head_dim {head_size} in config.json)"
    raise ConfigError(
        f"{knob} = {value}: without a GPU, vLLM has attention for heads of "
        f"{', '.join(map(str, CPU_HEADS))} numbers alone. "
        + ("Set it to one of these" if tiny else "Take another model, or a machine with a GPU")
    )


def check_engine_attention(config: Config, *, architecture: str, kv_width: int, gpu: bool) -> None:
    """Raise `ConfigError` for sparse attention that vLLM cannot serve on this machine, or that is
    not trained as it is served. `kv_width`: numbers that an engine caches for each token and
    layer."""
    if architecture != SPARSE_ATTENTION:
        return
    if config.trainer.attention != "sparse":
        raise ConfigError(
            f"trainer.attention = {config.trainer.attention!r}: engines attend to what the "
            "indexers select, and rollouts are learned from as they were sampled. Set it to sparse"
        )
    if gpu and kv_width in SERVED_LATENTS:
        return
    why = (
        f"its kernels are for latent entries of {' and '.join(map(str, SERVED_LATENTS))} numbers "
        f"(kv_lora_rank + qk_rope_head_dim), and this model's have {kv_width}"
        if gpu
        else "it has sparse attention on GPUs only"
    )
    raise ConfigError(
        f"model.path = {config.model.path!r}: vLLM cannot serve the sparse attention of "
        f"{architecture} here, so there is nothing to sample rollouts with: {why}"
    )


def check_warm_up(config: Config, *, architecture: str, top_k: int) -> None:
    """Raise `ConfigError` for an indexer's warm-up on a model without one. `top_k`: tokens that an
    indexer selects, 0 where there is none."""
    if config.trainer.attention != "warm-up" or top_k:
        return
    raise ConfigError(
        f"trainer.attention = 'warm-up': {architecture} (model.path = {config.model.path!r}) has "
        f"no indexer to train. Name a model of the family deepseek_v32 ({SPARSE_ATTENTION}; of the "
        "tiny one, model.tiny.family=deepseek_v32), or leave trainer.attention out to "
        "train all of this one"
    )


def check_indexer_length(config: Config, *, top_k: int, longest: int) -> None:
    """Raise `ConfigError` for text that is too short to learn a selection from. `longest` window of
    it, in tokens."""
    if not top_k or longest > top_k or config.trainer.attention == "dense":
        return
    most = config.sft.max_context_tokens
    cure = (
        "sft.max_context_tokens above that"
        if most <= top_k
        else f"longer texts (sft.max_context_tokens = {most:,} would allow them)"
    )
    smaller = " or a smaller model.tiny.index_top_k" if config.model.path == TINY_MODEL else ""
    raise ConfigError(
        f"trainer.attention = {config.trainer.attention!r}: the longest window of text has "
        f"{longest:,} tokens, and the indexers select {top_k:,}, so all of it would be selected "
        f"and none learned to choose. It needs {cure}{smaller}; trainer.attention=dense trains "
        "without them"
    )


def check_parallel(trainer: TrainerConfig, *, architecture: str, experts: int, heads: int) -> None:
    """Raise `ConfigError` for a model that cannot be spread over ranks as the recipe says."""
    check_expert_parallel(trainer.expert_parallel, architecture=architecture, experts=experts)
    check_sequence_parallel(trainer.sequence_parallel, architecture=architecture, heads=heads)


def check_attention_kernels(config: Config, *, gpu: bool, flash4: bool, machine: str) -> None:
    """Raise `ConfigError` for kernels that are not for this machine; `flash4`: whether its GPUs are
    of the generations that FlashAttention-4 is for."""
    if config.trainer.attention_kernels != "flash4" or (gpu and flash4):
        return
    lacks = f"{machine} is of another generation" if gpu else "no GPU is here"
    raise ConfigError(
        "trainer.attention_kernels = 'flash4': FlashAttention-4 is for GPUs of Hopper's and "
        f"Blackwell's generations, and {lacks}. Leave it out (auto)"
    )


def no_sharing(config: Config, *, head_size: int) -> str:
    """Why trajectories of a group cannot have their prompt in common in training; empty: they can.
    head_size: 0 of keys and values that are kept as a latent."""
    if config.model.batch_invariant:
        return "not with model.batch_invariant"
    if not head_size:
        return "keys and values that are kept as a latent are too wide to be copied"
    return ""


def check_share_prompts(config: Config, *, architecture: str, head_size: int) -> None:
    """Raise `ConfigError` for a model whose layers cannot share a beginning. head_size: 0 of
    keys and values that are kept as a latent."""
    if config.trainer.share_prompts and not head_size:
        raise ConfigError(
            f"trainer.share_prompts = true: the attention of {architecture} keeps a latent, whose "
            "keys and values are too wide to be copied into every context. Leave it out"
        )


def check_expert_parallel(size: int, *, architecture: str, experts: int) -> None:
    """Raise `ConfigError` unless the experts can be spread over `size` ranks (1: always).

    `architecture`: name of the transformers class; `experts` of one MoE layer, 0 for a dense model.
    """
    if size == 1:
        return
    knob = f"trainer.expert_parallel = {size}"
    if not experts:
        raise ConfigError(f"{knob}: {architecture} is dense and has no experts. Set it to 1")
    if architecture not in EXPERT_PARALLEL:
        raise ConfigError(
            f"{knob}: DeepSpeed AutoEP cannot spread the experts of {architecture}; it can for "
            f"{', '.join(EXPERT_PARALLEL)}. Set it to 1"
        )
    if experts % size:
        raise ConfigError(f"{knob}: must divide the {experts} experts of a layer of {architecture}")


def check_sequence_parallel(size: int, *, architecture: str, heads: int) -> None:
    """Raise `ConfigError` unless the attention heads can be shared out to `size` ranks."""
    if size > 1 and architecture == SPARSE_ATTENTION:
        raise ConfigError(
            f"trainer.sequence_parallel = {size}: the sparse attention of {architecture} needs all "
            "tokens of a context on one rank. Set it to 1; trainer.activation_checkpointing saves "
            "the most memory"
        )
    if heads % size:
        raise ConfigError(
            f"trainer.sequence_parallel = {size}: must divide the {heads} attention heads of "
            f"{architecture}"
        )


def learned_parameters(config: Config, facts: ModelFacts) -> tuple[int, int]:
    """That have gradients and a state of the optimizer, and how many of them are routed experts:
    in an indexer's warm-up its own alone (`trainer.attention`)."""
    if config.trainer.attention == "warm-up":
        return facts.indexer_parameters, 0
    return facts.parameters, facts.expert_parameters
