"""Checks whether a recipe suits the family of its model, before anything slow is imported."""

from __future__ import annotations

from keel.configs.schema import Config, ConfigError, TrainerConfig
from keel.configs.sections.model import TINY_MODEL

EXPERT_PARALLEL = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures that have an AutoEP preset in DeepSpeed and whose routes can be replayed."""
SPARSE_ATTENTION = "DeepseekV32ForCausalLM"
"""Architecture in which an indexer selects the tokens to attend to."""
_SERVED_LATENTS = (512, 576)
"""Widths of a latent cache for which vLLM has sparse attention kernels on GPUs."""
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM's CPU backend has an attention kernel."""
NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types that vLLM refuses to run in float16, because their activations overflow."""
FLOAT32_RESIDUAL = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types with pre-norm residual layers, both in vLLM and in transformers."""


def check_engine_dtype(config: Config, model_type: str) -> None:
    """Check that vLLM runs the model type in the recipe's dtype. Raises ConfigError if it does
    not."""
    if config.engine_dtype == "float16" and model_type in NOT_IN_FLOAT16:
        knob = "rollout.dtype" if config.rollout.dtype else "model.dtype"
        raise ConfigError(
            f"{knob} = 'float16': vLLM refuses models of type {model_type} in float16, which they "
            "overflow. Set it to bfloat16"
        )


def check_residual(config: Config, model_type: str) -> None:
    """Check that engines and trainer can sum the layers in float32. Raises ConfigError if they
    cannot."""
    if config.model.residual_dtype == "float32" and model_type not in FLOAT32_RESIDUAL:
        raise ConfigError(
            f"model.residual_dtype = 'float32': models of type {model_type} are not supported, "
            f"only {', '.join(FLOAT32_RESIDUAL)}. Leave it out"
        )


def check_engine_heads(config: Config, *, heads: int, head_size: int, gpu: bool) -> None:
    """Check that an engine can compute the attention heads and split them among its GPUs. Raises
    ConfigError if it cannot. `head_size` is 0 for a latent cache."""
    wide = config.rollout.tensor_parallel
    if gpu and heads % wide:
        raise ConfigError(
            f"rollout.tensor_parallel = {wide}: must divide the model's {heads} attention heads; "
            f"set it to {max(n for n in range(1, wide) if heads % n == 0)}"
        )
    if not gpu and wide > 1:
        raise ConfigError(
            f"rollout.tensor_parallel = {wide}: on a CPU an engine is one process. Set it to 1"
        )
    if gpu or head_size in (0, *_CPU_HEADS):
        return
    tiny = config.model.path == TINY_MODEL
    knob = "model.tiny.head_dim" if tiny else "model.path"
    value = head_size if tiny else f"{config.model.path!r} (head_dim {head_size} in config.json)"
    raise ConfigError(
        f"{knob} = {value}: on a CPU, vLLM supports head sizes {', '.join(map(str, _CPU_HEADS))}. "
        + ("Use one of these" if tiny else "Use another model, or a machine with a GPU")
    )


def check_engine_attention(config: Config, *, architecture: str, kv_width: int, gpu: bool) -> None:
    """Check the sparse attention of a model. Raises ConfigError if vLLM cannot serve it, or if it
    is trained as dense attention.

    `kv_width` is the number of cached elements per token and layer.
    """
    if architecture != SPARSE_ATTENTION:
        return
    if config.trainer.attention != "sparse":
        raise ConfigError(
            f"trainer.attention = {config.trainer.attention!r}: engines sample with sparse "
            "attention, so training must use it, too. Set it to sparse"
        )
    if gpu and kv_width in _SERVED_LATENTS:
        return
    reason = (
        f"its kernels need latent entries of {' or '.join(map(str, _SERVED_LATENTS))} elements "
        f"(kv_lora_rank + qk_rope_head_dim), and this model's have {kv_width}"
        if gpu
        else "it needs a GPU"
    )
    raise ConfigError(
        f"model.path = {config.model.path!r}: vLLM cannot serve the sparse attention of "
        f"{architecture} here, since {reason}"
    )


