"""Fake weights."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from keel.model.load import checkpoint_tensors, load_model_config


def stand_in(folder: Path) -> None:
    """Write a sparse file with zero weights for a folder's config.json."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_model_config(str(folder)))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in checkpoint_tensors(model):
        begin, end = end, end + 4 * tensor.numel()
        shape = list(tensor.shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
