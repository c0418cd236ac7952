"""What cannot be trained is refused from config and tokenizer, before an engine starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import Parameter
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from keel.configs.schema import ConfigError
from keel.model.attention import Segments, UnsupportedAttention, use_packed_attention
from keel.model.config_file import check_quantised, one_line
from keel.model.head.module import install_support_head
from keel.model.hub import (
    KNOWN,
    hub_options,
    is_zero,
    missing_weights,
    shapes_of,
    tensors_called,
)
from keel.model.load import ModelFacts, as_text, facts_of
from keel.model.routing.routers import router_modules
from keel.model.sparse.attention import use_sparse_attention
from keel.model.transformers_internals import left_out, loaded_as

LAYER = re.compile(r".*?\.\d+\.")
"""The part of a tensor's name that says which layer it is of."""
LAYERS = ("layers", "h")
"""What families call the list of their decoder's layers; "h": GPT-2."""
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
ROWS = 256
"""Of both, that are compared."""
RENAMED = 0.01
"""Share of ids that two tokenizers of one family may call differently (reserved ids that an
instruction-tuned model has given a name)."""


_TRAINABLE: set[str] = set()
"""Configurations, as text, that `trainable_facts` has looked at in this process."""
_FITTING: set[tuple[str, str]] = set()
"""Of those, the ones whose weights have been, too, with what `_state` says of their files."""


def trainable_facts(path: str, config: PreTrainedConfig) -> ModelFacts:
    """Facts about the model of `config`, which the trainer has to know.

    Raises:
        ConfigError: it does not, or transformers cannot build such a model from its configuration,
            or the weights at `path` are quantised or those of another.
    """
    try:
        if (text := as_text(config)) not in _TRAINABLE:
            check_trainable(path, config)
            _TRAINABLE.add(text)
        check_quantised(path, config.to_dict())
        facts = facts_of(config)
    except ConfigError:
        raise
    except Exception as error:  # the code of some two hundred families, in its own words
        raise ConfigError(
            f"model.path = {path!r}: models of type {config.model_type} are not known here: what "
            f"planning reads of one failed ({type(error).__name__}: {one_line(error)}). {KNOWN}"
        ) from error
    check_weights_fit(path, config)
    return facts


def check_trainable(path: str, config: PreTrainedConfig) -> None:
    """The model of `config`, built without memory, against what the trainer needs to know of it.

    Raises:
        ConfigError: its routers, its attention or its output layer are of an unknown kind.
    """
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
    """The layers of its decoder. Raises ValueError for one whose layers have another name."""
    decoder = model.get_decoder()
    for name in LAYERS:
        if isinstance(layers := getattr(decoder, name, None), nn.ModuleList):
            return [*layers]
    names = " or ".join(LAYERS)
    raise ValueError(f"{type(model).__name__}: its decoder has no list of layers called {names}")


def check_weights_fit(path: str, config: PreTrainedConfig) -> None:
    """The tensors of a folder, by names and shapes, against the model that `config` describes;
    transformers would make up what is missing, and leave out what it has no place for.

    Raises:
        ConfigError: they are those of another model.
    """
    text = config.get_text_config()
    if text is not config or not Path(path).is_dir() or missing_weights(path):
        return  # which is said elsewhere
    if (seen := (as_text(config), _state(path))) in _FITTING:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = shapes_of(path)
    if (loaded := loaded_as(model, shapes)) and (said := _unfit(model, path, shapes, loaded)):
        raise ConfigError(
            f"model.path = {path!r}: its weights are not those of its config.json (model_type "
            f"{config.model_type}, {text.num_hidden_layers} layers): {said}. Get both from one "
            "place again"
        )
    if getattr(config, "tie_word_embeddings", False) and _has_own_head(path, loaded):
        raise ConfigError(
            f"model.path = {path!r}: config.json says tie_word_embeddings: true, but the weights "
            f"hold an output layer of their own ({HEAD}), which the trainer would use and engines "
            "would not. Set tie_word_embeddings to false in config.json"
        )
    _FITTING.add(seen)


def _has_own_head(path: str, loaded: Mapping[str, tuple[str, bool]]) -> bool:
    """Whether the output layer in a folder's files differs from the embedding, by some rows."""
    embedding = next((name for name in loaded if name.endswith(EMBEDDING)), None)
    if HEAD not in loaded or embedding is None:
        return False
    (head, *_), (words, *_) = (tensors_called(path, name, ROWS) for name in (HEAD, embedding))
    return not torch.equal(head, words)


