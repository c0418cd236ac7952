"""Check whether a model can be trained, given its config and files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from keel.configs.schema import ConfigError, LoraConfig
from keel.model.attention import Segments, UnsupportedAttention, use_packed_attention
from keel.model.hub import (
    KNOWN,
    format_error,
    fp8_block,
    hub_options,
    local_folder,
    missing_weights,
    stored_tensors,
    tensors_named,
)
from keel.model.load import ModelFacts, facts_of, load_model_config, readable_tensors
from keel.model.logprobs import install_support_head
from keel.model.lora import MLP
from keel.model.routing import router_modules
from keel.model.sparse.attention import use_sparse_attention

_LAYER = re.compile(r".*?\.\d+\.")
_LAYER_LISTS = ("layers", "h")
"""Possible names of the list of decoder layers. GPT-2 uses "h"."""
_LAYER_NUMBERS = ("layer_idx", "layer_number")
_INDEXER = ".indexer."
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_ROWS = 256
_RENAMED = 0.01
"""Fraction of ids that may differ within a model family, for example because reserved tokens were
renamed."""


def trainable_facts(
    path: str, config: PreTrainedConfig, *, new_indexers: bool = False
) -> ModelFacts:
    """Compute facts about a model, and check that it can be trained. With `new_indexers`, the
    weights may lack all indexers. Raises ConfigError if the trainer does not support it, if
    transformers cannot build it, if its weights are quantized in an unsupported format, or if the
    weights at `path` do not match its config."""
    try:
        _check_trainable(path, config)
        fp8_block(path, config.to_dict())
        facts = facts_of(config)
    except ConfigError:
        raise
    except Exception as error:  # families raise anything
        raise ConfigError(
            f"model.path = {path!r}: models of type {config.model_type} are not supported "
            f"({type(error).__name__}: {format_error(error)}). {KNOWN}"
        ) from error
    if Path(path).is_dir() and not missing_weights(path):  # otherwise reported elsewhere
        _check_weights_fit(path, config, new_indexers=new_indexers)
    return facts


def lacks_indexers(path: str) -> bool:
    """Return True if a model has no indexers, by its weights or, if they are not on this machine,
    by its config."""
    folder = str(local_folder(path) or "")
    if not folder or missing_weights(folder):
        return load_model_config(path).model_type == "deepseek_v3"
    return not any(_INDEXER in name for name in stored_tensors(folder, "np"))


def _check_trainable(path: str, config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.get_text_config())
    try:
        router_modules(model)
        use_sparse_attention(model)
        use_packed_attention(model)
        install_support_head(model)
        decoder_layers(model)
        _try_packed(model)
    except ValueError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from error


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's decoder layers. Raises ValueError if the name of their list is unknown."""
    decoder = model.get_decoder()
    for name in _LAYER_LISTS:
        if isinstance(layers := getattr(decoder, name, None), nn.ModuleList):
            return [*layers]
    names = " or ".join(_LAYER_LISTS)
    raise ValueError(f"{type(model).__name__}: the decoder has no list of layers named {names}")


def _check_weights_fit(path: str, config: PreTrainedConfig, *, new_indexers: bool) -> None:
    """Check tensor names and shapes, because transformers would randomly initialize missing tensors
    and ignore unused ones."""
    if config.get_text_config() is not config:
        return
    tensors = readable_tensors(path, "np")
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    if mismatch := _find_mismatch(path, config, shapes, new_indexers=new_indexers):
        raise ConfigError(
            f"model.path = {path!r}: the weights do not match config.json (model_type "
            f"{config.model_type}, {config.num_hidden_layers} layers): {mismatch}. Download both "
            "from one source"
        )
    words = next((name for name in tensors if name.endswith(_EMBEDDING)), "")
    if getattr(config, "tie_word_embeddings", False) and _HEAD in tensors and words:
        head, embedding = (next(tensors_named(path, name, _ROWS)) for name in (_HEAD, words))
        if not torch.equal(head, embedding):
            raise ConfigError(
                f"model.path = {path!r}: config.json has tie_word_embeddings: true, but the "
                f"weights have a separate output layer ({_HEAD}), which only the trainer would "
                "use. Set tie_word_embeddings to false in config.json"
            )


