"""A small model with sparse attention, and packed rows for it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.model.attention import Segments, use_packed_attention
from keel.model.sparse.attention import SparsePass, use_sparse_attention
from tests.model.families import VOCAB, build

TOP_K = 6
LENGTHS = (3, 19, 1, 7, 16)
TOKENS = sum(LENGTHS)
SIZES = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}


def theirs(**changes: Any) -> PreTrainedModel:
    """Build transformers' model, with eight index heads so that ties are rare."""
    model = build("deepseek_v32", **{"index_topk": TOP_K, "index_n_heads": 8} | SIZES | changes)
    for name, parameter in model.named_parameters():
        if "self_attn" in name and parameter.ndim == 2:
            parameter.data.mul_(8)  # makes attention far from uniform
    return model


def ours(model: PreTrainedModel) -> PreTrainedModel:
    copy = deepcopy(model)
    use_sparse_attention(copy)
    use_packed_attention(copy)
    return copy


def segments_of_ids() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1, length), generator=generator) for length in LENGTHS]


def run(model: PreTrainedModel, ids: list[Tensor], sparse: SparsePass) -> Tensor:
    """Return the hidden states [N, D] of the packed row."""
    lengths = [part.shape[1] for part in ids]
    return model.get_decoder()(
        input_ids=torch.cat(ids, 1),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        use_cache=False,
        segments=Segments.of(lengths),
        sparse=sparse,
    ).last_hidden_state[0]


def weighted(hidden: Tensor) -> Tensor:
    """Sum hidden states with random weights."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    return (hidden * weights).sum()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare up to rounding, relative to each tensor's largest entry."""
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        bound = 2e-5 * max(float(grad.abs().max()), 1e-3)
        torch.testing.assert_close(actual[name], grad, rtol=0, atol=bound, msg=name)
