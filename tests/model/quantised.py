"""Folders in DeepSeek's FP8 format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.load import load_policy

HALVES = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BLOCK = 128, 128


def quantise_weight(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a matrix block by block. Returns it in FP8, its scales, and it dequantised."""
    rows, columns = weight.shape
    low, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), []
    expected = torch.empty_like(weight)
    for r in range(0, rows, block[0]):
        for c in range(0, columns, block[1]):
            here = slice(r, r + block[0]), slice(c, c + block[1])
            scales.append(weight[here].abs().max() / 448)
            low[here] = (weight[here] / scales[-1]).to(torch.float8_e4m3fn)
            expected[here] = low[here].float() * scales[-1]
    return low, torch.stack(scales).view(-(-rows // block[0]), -1), expected


def quantise(folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Quantise the projections of a folder as in DeepSeek's checkpoints, with weights and scales in
    different files. Returns the weights that remain, dequantised block by block."""
    whole = folder / "model.safetensors"
    plain, parts = load_file(whole), ({}, {})
    expected = dict(plain)
    for name, weight in plain.items():
        if "_proj" not in name:
            parts[0][name] = weight
            continue
        parts[0][name], parts[1][f"{name}_scale_inv"], expected[name] = quantise_weight(
            weight, block
        )
    whole.unlink()
    for name, tensors in zip(HALVES, parts, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    files = {key: name for name, part in zip(HALVES, parts, strict=True) for key in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    set_block(folder, list(block))
    return expected


def set_block(folder: Path, block: Any, **others: Any) -> None:
    file = folder / "config.json"
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **others}
    content = json.loads(file.read_text()) | {
        "quantization_config": how | {"weight_block_size": block}
    }
    file.write_text(json.dumps(content))


def with_weights(
    folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor]
) -> PreTrainedModel:
    """Return a model like `model` with the given weights of a checkpoint."""
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return load_policy(str(folder), torch.float32).eval()