def check_warm_up(config: Config, *, architecture: str, top_k: int) -> None:
    """Check that a model has an indexer if the recipe warms one up. Raises ConfigError if it has
    none (`top_k` is 0)."""
    if config.trainer.attention == "warm-up" and not top_k:
        raise ConfigError(
            f"trainer.attention = 'warm-up': {architecture} (model.path = {config.model.path!r}) "
            f"has no indexer. Use a deepseek_v32 model ({SPARSE_ATTENTION}; for the tiny model, "
            "model.tiny.family=deepseek_v32), or leave trainer.attention out"
        )


def check_indexer_length(config: Config, *, top_k: int, longest: int) -> None:
    """Check that some text window is long enough to train the indexer's selection. Raises
    ConfigError if all are too short."""
    if not top_k or longest > top_k or config.trainer.attention == "dense":
        return
    limit = config.sft.max_context_tokens
    longer = "" if limit <= top_k else " with longer texts"
    smaller = ", or lower model.tiny.index_top_k" if config.model.path == TINY_MODEL else ""
    raise ConfigError(
        f"trainer.attention = {config.trainer.attention!r}: the longest window has {longest:,} "
        f"tokens, and the indexers select {top_k:,}, so there is nothing to learn. Use "
        f"sft.max_context_tokens above that{longer} (now {limit:,}){smaller}; "
        "trainer.attention=dense trains without indexers"
    )


def check_parallel(trainer: TrainerConfig, *, architecture: str, experts: int, heads: int) -> None:
    """Check that the model can be distributed as the recipe says. Raises ConfigError if it
    cannot."""
    check_expert_parallel(trainer.expert_parallel, architecture=architecture, experts=experts)
    check_sequence_parallel(trainer.sequence_parallel, architecture=architecture, heads=heads)


def check_attention_kernels(config: Config, *, gpu: bool, flash4: bool, machine: str) -> None:
    """Check that the hardware supports FlashAttention-4 if the recipe asks for it. Raises
    ConfigError if it does not.

    `flash4` says whether the GPU supports it.
    """
    if config.trainer.attention_kernels == "flash4" and not (gpu and flash4):
        raise ConfigError(
            "trainer.attention_kernels = 'flash4': FlashAttention-4 needs a Hopper or Blackwell "
            f"GPU, not {machine if gpu else 'a CPU'}. Leave it out (auto)"
        )


def no_sharing(config: Config, *, head_size: int) -> str:
    """Return why the trajectories in a group cannot share their prompt in training, or an empty
    string if they can."""
    if config.model.batch_invariant:
        return "not with model.batch_invariant"
    if not head_size:
        return "latent keys and values are too wide to copy"
    return ""


def check_share_prompts(config: Config, *, architecture: str, head_size: int) -> None:
    """Check that prompts can be shared. Raises ConfigError for a latent cache (`head_size` is
    0)."""
    if config.trainer.share_prompts and not head_size:
        raise ConfigError(
            f"trainer.share_prompts = true: the latent keys and values of {architecture} are too "
            "wide to copy into every context. Leave it out"
        )


def check_expert_parallel(size: int, *, architecture: str, experts: int) -> None:
    """Check that the `experts` in a layer can be split among `size` ranks. Raises ConfigError if
    they cannot."""
    if size == 1:
        return
    knob = f"trainer.expert_parallel = {size}"
    if not experts:
        raise ConfigError(f"{knob}: {architecture} is dense and has no experts. Set it to 1")
    if architecture not in EXPERT_PARALLEL:
        raise ConfigError(
            f"{knob}: DeepSpeed AutoEP does not support {architecture}, only "
            f"{', '.join(EXPERT_PARALLEL)}. Set it to 1"
        )
    if experts % size:
        raise ConfigError(f"{knob}: must divide the {experts} experts of a layer of {architecture}")


def check_sequence_parallel(size: int, *, architecture: str, heads: int) -> None:
    """Check that the attention heads can be split among `size` ranks. Raises ConfigError if they
    cannot."""
    knob = f"trainer.sequence_parallel = {size}"
    if size > 1 and architecture == SPARSE_ATTENTION:
        raise ConfigError(
            f"{knob}: the sparse attention of {architecture} needs a whole context on one rank. "
            "Set it to 1; trainer.activation_checkpointing saves the most memory"
        )
    if heads % size:
        raise ConfigError(f"{knob}: must divide the {heads} attention heads of {architecture}")
