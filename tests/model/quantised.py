"""Folders in DeepSeek's FP8 format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HALVES = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


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
        rows, columns = weight.shape
        low, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), []
        expected[name] = torch.empty_like(weight)
        for r in range(0, rows, block[0]):
            for c in range(0, columns, block[1]):
                here = slice(r, r + block[0]), slice(c, c + block[1])
                scales.append(weight[here].abs().max() / 448)
                low[here] = (weight[here] / scales[-1]).to(torch.float8_e4m3fn)
                expected[name][here] = low[here].float() * scales[-1]
        parts[0][name] = low
        parts[1][f"{name}_scale_inv"] = torch.stack(scales).view(-(-rows // block[0]), -1)
    whole.unlink()
    for name, tensors in zip(HALVES, parts, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    files = {key: name for name, part in zip(HALVES, parts, strict=True) for key in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    set_block(folder, list(block))
    return expected


def set_block(folder: Path, block: Any) -> None:
    file = folder / "config.json"
    how = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    content = json.loads(file.read_text()) | {
        "quantization_config": how | {"weight_block_size": block}
    }
    file.write_text(json.dumps(content))
