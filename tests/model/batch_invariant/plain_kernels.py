"""Plain CPU versions of `keel.model.batch_invariant.vllm_kernels` and `.gradients`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from keel.model.attention import Segments, attend
from keel.model.batch_invariant.vllm_kernels import Pages


def prepare() -> None:
    pass


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


rms_norm_of_sum = rms_norm


def rotate(positions: Tensor, x: Tensor, table: Tensor) -> None:
    cos, sin = (part.repeat(1, 2)[:, None] for part in table[positions].chunk(2, -1))
    first, second = x.chunk(2, -1)
    x.copy_(x * cos + torch.cat([-second, first], -1) * sin)


def silu_and_mul(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return functional.silu(gate) * up


def attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, None]:
    """Attend to keys and values in the kernel's block layout."""
    pages = Pages.of(segments.lengths, query.device)
    laid = [pages.lay_out(x) for x in (key, value)]
    outputs = []
    for segment, part in enumerate(query.split(list(segments.lengths))):
        length = len(part)
        k, v = (x[pages.table[segment].long()].flatten(0, 1)[:length].transpose(0, 1) for x in laid)
        q = part.transpose(0, 1)
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs), None


def rotary_table(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = config.head_dim
    base = config.rope_parameters["rope_theta"]
    turns = 1 / base ** (torch.arange(0, size, 2) / size)
    angles = torch.arange(config.max_position_embeddings)[:, None] * turns
    return torch.cat([angles.cos(), angles.sin()], -1).to(device, dtype)


def _autograd(plain: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        return torch.autograd.grad(plain(*inputs), inputs, grad)


gradients = SimpleNamespace(
    rms_norm=lambda x, weight, eps, grad: _autograd(
        lambda x, weight: rms_norm(x, weight, eps), grad, x, weight
    ),
    swiglu=lambda packed, grad: _autograd(silu_and_mul, grad, packed)[0],
    attention=lambda query, key, value, out, sums, segments, scale, grad: _autograd(
        lambda q, k, v: attend(q, k, v, segments, scale, None), grad, query, key, value
    ),
)
