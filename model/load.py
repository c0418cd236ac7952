"""Load and check models and tokenizers, compute facts about a model, and yield its weights under
their checkpoint names."""

import hashlib
import json
import math
import os
import re
import resource
import select
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from jinja2 import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion

from keel.configs.schema import ConfigError
from keel.model.attention import LINEAR_FAMILIES
from keel.model.hub import (
    KNOWN,
    check_config,
    check_folder,
    check_path,
    check_tokenizer_files,
    format_error,
    fp8_block,
    hub_options,
    local_folder,
    stored_tensors,
    written_by_code,
)
from keel.model.layers.fused import fuses_experts, fuses_norms
from keel.model.lora import adapter_widths, is_adapted, merged_tensors
from keel.model.transformers_internals import float32_names

LOAD_FORMAT = "keel_fp8"
"""Name of vLLM's load format for these weights (keel/weights/vllm_patches.py)."""
SCALE = "_scale_inv"
"""Suffix that turns a weight's name into the name of its scales."""
_ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
Named = dict[str, Tensor]
Whole = Callable[[Named], AbstractContextManager[Named]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model, computed from its config without loading weights."""

    architecture: str
    layers: int
    moe_layer_ids: tuple[int, ...]
    experts: int
    """Number of routed experts in each MoE layer, or 0 for a dense model."""
    experts_per_token: int
    vocab_size: int
    hidden_size: int
    attention_heads: int
    max_context: int
    parameters: int
    """Number of parameters. A tied embedding counts once."""
    active_parameters: int
    """Number of parameters used per token, excluding experts that the token is not routed to."""
    tied: bool
    expert_parameters: int
    """Number of parameters in all routed experts, or 0 for a dense model."""
    attention_parameters: int
    attention_width: int
    """Number of query heads times the head size."""
    kv_width: int
    """Number of KV cache elements per token and layer."""
    kv_heads: int
    """Number of key heads, over which tensor parallelism can split the KV cache."""
    head_size: int = 0
    """Size of a key head, or 0 for a latent cache."""
    index_top_k: int = 0
    """Number of tokens that the sparse attention indexer selects, or 0 if there is no indexer."""
    index_width: int = 0
    """Size of an indexer's keys."""
    indexer_parameters: int = 0
    full_attention: bool = True
    """Whether every layer attends to all earlier tokens (see the function `full_attention`)."""
    linear_layers: int = 0
    linear_width: int = 0
    """Sum of the widths of queries, keys, values and gates in a layer with linear attention."""
    state_size: int = 0
    """Number of elements in the recurrent state of a layer with linear attention, per sequence."""
    row_inputs: int = 0
    """Greatest common divisor of the input sizes of the layers whose inputs tensor parallelism
    splits, excluding routed experts, or 0 if unknown."""
    fused_norms: bool = True
    """Whether RMS norms run as single kernels on GPUs (model/layers/fused.py)."""
    fused_experts: bool = True
    """Whether experts use Keel's kernels on GPUs. Meaningless for a dense model."""
    projections: Mapping[str, int] = field(default_factory=dict)
    """Sum of input and output widths over all layers with the same name, such as q_proj, or
    over all experts (`experts`). Only layers that may have a LoRA adapter count."""
    teacher_parameters: int = 0
    """Number of parameters in all of the recipe's teachers together (`data.sources[].teacher`)."""
    teacher_passes: float = 0.0
    """Cost of a forward pass of all teachers, in units of this model's forward pass."""
    balance_loss: float = 0.0
    """Weight of the load balancing loss, if the config enables it (`output_router_logits`)."""

    @property
    def moe_layers(self) -> int:
        return len(self.moe_layer_ids)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters in the embedding and the output layer. Tied ones count once."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    @property
    def expert_size(self) -> float:
        """Intermediate size of a routed expert, or 0 if there are no experts."""
        matrices = 3 * self.moe_layers * self.experts
        return self.expert_parameters / (matrices * self.hidden_size) if matrices else 0.0


def load_tokenizer(
    path: str, *, chats: bool = True, chat_template: str = ""
) -> PreTrainedTokenizerBase:
    """Load and check the tokenizer of a local folder or hub model. A chat template is required
    if `chats` is set, unless chats are formatted by code, as for DeepSeek-V3.2. A non-empty
    `chat_template` replaces the tokenizer's own. Raises ConfigError if the tokenizer is
    unusable."""
    check_path(path)
    check_tokenizer_files(path)
    _read_config(path, needed=False)  # transformers reads it, too
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **hub_options(path))
    except Exception as error:  # tokenizers raise anything
        raise _unreadable(f"tokenizer of {path!r}", error) from error
    if chat_template:
        tokenizer.chat_template = chat_template
        _check_template(tokenizer, "model.chat_template")
        _try_template(tokenizer)
    elif tokenizer.chat_template:
        _check_template(tokenizer, f"{path!r}")
    if chats and not tokenizer.chat_template and not written_by_code(tokenizer):
        raise ConfigError(
            f"the tokenizer of {path!r} has no chat template. Set model.tokenizer to an "
            "instruction-tuned model of the same family, set model.chat_template, or use prompts "
            "without one (data.sources[].raw: true, or source: text in sft.sources)"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {path!r} has no eos_token, so completions would never end"
        )
    return tokenizer


