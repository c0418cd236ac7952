"""Decoder layers whose forward pass is bit-identical to the engine's.

With `model.batch_invariant`, engines use vLLM's batch-invariant kernels, and the trainer uses the
same kernel for each operation. Like the engine, it concatenates weights (query, key and value; gate
and up). As a result, the hidden states of a token are bit-identical in any micro-batch. Only the
float32 head still differs, by a few millionths of a nat.

Gradients are computed from plain formulas in one-pass kernels
(`keel.model.layers.kernels`). For attention, PyTorch computes them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig, PreTrainedModel

from keel.configs.schema import ConfigError
from keel.model.attention import Segments
from keel.model.batch_invariant import vllm_kernels as engine
from keel.model.layers.fused import fused_experts
from keel.model.routing import is_moe
from keel.model.torch_internals import flash_gradients
from keel.model.transformers_internals import override_methods

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""`model_type`s whose layers in vLLM use exactly the operations below."""
_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""`rope_type`s that vLLM implements with the same kernel but a different cosine table."""
_Positions = tuple[Tensor, Tensor, Tensor]
"""Positions [N], and the tables for `engine.rotate` that rotate heads and rotate them back."""
HEAD = 128
"""Head size for which flash attention 3 returns the same bits for single tokens, without a causal
mask, as for whole prompts. A size of 64 gave different bits."""


def check_invariant(config: PreTrainedConfig, path: str, *, dtype: str, gpu: bool = True) -> None:
    """Raise ConfigError if batch-invariant layers don't support the model in this precision or if
    there is no GPU."""
    if not gpu:
        raise ConfigError(
            "model.batch_invariant needs a GPU. Remove it: on CPUs in float32, ratios are 1 to "
            "seven digits without it"
        )
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    partial, rotated = rope.get("partial_rotary_factor", 1) != 1, rope.get("rope_type", "default")
    if is_moe(config) and dtype == "float16":
        raise ConfigError(
            "model.dtype = 'float16': with model.batch_invariant, experts need bfloat16. Set it, "
            "or remove model.batch_invariant"
        )
    unsupported = (
        (text.model_type not in FAMILIES, f"models of type {text.model_type}"),
        ("sliding_attention" in (getattr(text, "layer_types", None) or ()), "sliding windows"),
        (partial, "partial rotary embeddings"),
        (rotated not in _ROTATIONS, f"rotary embeddings of kind {rotated}"),
        (text.hidden_act != "silu", f"activations of kind {text.hidden_act}"),
        (bool(getattr(text, "mlp_bias", False)), "biases in the feed-forward layers"),
        (size != HEAD, f"a head size of {size}"),
    )
    if problem := next((what for present, what in unsupported if present), ""):
        raise ConfigError(
            f"model.batch_invariant does not support {problem} (model.path = {path!r}), only "
            f"{', '.join(FAMILIES)} with a head size of {HEAD}. Remove it"
        )


def use_invariant_layers(model: PreTrainedModel) -> None:
    """Make `model`'s decoder use the engine's kernels while keeping its weights. Raises ConfigError
    if the model does not pass `check_invariant`, and RuntimeError if the installed vLLM lacks these
    kernels."""
    dtype = str(model.dtype).removeprefix("torch.")
    check_invariant(model.config, model.config.name_or_path or "", dtype=dtype)
    engine.prepare()
    decoder: Any = model.get_decoder()
    override_methods(decoder.rotary_emb, _Rotary)
    for index, layer in enumerate(decoder.layers):
        override_methods(layer.self_attn, _Attention)
        if hasattr(layer.mlp, "experts"):
            override_methods(layer.mlp, _SparseMlp)
            override_methods(layer.mlp.gate, _TopKRouter)
        else:
            override_methods(layer.mlp, _Mlp)
        # All inputs but the first layer's are sums of a residual and a block's output.
        override_methods(layer.input_layernorm, _Norm if index == 0 else _NormOfSum)
        override_methods(layer.post_attention_layernorm, _NormOfSum)
    override_methods(decoder.norm, _NormOfSum)


class _Rotary:
    def forward(self: Any, hidden: Tensor, position_ids: Tensor, **_: Any) -> _Positions:
        tables = self.__dict__.get("tables")
        if tables is None or tables[0].device != hidden.device:
            table = engine.rotary_table(self.config, hidden.dtype, hidden.device)
            cosines, sines = table.chunk(2, -1)
            tables = table, torch.cat([cosines, -sines], -1)
            self.__dict__["tables"] = tables  # not buffers, which DeepSpeed and checkpoints handle
        return position_ids[0].contiguous(), tables[0], tables[1]


class _Norm:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        return _Normed.apply(hidden, self.weight, self.variance_epsilon, False)


class _NormOfSum:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        return _Normed.apply(hidden, self.weight, self.variance_epsilon, True)


class _Attention:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: _Positions,
        attention_mask: Tensor | None = None,
        *,
        segments: Segments,
        **_: Any,
    ) -> tuple[Tensor, None]:
        size: int = self.head_dim
        packed = _joined_linear(hidden_states[0], self.q_proj, self.k_proj, self.v_proj)
        widths = [len(part.weight) for part in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (x.unflatten(1, (-1, size)) for x in packed.split(widths, 1))
        query = _rotate(query, getattr(self, "q_norm", None), position_embeddings)
        key = _rotate(key, getattr(self, "k_norm", None), position_embeddings)
        out = _Attended.apply(query, key, value, segments, self.scaling)
        return _joined_linear(out.flatten(1), self.o_proj)[None], None


class _Mlp:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        packed = _joined_linear(hidden[0], self.gate_proj, self.up_proj)
        return _joined_linear(_Gated.apply(packed), self.down_proj)[None]


class _TopKRouter:
    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = _Linear.apply(hidden, None, self.weight)
        weights, experts = engine.route(logits.detach(), self.top_k, self.norm_topk_prob)
        return logits, weights, experts.long()


class _SparseMlp:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        x, router, experts = hidden[0].contiguous(), self.gate, self.experts
        logits, _, chosen = router(x)  # `keel.model.routing` may replay the chosen experts
        weights = _expert_weights(logits, chosen, router.norm_topk_prob)
        out = _Routed.apply(x, chosen, weights, experts.gate_up_proj, experts.down_proj)
        return out[None]


def _expert_weights(logits: Tensor, experts: Tensor, normalize: bool) -> Tensor:
    """Return the weights [N, K] float32 of the experts, with the gradient of the plain formula. For
    tokens whose experts are the router's own choice, they are bit-identical to the engine's."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    with torch.no_grad():
        exact, own = engine.route(logits, experts.shape[1], normalize)
        same = (own == experts).all(-1, keepdim=True)
        rest = exact.where(same, weights) - weights
    return weights + rest  # exact, because both are close


