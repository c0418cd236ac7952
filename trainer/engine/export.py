"""Write weights as a Hugging Face model folder, as `save_pretrained` would, shard by shard."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from keel.configs.schema import ModelConfig
from keel.model.load import is_tied, tokenizer_with
from keel.trainer.engine.weights import Weights
from keel.trainer.run.manifest import Entry, seal, sizes

SHARD_BYTES = 4 * 2**30


def write_model(
    folder: Path,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: str,
    end: int | None = None,
) -> None:
    """Config, generation config and `weights` (checkpoint names) in shards of `SHARD_BYTES`. end:
    the tokenizer's `eos_token`, for which engines end a completion.

    Holds one shard in host memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    part: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        shard = folder / f"shard-{len(shards)}.safetensors"
        save_file(part, shard, metadata={"format": "pt"})
        shard.chmod(folder.stat().st_mode & 0o666)  # safetensors' are its owner's alone
        shards.append(list(part))

    for name, tensor in weights:
        count = tensor.numel() * tensor.element_size()
        if part and size + count > SHARD_BYTES:
            flush()
            part, size = {}, 0
        part[name] = tensor.detach().cpu().clone()  # save_file refuses views of one storage
        size, total = size + count, total + count
    flush()
    _name_shards(folder, shards, total)
    # A reader that goes by the flag would leave out an output layer that has come apart.
    config = model.config.to_dict() | {"dtype": dtype, "tie_word_embeddings": is_tied(model)}
    type(model.config).from_dict(config).save_pretrained(folder)
    if model.can_generate():
        # Its own `save_pretrained` refuses what some published models come with, such as a
        # temperature without `do_sample`.
        generation = copy.deepcopy(model.generation_config)
        generation.eos_token_id = _with_end(generation.eos_token_id, end)
        generation.to_json_file(folder / GENERATION_CONFIG_NAME)


def _with_end(ends: Any, end: int | None) -> Any:
    """`eos_token_id` with `end` in it. A base model's may lack the end of a chat's turn, which it
    has learned by `model.tokenizer`, and transformers' `generate` goes by this alone."""
    known = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if end is None or end in known:
        return ends
    return [end, *known] if known else end


def write_tokenizer(folder: Path, source: str, chat_template: str = "") -> int | None:
    """Copy the tokenizer of a model folder or hub model, with its chat template or, where one is
    given, with that. Returns its `eos_token_id`."""
    tokenizer = tokenizer_with(chat_template, source)
    tokenizer.save_pretrained(folder)
    return tokenizer.eos_token_id


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Their number is part of their names, and known only at the end."""
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{index}.safetensors").rename(folder / final)
        where |= dict.fromkeys(names, final)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def export_model(
    folder: Path, model: PreTrainedModel, weights: Weights, given: ModelConfig, path: str
) -> dict[str, Entry]:
    """A model folder for transformers and vLLM, from all ranks. given: the recipe's; path: where
    the model began. Returns what this rank wrote."""
    first = dist.get_rank() == 0
    if first:
        named = weights.named(getattr(torch, given.dtype))
        end = write_tokenizer(folder, given.tokenizer or path, given.chat_template)
        write_model(folder, model, named, dtype=given.dtype, end=end)
    else:
        weights.gather_along()
    dist.barrier()
    return seal(folder, sizes(folder)) if first else {}