def tokenizer_with(chat_template: str, path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has already been checked, replacing its chat template if
    `chat_template` is not empty."""
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if chat_template:
        tokenizer.chat_template = chat_template
    return tokenizer


def _try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"model.chat_template{line}: {error}. Correct the template") from error
    if "Hello." not in str(text):
        raise ConfigError(
            "model.chat_template does not render the user's message. It must iterate `messages`"
        )


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that determines token ids. Returns "" if there is no tokenizer.json."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    # Truncation and padding are settings of the caller.
    state = json.loads(backend.to_str())
    content = {key: value for key, value in state.items() if key not in ("truncation", "padding")}
    text = json.dumps([content, tokenizer.chat_template], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def load_policy(
    path: str, dtype: torch.dtype | str, *, new_indexers: bool = False
) -> PreTrainedModel:
    """Load a causal language model from a local folder or the hub onto the CPU, dequantizing FP8
    weights. With `new_indexers`, missing indexers are drawn from PyTorch's global generator, which
    must have the same seed on all ranks. Raises ConfigError if the model can't be loaded or if any
    weights are NaN or infinite."""
    config = load_model_config(path, new_indexers=new_indexers)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options = hub_options(path)
    try:
        if fp8_block(path, config.to_dict()):
            model = _load_fp8(path, config, kind)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=kind, **options)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot load weights from {path!r}: {format_error(error)}") from error
    for name, parameter in model.named_parameters():
        low, high = torch.aminmax(parameter.detach()) if parameter.numel() else (0.0, 0.0)
        if not math.isfinite(high) or not math.isfinite(low):
            raise ConfigError(
                f"{path!r}: {name} is not finite in {dtype}. Download the weights again, or set "
                "model.dtype"
            )
    return model


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A quantized tensor on disk. Indexing it reads and dequantizes it on the fly."""

    weight: Any
    scale: Any
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, rows: Any) -> Tensor:
        return _dequantise(self.weight[...], self.scale[...], self.block)[rows]


def _dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantize FP8 weights to a float32 matrix [R, C]. Each block of size `block` has its own
    scale. The last block of a row or column may be smaller."""
    rows, columns = weight.shape
    scale = scale.float().repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * scale.repeat_interleave(block[0], 0)[:rows]


def readable_tensors(path: str, framework: str = "pt") -> dict[str, Any]:
    """Return the dequantized tensors of a folder or downloaded hub model by checkpoint name. Each
    tensor is read only when it is indexed (`[...]`). The weights must be complete. If `framework`
    is "np", only names and shapes can be read. Raises ConfigError if an FP8 weight has no scales or
    its scales have the wrong shape."""
    folder = local_folder(path) or Path(path)
    block = fp8_block(path, json.loads((folder / "config.json").read_text("utf-8")))
    tensors = stored_tensors(str(folder), framework)
    scales = {name: tensors.pop(name) for name in [*tensors] if block and name.endswith(SCALE)}
    for name, weight in tensors.items():
        if weight.get_dtype() != "F8_E4M3":
            continue
        scale, shape = scales.get(f"{name}{SCALE}"), weight.get_shape()
        needed = [-(-size // of) for size, of in zip(shape, block or (), strict=False)]
        if block is None or scale is None or len(shape) != 2 or scale.get_shape() != needed:
            raise ConfigError(
                f"{path!r}: {name} is in FP8, but has no {name}{SCALE} with one scale for each "
                f"block of {block} (weight_block_size in config.json). Download the model again"
            )
        tensors[name] = _Blocks(weight, scale, block)
    return tensors


def _load_fp8(path: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load an FP8 model and dequantize its weights, as if the model had never been quantized."""
    # transformers' own dequantisation (5.19) refuses weights whose last blocks are smaller.
    del config.quantization_config
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, dtype=dtype, state_dict=readable_tensors(path)
    )
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path, **hub_options(path))
    return model


