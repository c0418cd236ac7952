"""Check that Keel supports a recipe for the model's architecture. Each check raises ConfigError if
it fails."""

from importlib.metadata import version
from importlib.util import find_spec

from keel.configs.schema import Config, ConfigError, TrainerConfig
from keel.configs.sections.model import TINY_MODEL
from keel.model.load import ModelFacts
from keel.trainer.placement.hardware import GpuSpec

_EXPERT_PARALLEL = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures that have a DeepSpeed AutoEP preset and support routing replay."""
_SPARSE_ATTENTION = "DeepseekV32ForCausalLM"
"""The architecture in which an indexer selects the tokens to attend to."""
_LINEAR_ATTENTION = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Architectures with linear attention layers, which carry a state from token to token."""
_SERVED_LATENTS = (512, 576)
"""Widths of latent caches that vLLM's sparse attention kernels support on GPUs."""
_FP8_BLOCK = 128
"""Size of the groups in which inputs of FP8 layers share a scale."""
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention kernel supports on CPUs."""
_NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types that vLLM refuses to run in float16 because their activations overflow."""
_FLOAT32_RESIDUAL = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types with pre-norm residual layers in both vLLM and transformers."""


def check_model_type(config: Config, model_type: str) -> None:
    """Check that this model type supports the dtypes used for the engine and the residual
    stream."""
    if config.engine_dtype == "float16" and model_type in _NOT_IN_FLOAT16:
        knob = "rollout.dtype" if config.rollout.dtype else "model.dtype"
        raise ConfigError(
            f"{knob} = 'float16': vLLM refuses models of type {model_type} in float16, which they "
            "overflow. Set it to bfloat16"
        )
    if config.model.residual_dtype == "float32" and model_type not in _FLOAT32_RESIDUAL:
        raise ConfigError(
            f"model.residual_dtype = 'float32': models of type {model_type} are not supported, "
            f"only {', '.join(_FLOAT32_RESIDUAL)}. Leave it out"
        )


def check_engine(config: Config, facts: ModelFacts, *, gpu: bool, fp8: bool = True) -> None:
    """Check that vLLM supports the model's attention, unless an endpoint serves it, and that
    training uses sparse attention if the engines do. `fp8` says if the GPUs have FP8 units."""
    knob, wide = f"model.path = {config.model.path!r}", config.rollout.tensor_parallel
    if facts.architecture == _SPARSE_ATTENTION:
        if config.trainer.attention != "sparse":
            raise ConfigError(
                f"trainer.attention = {config.trainer.attention!r}: engines sample with sparse "
                "attention, so training must use it, too. Set it to sparse"
            )
        if not gpu or facts.kv_width not in _SERVED_LATENTS:
            raise ConfigError(
                f"{knob}: vLLM serves the sparse attention of {facts.architecture} only on GPUs, "
                f"with latent entries of {' or '.join(map(str, _SERVED_LATENTS))} elements "
                f"(kv_lora_rank + qk_rope_head_dim); this model's have {facts.kv_width}"
            )
    if config.endpoint.base_url:
        return
    if gpu and facts.attention_heads % wide:
        raise ConfigError(
            f"rollout.tensor_parallel = {wide}: must divide the model's {facts.attention_heads} "
            "attention heads"
        )
    if config.rollout.expert_parallel and not facts.experts:
        raise ConfigError(
            f"rollout.expert_parallel = True: {facts.architecture} has no experts. Leave it out"
        )
    if config.rollout.expert_parallel and facts.experts % wide:
        raise ConfigError(
            f"rollout.tensor_parallel = {wide}: with rollout.expert_parallel, it must divide the "
            f"{facts.experts} experts of a layer"
        )
    if config.algorithm.keep_selection:
        _check_selection(config, facts)
    if config.rollout.draft_tokens:
        _check_drafts(config, facts, gpu=gpu)
    if config.rollout.quantization:
        _check_quantization(config, facts, fp8=gpu and fp8)
    if not gpu and wide > 1:
        raise ConfigError(
            f"rollout.tensor_parallel = {wide}: on a CPU an engine is one process. Set it to 1"
        )
    if not gpu and facts.head_size not in (0, *_CPU_HEADS):  # 0: a latent cache
        knob = "model.tiny.head_dim" if config.model.path == TINY_MODEL else "model.path"
        raise ConfigError(
            f"{knob}: the head size is {facts.head_size} (head_dim), and on a CPU vLLM supports "
            f"only {', '.join(map(str, _CPU_HEADS))}. Change it, or use a machine with a GPU"
        )
    if not gpu and facts.architecture.startswith("Qwen3_5") and find_spec("torchvision") is None:
        raise ConfigError(
            f"{knob}: vLLM's {facts.architecture} needs torchvision, in the version for PyTorch "
            f"{version('torch')}. Install it, or use a machine with a GPU"
        )


def _check_selection(config: Config, facts: ModelFacts) -> None:
    if not facts.index_top_k:
        raise ConfigError(
            f"algorithm.keep_selection = True: {facts.architecture} has no indexer, "
            "so there are no selections to replay. Leave it out"
        )
    if config.rollout.recorder == "packed":
        raise ConfigError(
            "rollout.recorder = 'packed': does not record selections (algorithm.keep_selection). "
            "Leave it out"
        )


def _check_drafts(config: Config, facts: ModelFacts, *, gpu: bool) -> None:
    rollout = config.rollout
    unsupported = facts.architecture in (*_LINEAR_ATTENTION, _SPARSE_ATTENTION)
    for wrong, rule in (
        (not gpu, "needs a GPU"),
        (unsupported, f"does not support {facts.architecture}"),
        (rollout.recorder not in ("auto", "native"), "needs rollout.recorder: auto or native"),
        (config.model.batch_invariant, "does not support model.batch_invariant"),
    ):
        if wrong:
            raise ConfigError(
                f"rollout.draft_tokens = {rollout.draft_tokens}: {rule}. Otherwise, set it to 0"
            )


def _check_quantization(config: Config, facts: ModelFacts, *, fp8: bool) -> None:
    rollout, knob = config.rollout, "rollout.quantization = 'fp8'"
    if not fp8:
        raise ConfigError(
            f"{knob}: needs a GPU with FP8 units (Ada, Hopper or newer). Leave it out"
        )
    if facts.hidden_size % _FP8_BLOCK:
        raise ConfigError(
            f"{knob}: the hidden size of {facts.architecture}, {facts.hidden_size}, must be a "
            f"multiple of {_FP8_BLOCK}. Leave it out"
        )
    lower = "Leave" if facts.row_inputs % _FP8_BLOCK else "Lower it, or leave"
    if facts.row_inputs % (_FP8_BLOCK * rollout.tensor_parallel):
        raise ConfigError(
            f"{knob}: the input sizes of {facts.architecture}'s layers are multiples of "
            f"{facts.row_inputs}, and each of rollout.tensor_parallel = {rollout.tensor_parallel} "
            f"GPUs must hold a multiple of {_FP8_BLOCK}. {lower} out rollout.quantization"
        )
    # vLLM pads other experts, and then an update keeps the experts of all layers until it ends.
    if facts.expert_size % _FP8_BLOCK:
        raise ConfigError(
            f"{knob}: the intermediate size of {facts.architecture}'s experts, "
            f"{facts.expert_size:g}, must be a multiple of {_FP8_BLOCK}. Leave it out"
        )
    if facts.expert_size % (_FP8_BLOCK * rollout.tensor_parallel) and not rollout.expert_parallel:
        raise ConfigError(
            f"{knob}: the intermediate size of {facts.architecture}'s experts is "
            f"{facts.expert_size:g}, and each of rollout.tensor_parallel = "
            f"{rollout.tensor_parallel} GPUs must hold a multiple of {_FP8_BLOCK}. Set "
            "rollout.expert_parallel: true, or lower rollout.tensor_parallel"
        )


def check_indexer_length(config: Config, facts: ModelFacts, *, longest: int) -> None:
    """Check that the windows are longer than the number of tokens that the indexers select.
    Otherwise, the indexers have nothing to learn."""
    top_k = facts.index_top_k
    if top_k and longest <= top_k and config.trainer.attention != "dense":
        raise ConfigError(
            f"trainer.attention = {config.trainer.attention!r}: the longest window has {longest:,} "
            f"tokens, and the indexers select {top_k:,}, so there is nothing to learn. Raise "
            "sft.max_context_tokens, with long texts, or set trainer.attention: dense"
        )


def no_sharing_reason(config: Config, facts: ModelFacts) -> str:
    """Return why training can't share a group's prompt, or an empty string if it can."""
    if config.model.batch_invariant:
        return "not with model.batch_invariant"
    if facts.architecture in _LINEAR_ATTENTION:
        return "the state of linear attention would have to be copied to every completion"
    return "" if facts.head_size else "latent keys and values are too wide to copy"


def check_trainer(config: Config, facts: ModelFacts, spec: GpuSpec, *, gpu: bool) -> None:
    trainer, algorithm, name = config.trainer, config.algorithm, config.model.path
    if config.max_context > facts.max_context:
        raise ConfigError(
            f"{config.max_context_source}, but the context of {name} has {facts.max_context} "
            "tokens. Lower it"
        )
    if facts.moe_layers and not algorithm.keep_routing and not algorithm.allow_unsound:
        raise ConfigError(
            f"algorithm.keep_routing = False: {name} is a mixture of experts "
            f"({facts.moe_layers} layers), and engine and trainer would choose different experts. "
            "Switch it on"
        )
    if trainer.attention_kernels == "flash4" and not facts.head_size:
        raise ConfigError(
            "trainer.attention_kernels = 'flash4': not for the latent attention of "
            f"{facts.architecture} (model.path = {name!r}). Leave it out"
        )
    if trainer.attention_kernels == "flash4" and not (gpu and spec.flash4):
        raise ConfigError(
            "trainer.attention_kernels = 'flash4': FlashAttention-4 needs a Hopper or Blackwell "
            f"GPU, not {spec.name if gpu else 'a CPU'}. Leave it out"
        )
    if trainer.attention == "warm-up" and not facts.index_top_k:
        raise ConfigError(
            f"trainer.attention = 'warm-up': {facts.architecture} (model.path = {name!r}) has no "
            "indexer. Use a deepseek_v3 or deepseek_v32 model (for the tiny model, "
            "model.tiny.family=deepseek_v32), or leave trainer.attention out"
        )
    if trainer.share_prompts and (reason := no_sharing_reason(config, facts)):
        raise ConfigError(f"trainer.share_prompts = true: {reason}. Leave it out")
    _check_parallel(trainer, facts)


def _check_parallel(trainer: TrainerConfig, facts: ModelFacts) -> None:
    size, architecture = trainer.expert_parallel, facts.architecture
    knob = f"trainer.expert_parallel = {size}"
    if size > 1 and not facts.experts:
        raise ConfigError(f"{knob}: {architecture} is dense and has no experts. Set it to 1")
    if size > 1 and architecture not in _EXPERT_PARALLEL:
        raise ConfigError(
            f"{knob}: DeepSpeed AutoEP does not support {architecture}, only "
            f"{', '.join(_EXPERT_PARALLEL)}. Set it to 1"
        )
    if facts.experts % size:
        raise ConfigError(
            f"{knob}: must divide the {facts.experts} experts of a layer of {architecture}"
        )
    size = trainer.sequence_parallel
    knob = f"trainer.sequence_parallel = {size}"
    if size > 1 and architecture in _LINEAR_ATTENTION:
        raise ConfigError(
            f"{knob}: the linear attention of {architecture} needs a whole trajectory on one rank. "
            "Set it to 1; trainer.activation_checkpointing saves the most memory"
        )
    # Sparse attention gathers the keys of a row instead of splitting its heads.
    if facts.attention_heads % size and not facts.index_top_k:
        raise ConfigError(
            f"{knob}: must divide the {facts.attention_heads} attention heads of {architecture}"
        )


_OLD_STEPS = 16
"""Number of optimizer steps since sampling after which a completion counts as old. A lag of 0 is
harmless and a lag of 28 is harmful (docs/stability.md)."""


def stale_mask_warning(config: Config) -> str:
    """Return a warning if the recipe trains on stale completions with nothing but sampling masks to
    correct for it."""
    algorithm, sampling = config.algorithm, config.rollout.sampling
    oldest = algorithm.publish_every - 1 + algorithm.max_lag
    oldest *= algorithm.updates_per_batch
    masked = sampling.top_p < 1 and algorithm.keep_sampling_mask and not algorithm.kept_mass_coef
    if not config.data.sources or not masked or oldest < _OLD_STEPS:
        return ""
    return (
        f"algorithm.kept_mass_coef = 0: completions are up to {oldest} optimizer steps old "
        "(publish_every, max_lag, updates_per_batch), and no ratio sees the probability that "
        f"the policy moves out of their sampling masks (top_p = {sampling.top_p:g}). Set it to "
        "1, or watch sampling/kept_mass"
    )
