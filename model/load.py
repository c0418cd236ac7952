"""Models and tokenizers by path, facts about a model, and weights under their checkpoint names."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion

from keel.configs.schema import ConfigError
from keel.model.config_file import MOST_BYTES, check_config, one_line
from keel.model.hub import (
    KNOWN,
    check_folder,
    check_path,
    check_tokenizer_files,
    hub_options,
    written_by_code,
)
from keel.model.layers.fused import fuses_experts, fuses_norms
from keel.model.template_probe import check_template
from keel.model.transformers_internals import always_float32

_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
Named = dict[str, Tensor]
Whole = Callable[[Named], AbstractContextManager[Named]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's configuration says, without its weights."""

    architecture: str
    layers: int
    moe_layer_ids: tuple[int, ...]
    """Which of the layers hold experts; the others are dense."""
    experts: int
    """Routed experts of a MoE layer; 0: the model is dense."""
    experts_per_token: int
    vocab_size: int
    hidden_size: int
    attention_heads: int
    """Of the query; those of key and value may be fewer."""
    max_context: int
    """Tokens."""
    parameters: int
    """A tied embedding counts once."""
    active_parameters: int
    """Parameters that one token meets: all but the experts it is not sent to."""
    tied: bool
    """The output layer shares the embedding's weights."""
    expert_parameters: int
    """Parameters of all routed experts; 0: the model is dense."""
    attention_parameters: int
    attention_width: int
    """Numbers that the heads of a layer compute with for each token: heads × size of a head."""
    kv_width: int
    """Numbers that an engine caches for each token and layer."""
    kv_heads: int
    """Parts that an engine's GPUs can share the cache out in; 1 for a latent cache, which each of
    them holds whole."""
    head_size: int = 0
    """Numbers of a key; 0: the cache is latent."""
    index_top_k: int = 0
    """Tokens that the indexer of sparse attention selects; 0: it has none."""
    indexer_parameters: int = 0
    """Of all indexers."""
    full_attention: bool = True
    """See the function `full_attention`."""
    fused_norms: bool = True
    """RMS norms are one kernel each on a GPU (model/layers/fused.py)."""
    fused_experts: bool = True
    """Experts are Keel's own on a GPU; without meaning for a dense model."""
    balance_loss: float = 0.0
    """Weight of the loss that its configuration has transformers add in training, for experts that
    are used alike (`output_router_logits`)."""

    @property
    def moe_layers(self) -> int:
        return len(self.moe_layer_ids)


