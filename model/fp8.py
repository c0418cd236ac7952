"""Read DeepSeek-V3's FP8 format: float8_e4m3fn weights, each with a scale for every block
(`weight_scale_inv`). Weights are dequantised while they are read, one tensor at a time."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from keel.configs.schema import ConfigError
from keel.model.hub import fp8_block, hub_options, local_folder, stored_tensors

LOAD_FORMAT = "keel_fp8"
"""Name of vLLM's load format for these weights (keel/weights/loader.py)."""
SCALE = "_scale_inv"
"""Suffix that turns a weight's name into the name of its scales."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A quantised tensor on disk. Indexing it reads and dequantises it."""

    weight: Any
    scale: Any
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, rows: Any) -> Tensor:
        return dequantise(self.weight[...], self.scale[...], self.block)[rows]


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantise FP8 weights to float32 [R, C] with one scale for each block of size `block`. The
    last blocks of a row or column may be smaller."""
    rows, columns = weight.shape
    scale = scale.float().repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * scale.repeat_interleave(block[0], 0)[:rows]


def readable_tensors(path: str, framework: str = "pt") -> dict[str, Any]:
    """Return the tensors of a folder or downloaded hub model by checkpoint name, dequantised.
    Indexing a tensor (`[...]`) reads it. The weights must be complete. If `framework` is "np", only
    names and shapes can be read. Raises ConfigError if an FP8 weight has no scales or scales of the
    wrong shape."""
    folder = local_folder(path) or Path(path)
    block = fp8_block(path, json.loads((folder / "config.json").read_text("utf-8")))
    tensors = stored_tensors(str(folder), framework)
    scales = {name: tensors.pop(name) for name in [*tensors] if block and name.endswith(SCALE)}
    for name, weight in tensors.items():
        if weight.get_dtype() != "F8_E4M3":
            continue
        scale, shape = scales.get(f"{name}{SCALE}"), weight.get_shape()
        if block is None or scale is None or len(shape) != 2:
            raise ConfigError(
                f"{path!r}: {name} is in FP8, but has no {name}{SCALE}, or config.json has no "
                "quantization_config with quant_method: fp8. Download the model again"
            )
        needed = [-(-size // of) for size, of in zip(shape, block, strict=True)]
        if scale.get_shape() != needed:
            raise ConfigError(
                f"{path!r}: {name}{SCALE} has shape {scale.get_shape()}, but {shape} in blocks of "
                f"{list(block)} (weight_block_size in config.json) needs {needed}"
            )
        tensors[name] = _Blocks(weight, scale, block)
    return tensors


def load_fp8(path: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load an FP8 model and dequantise it, as if it had never been quantised."""
    # transformers' own dequantisation (5.19) refuses weights whose last blocks are smaller.
    del config.quantization_config
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, dtype=dtype, state_dict=readable_tensors(path)
    )
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path, **hub_options(path))
    return model