def _find_mismatch(
    path: str,
    config: PreTrainedConfig,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    new_indexers: bool,
) -> str:
    config = deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the tensors are read dequantised
    try:
        with _silenced():
            model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None,
                config=config,
                state_dict={n: torch.empty(shape, device="meta") for n, shape in shapes.items()},
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError:  # transformers stacks the tensors of experts
        return "some experts are missing, or their tensors have different shapes"
    names = [*model.state_dict()]
    missing = sorted(report["missing_keys"])
    initialized = new_indexers and missing == sorted(name for name in names if _INDEXER in name)
    if missing and not initialized:
        return f"{len(missing)} of {len(names)} tensors are missing, such as {missing[0]}"
    for name, found, expected in sorted(report["mismatched_keys"]):
        return f"{name} has shape {list(found)}, not {list(expected)}"
    layers = {match[0] for name in names if (match := _LAYER.match(name))}
    unexpected: dict[str, list[str]] = {}
    for name in sorted(report["unexpected_keys"]):
        match = _LAYER.match(name)
        if match and match[0] in layers and name.endswith((".weight", ".bias")):
            unexpected.setdefault(name.removeprefix(match[0]), []).append(name)
    for name, *others in unexpected.values():
        everywhere = 1 + len(others) == len(layers)  # otherwise an addition to the model
        zero = any(not tensor.any() for tensor in tensors_named(path, name))
        if everywhere and not (name.endswith("bias") and zero):
            return f"the model has no tensor {name}"
    return ""


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress the progress bar and the report that transformers prints when it loads a model."""
    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _try_packed(model: PreTrainedModel) -> None:
    """Run the decoder on packed segments on the meta device, to find out which attention features
    it needs. Experts are skipped, because routing depends on data, and so are layers like an
    earlier one."""
    kinds: list[Any] = []
    for layer in decoder_layers(model):
        if (kind := _layer_kind(layer)) in kinds:
            layer.forward = _skip
        kinds.append(kind)
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.forward = _skip
    row = torch.zeros(1, 3, dtype=torch.long, device="meta")
    segments = Segments.of([2, 1], "meta")
    try:
        with torch.no_grad():
            model.eval().get_decoder()(
                input_ids=row, position_ids=row, use_cache=False, segments=segments
            )
    except UnsupportedAttention:
        raise
    except Exception:  # for example a family that reads values
        return


def _skip(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _layer_kind(layer: nn.Module) -> list[tuple[type[nn.Module], list[tuple[str, Any]]]]:
    """Return the types of a layer's modules and their settings, except the number of the layer."""
    return [
        (
            type(module),
            [
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, int | float | str | None) and name not in _LAYER_NUMBERS
            ],
        )
        for module in layer.modules()
    ]


def check_same_family(path: str, tokenizer: PreTrainedTokenizerBase, knob: str) -> None:
    """Raise ConfigError if a tokenizer's ids differ from those of the tokenizer at `path`. `knob`
    is the setting to name in the error."""
    try:
        local = AutoTokenizer.from_pretrained(path, **hub_options(path))
    except (OSError, ValueError):
        return
    tokens = {index: token for token, index in local.get_vocab().items()}
    shared = [(t, tokens[i], i) for t, i in tokenizer.get_vocab().items() if i in tokens]
    different = sorted((i, new, old) for new, old, i in shared if new != old)
    if len(different) > _RENAMED * len(shared):
        index, token, original = different[0]
        raise ConfigError(
            f"{knob}: the tokenizers of the run and of the model {path!r} differ in "
            f"{len(different):,} of {len(shared):,} ids (id {index} is {token!r} and "
            f"{original!r}). Use models and tokenizers of one family"
        )


def check_adapters(config: LoraConfig, facts: ModelFacts) -> None:
    """Raise ConfigError if the recipe's adapters can't be added to the model."""
    if config.enabled and facts.index_top_k:
        raise ConfigError(
            f"model.lora.rank = {config.rank}: {facts.architecture} has sparse attention, which "
            "cannot have adapters. Set it to 0"
        )
    if config.enabled and not facts.projections:
        raise ConfigError(
            f"model.lora.rank = {config.rank}: {facts.architecture} has no linear layers that can "
            "have adapters. Set it to 0"
        )
    known = {*facts.projections, *(MLP if facts.experts else ())}
    unknown = [name for name in config.targets if name not in known]
    if config.enabled and (unknown or not config.parameters(facts.projections)):
        raise ConfigError(
            f"model.lora.targets: {facts.architecture} has no layer "
            f"{' or '.join(unknown or config.targets)} that can have adapters. It has "
            f"{', '.join(facts.projections)}. Leave targets empty for all linear layers"
        )
    if config.rank > facts.hidden_size:
        raise ConfigError(
            f"model.lora.rank = {config.rank}: must be at most the hidden size, {facts.hidden_size}"
        )


def check_ids(token_ids: Sequence[int] | NDArray[np.int32], vocabulary: int, what: str) -> None:
    """Raise ConfigError if any of the token ids has no row in the embedding."""
    ids = np.asarray(token_ids, np.int64)
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if len(wrong):
        raise ConfigError(
            f"model.tokenizer: {what} has token id {wrong.max()}, but the model's vocabulary ends "
            f"at {vocabulary - 1}. Tokenizer and model do not match"
        )
