"""Which models the trainer can spread over ranks. Imports no heavy library: the driver asks
before it starts anything."""

from __future__ import annotations

from keel.configs.schema import Config, ConfigError

EXPERT_PARALLEL = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Those that DeepSpeed AutoEP has a preset for and whose routes can be replayed."""

NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types that vLLM refuses to run in float16: their activations outgrow it."""


def check_engine_dtype(config: Config, model_type: str) -> None:
    """Raise `ConfigError` for a dtype that vLLM does not start an engine in. `model_type`: that of
    config.json."""
    if config.engine_dtype == "float16" and model_type in NOT_IN_FLOAT16:
        knob = "rollout.dtype" if config.rollout.dtype else "model.dtype"
        raise ConfigError(
            f"{knob} = 'float16': vLLM refuses it for models of type {model_type}, which are "
            "numerically unstable in it. Set it to bfloat16"
        )


def check_expert_parallel(size: int, *, architecture: str, experts: int) -> None:
    """Raise `ConfigError` unless the experts can be spread over `size` ranks (1: always).

    `architecture`: name of the transformers class; `experts` of one MoE layer, 0 for a dense model.
    """
    if size == 1:
        return
    knob = f"trainer.expert_parallel = {size}"
    if architecture not in EXPERT_PARALLEL:
        raise ConfigError(
            f"{knob}: DeepSpeed AutoEP cannot spread the experts of {architecture}; it can for "
            f"{', '.join(EXPERT_PARALLEL)}. Set it to 1"
        )
    if experts % size:
        raise ConfigError(f"{knob}: must divide the {experts} experts of a layer of {architecture}")


def check_sequence_parallel(size: int, *, architecture: str, heads: int) -> None:
    """Raise `ConfigError` unless the attention heads can be shared out to `size` ranks."""
    if heads % size:
        raise ConfigError(
            f"trainer.sequence_parallel = {size}: must divide the {heads} attention heads of "
            f"{architecture}"
        )