def _state(path: str) -> str:
    """Names, sizes and times of a folder's files."""
    found = [(file.name, file.stat()) for file in sorted(Path(path).iterdir())]
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found])


def _unfit(
    model: PreTrainedModel,
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    loaded: Mapping[str, tuple[str, bool]],
) -> str:
    """The first thing that is wrong. shapes, loaded: by the names of a checkpoint."""
    state = model.state_dict(keep_vars=True)
    lacking, further = left_out(model)
    there = {id(state[name]) for name, _ in loaded.values() if name in state}  # a tied one is one
    # Buffers begin with what says nothing.
    missing = [n for n, one in state.items() if isinstance(one, Parameter) and id(one) not in there]
    if missing := [name for name in missing if not _any(lacking, name)]:
        first, *others = {name.partition(".")[0] for name in shapes}
        wrapped = "" if there or others else f"; all names there begin with {first}."
        return (
            f"{len(missing)} of {len(state)} tensors are not there, such as {missing[0]}{wrapped}"
        )
    layers = {found[0] for name in state if (found := LAYER.match(name))}
    further_of: dict[str, list[str]] = {}
    """What layers have for nothing, by its name in them."""
    for name, (target, whole) in loaded.items():
        if target in state:
            wanted = tuple(state[target].shape)
            if whole and shapes[name] != wanted:
                return f"{name} has the shape {list(shapes[name])} and not {list(wanted)}"
        elif (found := LAYER.match(target)) and found[0] in layers:  # none behind the last one
            beside = target.endswith(".weight") or f"{target.removesuffix('bias')}weight" in state
            if beside and not _any([*further, "rotary"], target):
                further_of.setdefault(target.removeprefix(found[0]), []).append(name)
    for name, *others in further_of.values():
        everywhere = 1 + len(others) == len(layers)  # else it is something beside the model
        if everywhere and not (name.endswith("bias") and is_zero(path, name)):
            return f"nothing in such a model is called {name}"
    return ""


def _any(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _try_packed(model: PreTrainedModel) -> None:
    """Run the packed decoder as the trainer does, without numbers: what attention asks for (a cap
    on scores, sinks) and whether the model hands it the segments shows in a forward pass only.

    Raises UnsupportedAttention. Experts are left out: where their tokens go is data.
    """
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.forward = lambda hidden, *_, **__: hidden
    row = torch.zeros(1, 3, dtype=torch.long, device="meta")
    segments = Segments.of([2, 1], "meta")
    try:
        with torch.no_grad():
            model.eval().get_decoder()(
                input_ids=row, position_ids=row, use_cache=False, segments=segments
            )
    except UnsupportedAttention:
        raise
    except Exception:  # a family that looks at its numbers, say: then it is not known any sooner
        return


def check_same_family(path: str, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """The tokenizer `name` against the one that came with the model at `path`, if one did.

    Raises:
        ConfigError: the two give the same ids to other tokens, so the model would read nonsense.
    """
    try:
        own = AutoTokenizer.from_pretrained(path, **hub_options(path))
    except (OSError, ValueError):
        return
    theirs = {index: token for token, index in own.get_vocab().items()}
    shared = [(t, theirs[i], i) for t, i in tokenizer.get_vocab().items() if i in theirs]
    other = sorted((i, mine, own) for mine, own, i in shared if mine != own)
    if len(other) > RENAMED * len(shared):
        index, token, known = other[0]
        raise ConfigError(
            f"model.tokenizer = {name!r}: it does not belong to the model {path!r}, whose own "
            f"tokenizer calls {len(other):,} of {len(shared):,} ids otherwise (id {index} is "
            f"{known!r} there and {token!r} here). Leave it empty for the model's own"
        )


def check_ids(token_ids: Sequence[int] | NDArray[np.int32], vocabulary: int, what: str) -> None:
    """Raises ConfigError for a token id that the model has no embedding for."""
    ids = np.asarray(token_ids, np.int64)
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if len(wrong):
        raise ConfigError(
            f"model.tokenizer: {what} has token id {wrong.max()}, and the model's vocabulary "
            f"ends at {vocabulary - 1}: tokenizer and model do not belong together"
        )