def checkpoint_tensors(
    model: PreTrainedModel, *, whole: Whole | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and detached tensor of everything that `save_pretrained` would write. Stacked
    experts are split one module at a time, so that at most one module is in memory twice. Tied
    weights are yielded only once. See `module_tensors` for `whole`."""
    for local in module_tensors(model, whole=whole):
        yield from as_checkpoint(model, local).items()


def as_checkpoint(model: PreTrainedModel, local: Named) -> Named:
    return revert_weight_conversion(model, dict(local))


def module_tensors(model: PreTrainedModel, *, whole: Whole | None = None) -> Iterator[Named]:
    """Yield a dict for each module with its own tensors (not those of submodules), detached and
    keyed by full name. If weights are sharded across ranks, `whole` is a context manager that
    gathers a module's tensors. Gathering is collective, so every rank must iterate to the end."""
    for part in _own_tensors(model):
        with whole(part) if whole else nullcontext(part) as tensors:
            yield {name: tensor.detach() for name, tensor in tensors.items()}


def _own_tensors(model: nn.Module) -> Iterator[Named]:
    seen: set[int] = set()
    saved = model.state_dict(keep_vars=True).keys()  # without non-persistent buffers
    adapted: tuple[str, ...] = ()
    for prefix, module in model.named_modules():
        if prefix.startswith(adapted):
            continue
        if is_adapted(module):
            adapted = (*adapted, f"{prefix}.")
            yield merged_tensors(prefix, module)
            continue
        tensors: dict[str, Tensor] = dict(module.named_parameters(prefix, recurse=False))
        buffers = dict(module.named_buffers(prefix, recurse=False))
        tensors |= {name: buffer for name, buffer in buffers.items() if name in saved}
        fresh = {name: tensor for name, tensor in tensors.items() if id(tensor) not in seen}
        seen.update(map(id, tensors.values()))
        if fresh:
            yield fresh


def precision(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    """Return a function that casts a checkpoint tensor with a given name to `dtype`. Integers are
    left unchanged, as are weights that the model family keeps in float32, such as DeepSeek-V3's
    routing bias."""
    names = float32_names(model)
    exact = re.compile(rf"(^|\.)({'|'.join(map(re.escape, names))})($|\.)") if names else None

    def convert(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or (exact and exact.search(name)):
            return tensor
        return tensor.to(dtype)

    return convert


def load_model_config(path: str, *, new_indexers: bool = False) -> PreTrainedConfig:
    """Load a model's config. With `new_indexers`, a DeepSeek-V3 model becomes a DeepSeek-V3.2 model
    with indexers of the published sizes, unless config.json has others. Raises ConfigError if it is
    not a causal language model."""
    check_path(path)
    check_folder(path)
    content = _read_config(path)
    extended = new_indexers and content["model_type"] == "deepseek_v3"
    if extended:
        if not (content.get("rope_interleave", True) and content.get("q_lora_rank", 1)):
            raise ConfigError(
                f"{path!r}: only DeepSeek-V3 models with q_lora_rank and rope_interleave: true in "
                "config.json can get indexers by a warm-up"
            )
        content = {name: value for name, value in content.items() if name != "auto_map"}
        content |= {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
    if (kind := content["model_type"]) not in CONFIG_MAPPING and "auto_map" not in content:
        raise ConfigError(f"{path!r}: models of type {kind} are not in transformers. {KNOWN}")
    try:
        if extended:
            config = CONFIG_MAPPING[kind].from_dict(content)
        else:
            config = AutoConfig.from_pretrained(path, **hub_options(path))
    except Exception as error:  # families raise anything
        raise _unreadable(f"configuration of {path!r}", error) from error
    if kind == "deepseek_v32" and type(config).__name__ == "DeepseekV3Config":
        raise ConfigError(
            f"{path!r}: vLLM has replaced transformers' class of {kind} in this process, which has "
            "no sparse attention. Load the model in a process that has not started an engine"
        )
    _check_causal(config, path)
    return config


_FACTS: dict[str, ModelFacts] = {}


def facts_of(config: PreTrainedConfig) -> ModelFacts:
    """Compute facts about a causal language model on the meta device. Results are cached."""
    key = f"{type(config).__qualname__} {config.to_json_string(use_diff=False)}"
    if key in _FACTS:
        return _FACTS[key]
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    routed = {name: p for name, p in parameters.items() if ".experts." in name and p.ndim == 3}
    experts = next((p.shape[0] for p in routed.values()), 0)
    per_token = _experts_per_token(text) if experts else 0
    idle = sum(p.numel() // experts * (experts - per_token) for p in routed.values())
    layer_ids = {int(match[1]) for name in routed if (match := re.search(r"\.(\d+)\.", name))}
    row_inputs = 0
    for name, module in model.get_decoder().named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in _ROW_PARALLEL:
            row_inputs = math.gcd(row_inputs, module.in_features)
    balanced = experts and getattr(text, "output_router_logits", False)
    kv_heads, kv_width, head_size = _cache_shape(text)
    linear_layers, linear_width, state_size = _linear_shape(text)
    indexers = sum(p.numel() for name, p in parameters.items() if ".indexer." in name)
    facts = _FACTS[key] = ModelFacts(
        architecture=type(model).__name__,
        layers=text.num_hidden_layers,
        moe_layer_ids=tuple(sorted(layer_ids)),
        experts=experts,
        experts_per_token=per_token,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        attention_heads=text.num_attention_heads,
        max_context=text.max_position_embeddings,
        parameters=total,
        active_parameters=total - idle,
        tied=is_tied(model),
        expert_parameters=sum(p.numel() for p in routed.values()),
        attention_parameters=sum(p.numel() for name, p in parameters.items() if "attn" in name),
        attention_width=text.num_attention_heads * head_size,
        kv_width=kv_width,
        head_size=0 if getattr(text, "kv_lora_rank", None) else head_size,
        kv_heads=kv_heads,
        index_top_k=(indexers and getattr(text, "index_topk", None)) or 0,
        index_width=(indexers and getattr(text, "index_head_dim", None)) or 0,
        indexer_parameters=indexers,
        full_attention=full_attention(text),
        linear_layers=linear_layers,
        linear_width=linear_width,
        state_size=state_size,
        row_inputs=row_inputs,
        fused_norms=fuses_norms(model),
        fused_experts=fuses_experts(model),
        projections=adapter_widths(model, experts=experts > 0),
        balance_loss=float(getattr(text, "router_aux_loss_coef", 0.0)) if balanced else 0.0,
    )
    return facts


def is_tied(model: PreTrainedModel) -> bool:
    """Return True if the output layer shares the embedding's weights."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def full_attention(config: PreTrainedConfig) -> bool:
    """Return True if every layer attends to all earlier tokens, without windows or a latent cache,
    so that an engine needs one KV cache slot per token."""
    text = config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None)
    if kinds := getattr(text, "layer_types", None):
        return set(kinds) == {"full_attention"} and not latent
    return not latent and not getattr(text, "sliding_window", None)


def _cache_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    if latent := getattr(config, "kv_lora_rank", None):  # multi-head latent attention
        rope, nope = config.qk_rope_head_dim, config.qk_nope_head_dim
        return 1, latent + rope, (rope + nope + config.v_head_dim) // 2
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads, 2 * kv_heads * size, size


def _linear_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    if config.model_type not in LINEAR_FAMILIES:
        return 0, 0, 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    layers = config.layer_types.count("linear_attention")
    return layers, 2 * (keys + values), values * config.linear_key_head_dim


def _experts_per_token(config: PreTrainedConfig) -> int:
    for name in _TOP_K_NAMES:
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise ConfigError(
        f"{config.model_type} has experts, but its config.json has none of "
        f"{', '.join(_TOP_K_NAMES)}"
    )


def _unreadable(what: str, error: Exception) -> ConfigError:
    if "trust_remote_code" in str(error):
        reason = "needs custom code, which Keel does not run. Use an architecture of transformers"
    else:
        reason = f"could not be read: {format_error(error)}"
    return ConfigError(f"the {what} {reason}")


def _read_config(path: str, *, needed: bool = True) -> dict[str, Any]:
    try:
        content, _ = PreTrainedConfig.get_config_dict(path, **hub_options(path))
        if not isinstance(content, dict):
            raise ValueError("config.json is not a mapping")
    except Exception as error:  # files and the hub raise anything
        if not needed and isinstance(error, OSError):
            return {}
        raise _unreadable(f"configuration of {path!r}", error) from error
    if needed or "model_type" in content:
        check_config(path, content)
    return content


def _check_causal(config: PreTrainedConfig, path: str) -> None:
    names = config.architectures or []
    causal = not names or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    if type(config.get_text_config()) not in MODEL_FOR_CAUSAL_LM_MAPPING or not causal:
        cure = "Use one whose architecture ends in ForCausalLM"
        if config.get_text_config().model_type in LINEAR_FAMILIES:
            cure = "Save its text part, and use that folder (docs/models.md)"
        raise ConfigError(
            f"{path!r} is not a text-only causal language model (model_type {config.model_type!r}, "
            f"architectures {names}). {cure}"
        )


_CPU_S = 10
_WALL_S = 30.0
_MEMORY = 2**30
"""Memory limit for rendering a template in bytes, in addition to the memory that the process
already uses."""
_MAX_TEXT = 2**20

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_QUESTION = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello."}]
_TURNS = [*_QUESTION, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
_WITH_CALL = [
    *_QUESTION,
    {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [_CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "c1", "content": "1"},
    {"role": "assistant", "content": "a"},
]
_CONVERSATIONS = (_QUESTION[1:], _QUESTION, _TURNS * 4, _WITH_CALL)


def _check_template(tokenizer: Any, name: str) -> None:
    """Render a few conversations under limits on time, memory and text length, because a chat
    template is code that ships with an untrusted model. Templates that raise an error still
    pass."""
    child = os.fork()  # it inherits the tokenizer, and runs only pure Python
    if child == 0:
        _render_limited(tokenizer)
    descriptor = os.pidfd_open(child)
    if not select.select([descriptor], [], [], _WALL_S)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise ConfigError(
            f"the chat template of {name} takes more than {_CPU_S} s, {_MEMORY // 2**20:,} MiB or "
            f"{_MAX_TEXT:,} characters for a few short conversations. Set another one in "
            "model.chat_template, or use another model"
        )


def _render_limited(tokenizer: Any) -> NoReturn:
    code = 1
    try:
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        spent = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
        limits = {resource.RLIMIT_AS: used + _MEMORY, resource.RLIMIT_CPU: spent + _CPU_S}
        for kind, limit in limits.items():
            _, most = resource.getrlimit(kind)
            limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(kind, (limit, most))
        code = int(sum(map(len, _render_all(tokenizer))) > _MAX_TEXT)
    finally:
        os._exit(code)


def _render_all(tokenizer: Any) -> Iterator[str]:
    for conversation in _CONVERSATIONS:
        for tools in (None, [_TOOL]):
            for options in ({}, {"enable_thinking": False, "thinking": False}):
                try:
                    yield tokenizer.apply_chat_template(
                        conversation,
                        tools=tools,
                        add_generation_prompt=conversation[-1]["role"] == "user",
                        tokenize=False,
                        **options,
                    )
                except MemoryError:
                    raise
                except Exception:  # rendering a real conversation reports it
                    continue
