"""A model without the values of its weights, for whoever gets those in another way."""

from __future__ import annotations

import io
import logging
import pickle
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)


def outline(model: PreTrainedModel) -> bytes:
    """What `from_outline` makes a model like this one of: modules, configs, names, types and shapes
    of weights, which of them are tied, and the values of buffers. Empty if it cannot be written
    down, as a model whose modules hold functions that have no name."""
    written = io.BytesIO()
    try:
        _Outliner(written, protocol=5).dump(model)
    except Exception:  # pickles fail in many ways
        _LOG.warning("every trainer rank reads the model: it has no outline", exc_info=True)
        return b""
    return written.getvalue()


def from_outline(written: bytes, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The model, its weights on `device` and unset: in host memory they take none until they are
    written. Only for what this run has written: reading can call anything, as with any pickle."""
    with torch.device(device):
        return pickle.loads(written)


class _Outliner(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):  # by the pickle's memo, a tied one stays tied
            return _unset, (tuple(obj.shape), obj.dtype, obj.requires_grad)
        return NotImplemented


def _unset(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=requires_grad)
