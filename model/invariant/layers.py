"""Decoder layers whose forward pass gives the engine's bits, with gradients by plain formulas.

With `model.batch_invariant` engines run vLLM's batch-invariant kernels and the trainer the same
ones, operation by operation, on weights that are joined as the engine joins them (query, key and
value; gate and up). A token's hidden states are then equal to the last bit, in whatever micro-batch
it lands. What is left is the head, float32 on both sides: some millionths of a nat.

Gradients are those of plain formulas of the same functions. For them norms, activations and
attention compute their forward once more; GEMMs and rotations do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedConfig, PreTrainedModel

from keel.configs.schema import ConfigError
from keel.model.attention import Segments, attend
from keel.model.invariant import vllm_kernels as engine
from keel.model.transformers_internals import become

FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type`s: those whose layers in vLLM are, operation by operation, what stands below."""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""`rope_type`s whose table is all that differs between them in vLLM."""
HEAD = 128
"""Numbers of an attention head with which flash attention 3 gives single tokens, whose attention is
not called causal then, the bits of a whole prompt (seen: with 64 it does not)."""


def check_invariant(config: PreTrainedConfig, path: str, *, gpu: bool = True) -> None:
    """Raises ConfigError for a model whose layers are not known here to the bit, and without a
    GPU."""
    if not gpu:
        raise ConfigError(
            "model.batch_invariant: vLLM's batch-invariant kernels are for GPUs; leave it out (on "
            "CPUs in float32, ratios are 1 to seven digits without)"
        )
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    partial, rotated = rope.get("partial_rotary_factor", 1) != 1, rope.get("rope_type", "default")
    unknown = (
        (text.model_type not in FAMILIES, f"models of type {text.model_type}"),
        ("sliding_attention" in (getattr(text, "layer_types", None) or ()), "sliding windows"),
        (partial, "partial rotary embeddings"),
        (rotated not in ROTATIONS, f"rotary embeddings of kind {rotated}"),
        (text.hidden_act != "silu", f"activations of kind {text.hidden_act}"),
        (bool(getattr(text, "mlp_bias", False)), "biases in the feed-forward layers"),
        (size != HEAD, f"attention heads of {size} numbers"),
    )
    for there, what in unknown:
        if there:
            raise ConfigError(
                f"model.batch_invariant: {what} (model.path = {path!r}) are not known to the bit, "
                f"only plain {', '.join(FAMILIES)} with heads of {HEAD} numbers; leave it out"
            )


def use_invariant_layers(model: PreTrainedModel) -> None:
    """Have `model`'s decoder compute by the engine's kernels; weights do not change.

    Raises:
        ConfigError: see `check_invariant`.
        keel.model.invariant.vllm_kernels.Unavailable: vLLM has none here.
    """
    check_invariant(model.config, model.config.name_or_path or "")
    engine.prepare()
    decoder: Any = model.get_decoder()
    become(decoder.rotary_emb, _variant(type(decoder.rotary_emb), _Rotary))
    for index, layer in enumerate(decoder.layers):
        become(layer.self_attn, _variant(type(layer.self_attn), _Attention))
        become(layer.mlp, _variant(type(layer.mlp), _Mlp))
        # Only the first layer's input is no sum of a residual and a block's output.
        first = _Norm if index == 0 else _NormOfSum
        become(layer.input_layernorm, _variant(type(layer.input_layernorm), first))
        after = layer.post_attention_layernorm
        become(after, _variant(type(after), _NormOfSum))
    become(decoder.norm, _variant(type(decoder.norm), _NormOfSum))


@cache
def _variant(kind: type[nn.Module], forward: type) -> type[nn.Module]:
    return type(kind.__name__, (forward, kind), {"__module__": kind.__module__})


class _Rotary:
    def forward(self: Any, hidden: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """hidden [1, N, d] and positions [1, N] → positions [N] and the table of `rotate`."""
        table = self.__dict__.get("table")
        if table is None or table.device != hidden.device:
            table = engine.rotary_table(self.config, hidden.dtype, hidden.device)
            self.__dict__["table"] = table  # no buffer: DeepSpeed and checkpoints look at those
        return position_ids[0].contiguous(), table


class _Norm:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        return _normed(hidden, self.weight, self.variance_epsilon, engine.rms_norm)


class _NormOfSum:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        return _normed(hidden, self.weight, self.variance_epsilon, engine.rms_norm_of_sum)


class _Attention:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        segments: Segments,
        **_: Any,
    ) -> tuple[Tensor, None]:
        positions, table = position_embeddings
        size: int = self.head_dim
        packed = _joined(hidden_states[0], self.q_proj, self.k_proj, self.v_proj)
        widths = [len(part.weight) for part in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (x.unflatten(1, (-1, size)) for x in packed.split(widths, 1))
        if hasattr(self, "q_norm"):
            query = _normed(
                query, self.q_norm.weight, self.q_norm.variance_epsilon, engine.rms_norm
            )
            key = _normed(key, self.k_norm.weight, self.k_norm.variance_epsilon, engine.rms_norm)
        query, key = (_Rotate.apply(x, positions, table) for x in (query, key))
        out = _as_engine(
            lambda q, k, v: engine.attention(q, k, v, segments, self.scaling),
            lambda q, k, v: attend(q, k, v, segments, self.scaling, None),
            query,
            key,
            value,
        )
        return _joined(out.flatten(1), self.o_proj)[None], None


class _Mlp:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        packed = _joined(hidden[0], self.gate_proj, self.up_proj)
        return _joined(_as_engine(engine.silu_and_mul, _swiglu, packed), self.down_proj)[None]


def _joined(x: Tensor, *parts: nn.Linear) -> Tensor:
    """The outputs of linear layers on x [N, K], side by side, as one GEMM."""
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return _Linear.apply(x.contiguous(), bias, *(part.weight for part in parts))


def _normed(
    x: Tensor, weight: Tensor, eps: float, kernel: Callable[[Tensor, Tensor, float], Tensor]
) -> Tensor:
    """x [..., d]"""
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    return _as_engine(
        lambda rows, weight: kernel(rows, weight, eps),
        lambda rows, weight: rms_norm(rows, weight.shape, weight, eps),
        rows,
        weight,
    ).view(shape)


def _swiglu(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return silu(gate) * up


def _as_engine(
    kernel: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """kernel(*tensors), with the gradient of plain(*tensors), which computes the same."""
    return _AsEngine.apply(kernel, plain, *tensors)


class _AsEngine(Function):
    @staticmethod
    def forward(ctx: Any, kernel: Any, plain: Any, *tensors: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*tensors)
        return kernel(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.plain(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad))
        return None, None, *(next(found) if wanted else None for wanted in needed)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)  # and not the joined ones, a copy of each layer
        return engine.linear(x, _side_by_side(weights), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, of_bias, *of_weights = ctx.needs_input_grad
        parts: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(of_weights):
            parts = (grad.t() @ x).split([len(weight) for weight in weights])
        return (
            grad @ _side_by_side(weights) if of_x else None,
            grad.sum(0) if of_bias else None,
            *(part if wanted else None for part, wanted in zip(parts, of_weights, strict=True)),
        )


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


class _Rotate(Function):
    """x [N, H, D] by the angles of `positions`; gradients are turned back by the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(positions, table)
        return engine.rotate(positions, x, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        positions, table = ctx.saved_tensors
        cos, sin = table[positions][:, None].chunk(2, -1)
        first, second = grad.chunk(2, -1)
        turned = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
        return turned, None, None
