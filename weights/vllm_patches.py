"""Changes how vLLM loads FP8 weights, and drops warnings of its reload.

`keel.weights.loader` imports this module in each worker.
"""

import logging
import time
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from keel.model.load import LOAD_FORMAT, readable_tensors

POWER_OF_TWO_SCALES = "keel_power_of_two_scales"
"""Key of vLLM's `additional_config` for engines in FP8 whose checkpoint has such scales."""
# Drop warnings about layers that only hold tables; `TensorChecklist` checks for missing tensors. A
# filter, because vLLM resets the levels of its loggers when it builds an engine.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: record.levelno >= logging.ERROR
)


_fp8: Any = fp8
_quantize_blocks = _fp8.per_block_cast_to_fp8


def _quantize_like_checkpoint(weight: Tensor, block_size: list[int], use_ue8m0: bool) -> Any:
    """Quantize a weight with scales of the checkpoint's format, so that weights which lie on the
    checkpoint's FP8 values do not change."""
    config: Any = get_current_vllm_config().additional_config
    return _quantize_blocks(weight, block_size, use_ue8m0 or POWER_OF_TWO_SCALES in config)


_fp8.per_block_cast_to_fp8 = _quantize_like_checkpoint


@register_model_loader(LOAD_FORMAT)
class _DequantisingLoader(DefaultModelLoader):
    """Loads FP8 weights the same way as the trainer, so that both start from the same model."""

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        self.counter_before_loading_weights = time.perf_counter()
        for name, tensor in readable_tensors(model_config.model).items():
            yield name, tensor[...]