def load_tokenizer(
    path: str, *, chats: bool = True, chat_template: str = ""
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or hub model. chats: it has to write them. chat_template: by
    this template, if it is not empty.

    Raises:
        ConfigError: there is none at `path`, it has no end-of-turn token, or, with `chats`, no chat
            template and is not of DeepSeek-V3.2's family, whose chats are written by code; or the
            template that is given is none.
    """
    check_path(path)
    check_tokenizer_files(path)
    if not Path(path).is_dir() or Path(path, "config.json").is_file():
        _read_config(path, needed=False)  # transformers reads it with a tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **hub_options(path))
    except Exception as error:  # the code of some hundred tokenizers, in its own words
        raise ConfigError(f"the tokenizer of {path!r} {_unread(error)}") from error
    if chat_template:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template:
        check_template(tokenizer, "model.chat_template" if chat_template else f"{path!r}")
    if chat_template:
        _try_template(tokenizer)
    if chats and not tokenizer.chat_template and not written_by_code(tokenizer):
        raise ConfigError(
            f"the tokenizer of {path!r} has no chat template, and chats are asked for. Name the "
            "tokenizer of an instruction-tuned model of the same family in model.tokenizer, give a "
            "template (model.chat_template), or have prompts go without (data.sources[].raw: true; "
            "of sft.sources, source: text has no chats)"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {path!r} has no eos_token: completions would never end"
        )
    return tokenizer


def tokenizer_with(chat_template: str, path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub model that has been checked. chat_template: in place of its
    own; empty: its own."""
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if chat_template:
        tokenizer.chat_template = chat_template
    return tokenizer


def _try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError for a chat template that cannot be read or writes no conversation."""
    asked = [{"role": "user", "content": "Hello."}]
    try:
        text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"model.chat_template{line}: {error}; correct the template") from error
    if "Hello." not in str(text):
        raise ConfigError(
            "model.chat_template: does not show what the user says: it has to go through `messages`"
        )


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that give the same ids to texts and to conversations; empty for one
    without a tokenizer.json."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    # Truncation and padding are settings of a caller's.
    written = json.loads(backend.to_str())
    content = {key: value for key, value in written.items() if key not in ("truncation", "padding")}
    text = json.dumps([content, tokenizer.chat_template], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def load_policy(path: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """The causal language model of a local folder or hub model, on the CPU.

    `dtype`: of the weights in memory (`torch.bfloat16` or its name).

    Raises:
        ConfigError: nothing can be loaded from `path`, it is not a causal language model, or some
            of its weights are NaN or infinite.
    """
    config = load_model_config(path)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options = hub_options(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=kind, **options)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"no weights could be loaded from {path!r}: {one_line(error)}") from error
    for name, parameter in model.named_parameters():
        low, high = torch.aminmax(parameter.detach()) if parameter.numel() else (0.0, 0.0)
        if not math.isfinite(high) or not math.isfinite(low):
            raise ConfigError(
                f"{path!r}: {name} has numbers that are not finite in {dtype}: the weights are "
                "damaged, or too large for this type; get them again, or set model.dtype"
            )
    return model


def checkpoint_tensors(
    model: PreTrainedModel, *, whole: Whole | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that `save_pretrained` would write, under the same name, detached.

    In memory a layer's experts are one tensor; in a checkpoint each expert has its own. They are
    taken apart one module at a time, so no more than one module's weights exist twice.
    A tied weight comes once. `whole`: see `module_tensors`.
    """
    for own in module_tensors(model, whole=whole):
        yield from as_checkpoint(model, own).items()


def as_checkpoint(model: PreTrainedModel, own: Named) -> Named:
    """One module's own tensors as `save_pretrained` would write them."""
    return revert_weight_conversion(model, dict(own))


def module_tensors(model: PreTrainedModel, *, whole: Whole | None = None) -> Iterator[Named]:
    """The tensors of each module itself, detached, by full name; modules without any are left out.

    `whole`: for weights that are spread over ranks, a context that gives the tensors of one module
    whole and under transformers' names. Collective, so every rank must then iterate to the end.
    """
    for part in _own_tensors(model):
        with whole(part) if whole else nullcontext(part) as tensors:
            yield {name: tensor.detach() for name, tensor in tensors.items()}


def precision(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    """(checkpoint name, tensor) → the tensor in `dtype`, if it holds floats.

    What the family keeps in float32 beside weights of any dtype stays as it is. DeepSeek-V3 adds a
    bias to the scores that choose experts: in bfloat16 most of it would be equal.
    """
    names = always_float32(model)
    exact = re.compile(rf"(^|\.)({'|'.join(map(re.escape, names))})($|\.)") if names else None

    def convert(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or (exact and exact.search(name)):
            return tensor
        return tensor.to(dtype)

    return convert


def load_model_config(path: str) -> PreTrainedConfig:
    """The config.json of a local folder or hub model.

    Raises:
        ConfigError: there is no readable config.json, or it is not a causal language model's.
    """
    config = _load_config(path)
    check_causal(config, path)
    return config


_FACTS: dict[str, ModelFacts] = {}


def facts_of(config: PreTrainedConfig) -> ModelFacts:
    """Facts about the causal language model that `config` describes. Allocates no weights: counts
    are those of the model on torch's `meta` device, once in a process, which takes half a second.

    Raises:
        ConfigError: a mixture of experts whose experts per token are not found in `config`.
    """
    key = as_text(config)
    if key not in _FACTS:
        _FACTS[key] = _found(config)
    return _FACTS[key]


def as_text(config: PreTrainedConfig) -> str:
    """The same text, the same model."""
    return f"{type(config).__qualname__} {config.to_json_string(use_diff=False)}"


def _found(config: PreTrainedConfig) -> ModelFacts:
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    parameters = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    routed = {name: p for name, p in parameters.items() if ".experts." in name and p.ndim == 3}
    experts = next((parameter.shape[0] for parameter in routed.values()), 0)
    per_token = _experts_per_token(text) if experts else 0
    idle = sum(p.numel() // experts * (experts - per_token) for p in routed.values())
    layer_ids = {int(match[1]) for name in routed if (match := re.search(r"\.(\d+)\.", name))}
    attention = sum(p.numel() for name, p in parameters.items() if "attn" in name)
    heads, (kv_heads, kv_width, head_size) = text.num_attention_heads, _cache_shape(text)
    return ModelFacts(
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
        expert_parameters=sum(parameter.numel() for parameter in routed.values()),
        attention_parameters=attention,
        attention_width=heads * head_size,
        kv_width=kv_width,
        head_size=0 if getattr(text, "kv_lora_rank", None) else head_size,
        kv_heads=kv_heads,
        index_top_k=getattr(text, "index_topk", None) or 0,
        indexer_parameters=sum(p.numel() for name, p in parameters.items() if ".indexer." in name),
        full_attention=full_attention(text),
        fused_norms=fuses_norms(model),
        fused_experts=fuses_experts(model),
        balance_loss=_balance_loss(text) if experts else 0.0,
    )


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output layer shares the embedding's weights."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def full_attention(config: PreTrainedConfig) -> bool:
    """Whether every layer attends to all earlier tokens, by keys and values of their own: an engine
    then has one slot of its cache for each token. Not so with windows or a latent cache."""
    text = config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None)
    if kinds := getattr(text, "layer_types", None):
        return set(kinds) == {"full_attention"} and not latent
    return not latent and not getattr(text, "sliding_window", None)


def _own_tensors(model: nn.Module) -> Iterator[Named]:
    """What each module itself adds to the state dict, by full name. Shared tensors come once."""
    seen: set[int] = set()
    saved = model.state_dict(keep_vars=True).keys()  # not all buffers are
    for prefix, module in model.named_modules():
        own: dict[str, Tensor] = dict(module.named_parameters(prefix, recurse=False))
        own |= {
            name: buffer
            for name, buffer in module.named_buffers(prefix, recurse=False)
            if name in saved
        }
        fresh = {name: tensor for name, tensor in own.items() if id(tensor) not in seen}
        seen.update(map(id, own.values()))
        if fresh:
            yield fresh


def _cache_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Heads of the key-value cache, its numbers a token and layer, and the mean size of a query's
    and a value's head."""
    if latent := getattr(config, "kv_lora_rank", None):  # multi-head latent attention
        rope, nope = config.qk_rope_head_dim, config.qk_nope_head_dim
        return 1, latent + rope, (rope + nope + config.v_head_dim) // 2
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads, 2 * kv_heads * size, size


def _balance_loss(config: PreTrainedConfig) -> float:
    asked = getattr(config, "output_router_logits", False)
    return float(getattr(config, "router_aux_loss_coef", 0.0)) if asked else 0.0


def _experts_per_token(config: PreTrainedConfig) -> int:
    for name in _TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise ConfigError(
        f"a {config.model_type} model has experts, but its config.json has none of "
        f"{', '.join(_TOP_K_NAMES)}"
    )


def _unread(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            "is code of its own, and Keel runs none that comes with a model; take a model whose "
            "architecture transformers has"
        )
    return f"could not be read: {one_line(error)}"


def _read_config(path: str, *, needed: bool = True) -> dict[str, Any]:
    """The checked content of config.json; empty where there is none and it is not `needed`.
    Raises ConfigError."""
    file = Path(path, "config.json")
    if file.is_file() and file.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path!r}: config.json has {file.stat().st_size:,} bytes, not a model's")
    try:
        content, _ = PreTrainedConfig.get_config_dict(path, **hub_options(path))
        if not isinstance(content, dict):
            raise ValueError("config.json is not a mapping")
    except Exception as error:  # whatever reading a file or asking the hub ends in
        if not needed and isinstance(error, OSError):
            return {}
        raise ConfigError(f"the configuration of {path!r} {_unread(error)}") from error
    if needed or "model_type" in content:
        check_config(path, content)
    return content


def _load_config(path: str) -> PreTrainedConfig:
    check_path(path)
    check_folder(path)
    content = _read_config(path)
    kind, coded = content["model_type"], "auto_map" in content
    if kind not in CONFIG_MAPPING and not coded:
        raise ConfigError(
            f"{path!r}: models of type {kind} are not known here: transformers has no such. {KNOWN}"
        )
    try:
        return AutoConfig.from_pretrained(path, **hub_options(path))
    except Exception as error:  # the code of some two hundred families, in its own words
        raise ConfigError(f"the configuration of {path!r} {_unread(error)}") from error


def check_causal(config: PreTrainedConfig, path: str) -> None:
    """Known to transformers as a causal model, and not saved as something else."""
    saved_as = config.architectures or []
    causal = not saved_as or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in saved_as)
    if type(config.get_text_config()) not in MODEL_FOR_CAUSAL_LM_MAPPING or not causal:
        raise ConfigError(
            f"{path!r} is not a causal language model of text alone (model_type "
            f"{config.model_type!r}, architectures {saved_as}); name one whose architecture ends "
            "in ForCausalLM"
        )