def _joined_linear(x: Tensor, *parts: nn.Linear) -> Tensor:
    """Apply several linear layers to x [N, K] in one GEMM, and return the concatenated outputs."""
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return _Linear.apply(x.contiguous(), bias, *(part.weight for part in parts))


def _rotate(x: Tensor, norm: Any, positions: _Positions) -> Tensor:
    if norm is None:
        return _Turned.apply(x, None, 0.0, *positions)
    return _Turned.apply(x, norm.weight, norm.variance_epsilon, *positions)


class _Normed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, of_sum: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        kernel = engine.rms_norm_of_sum if of_sum else engine.rms_norm
        return kernel(x[0][:, None], weight, eps)[:, 0][None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = _kernels().rms_norm_grad(x[0][:, None], weight, ctx.eps, grad[0][:, None])
        return of_x[:, 0][None], of_weight if ctx.needs_input_grad[1] else None, None, None


class _Turned(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        positions: Tensor,
        table: Tensor,
        back: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, positions, back)
        ctx.eps = eps
        if weight is None:
            turned = x.clone(memory_format=torch.contiguous_format)
        else:
            turned = engine.rms_norm(x, weight, eps)
        engine.rotate(positions, turned, table)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, positions, back = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)
        engine.rotate(positions, grad, back)
        of_weight = None
        if weight is not None:
            grad, of_weight = _kernels().rms_norm_grad(x, weight, ctx.eps, grad)
        return grad, of_weight if ctx.needs_input_grad[1] else None, None, None, None, None


class _Attended(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        out, sums = engine.attention(query, key, value, segments, scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        ends = ctx.segments.offsets, ctx.segments.longest
        grads = flash_gradients(grad, query, key, value, out, sums, *ends, ctx.scale)
        return *grads, None, None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return engine.silu_and_mul(packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (packed,) = ctx.saved_tensors
        return _kernels().swiglu_gradient(grad.contiguous(), packed)


class _Routed(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, experts, weights, gate_up, down)
        return engine.run_experts(x, experts, weights, gate_up, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, experts, *rest = ctx.saved_tensors
        inputs = [tensor.detach().requires_grad_() for tensor in (x, *rest)]
        with torch.enable_grad():  # the forward pass again, with faster kernels
            out = fused_experts(inputs[0], experts, *inputs[1:])
        needed = ctx.needs_input_grad[:1] + ctx.needs_input_grad[2:]
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(out, wanted, grad))
        of_x, *others = (next(grads) if need else None for need in needed)
        return of_x, None, *others


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)  # not the concatenated copy
        return engine.linear(x, _concat(weights), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, of_bias, *of_weights = ctx.needs_input_grad
        parts: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(of_weights):
            parts = (grad.t() @ x).split([len(weight) for weight in weights])
        return (
            grad @ _concat(weights) if of_x else None,
            grad.sum(0) if of_bias else None,
            *(part if needed else None for part, needed in zip(parts, of_weights, strict=True)),
        )


def _concat(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _kernels() -> Any:
    from keel.model.layers import kernels  # noqa: PLC0415  (Triton is on GPU machines)

    return kernels
