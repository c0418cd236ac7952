"""Exports the model as a Hugging Face model folder, writing one shard of weights at a time."""

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

_SHARD_BYTES = 4 * 2**30


def export_model(
    folder: Path, model: PreTrainedModel, weights: Weights, config: ModelConfig, path: str
) -> dict[str, Entry]:
    """Write a model folder and return the files that this rank wrote. All ranks must call this
    together. `path` is the folder of the initial model."""
    first = dist.get_rank() == 0
    if first:
        named = weights.named(getattr(torch, config.dtype))
        end = write_tokenizer(folder, config.tokenizer or path, config.chat_template)
        write_model(folder, model, named, dtype=config.dtype, end=end)
    else:
        weights.gather_along()
    dist.barrier()
    return seal(folder, sizes(folder)) if first else {}


def write_tokenizer(folder: Path, source: str, chat_template: str = "") -> int | None:
    """Copy a model's tokenizer and return its EOS token id. If `chat_template` is given, it
    replaces the tokenizer's own."""
    tokenizer = tokenizer_with(chat_template, source)
    tokenizer.save_pretrained(folder)
    return tokenizer.eos_token_id


def write_model(
    folder: Path,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    *,
    dtype: str,
    end: int | None = None,
) -> None:
    """Write the model's configurations and `weights`, which are pairs of name and tensor. Only one
    shard is in host memory at a time. `end` is the tokenizer's EOS token id."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    part: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        shard = folder / f"shard-{len(shards)}.safetensors"
        save_file(part, shard, metadata={"format": "pt"})
        shard.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private to its owner
        shards.append(list(part))

    for name, tensor in weights:
        count = tensor.numel() * tensor.element_size()
        if part and size + count > _SHARD_BYTES:
            flush()
            part, size = {}, 0
        part[name] = tensor.detach().cpu().clone()  # save_file refuses views of one storage
        size, total = size + count, total + count
    flush()
    files: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        (folder / f"shard-{index}.safetensors").rename(folder / file)
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
    # The flag must tell readers of a head that is no longer tied.
    config = model.config.to_dict() | {"dtype": dtype, "tie_word_embeddings": is_tied(model)}
    type(model.config).from_dict(config).save_pretrained(folder)
    if model.can_generate():
        # Not by `save_pretrained`, which refuses what some published models contain, such as a
        # temperature without `do_sample`.
        generation = copy.deepcopy(model.generation_config)
        ids: Any = generation.eos_token_id
        known = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        if end is not None and end not in known:  # it may be missing in a base model
            generation.eos_token_id = [end, *known] if known else end
        generation.to_json_file(folder / GENERATION_CONFIG_NAME)
