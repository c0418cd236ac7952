"""Compute log-probabilities over sampling masks, as truncated sampling assigns them.

Under Keep Sampling Mask (DeepSeek-V3.2, section 3.1) a token o sampled with the mask S has

    log π(o) = z_o/τ − logsumexp_{v∈S} z_v/τ,      z = cap(scale · (W h + b))

so forward and backward only need the logits in S. A token without truncation (an empty mask) needs
the full head, which is computed for a few rows at a time and again in the backward pass. Neither
case creates a tensor of tokens × vocabulary.

This is the PyTorch implementation for CPUs and float64. On a GPU, `support_head` uses the kernels
of `keel.model.head.gpu`.

The index tensors should stay on the CPU, even with `hidden` on a GPU: checks and planning run on
the host, and index tensors on the GPU would require a synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from keel.model.torch_internals import to_device
from keel.rl.checks import require

if TYPE_CHECKING:  # the import takes seconds
    from transformers import PreTrainedModel

_GATHER_COST = 16
"""Number of logits that the gemm plan computes in the time that the gather plan needs for one pair,
forward and backward. The plans are equally fast for V/|S| between 14 and 19 (measured for V of 150,
300 and 32,000)."""
_GATHER_ELEMENTS = 2**19
"""Number of elements in a [pairs, d] block of the gather plan, which must fit into the cache."""
_GEMM_ELEMENTS = 2**18
"""Number of elements in a [rows, V] block of the gemm plan."""
_GEMM_ROWS = 128
"""Minimum number of rows in a block of the gemm plan. With fewer rows, reading the head limits the
speed."""


def support_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the log-probability of each target over its sampling mask.

        log π(o) = z_o/τ − logsumexp_{v∈S} z_v/τ,   z = W h

    This implements Keep Sampling Mask (DeepSeek-V3.2, 2025, section 3.1), with exact gradients for
    `hidden` and `weight`. Returns [R] float32. See `support_head` for the arguments.
    """
    return support_head(hidden, weight, targets, kept_ids, kept_offsets, temperature=temperature)[0]


def support_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    memo: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute each target's log-probability and the entropy, both restricted to the token's
    sampling mask.

    Args:
        hidden: [R, d] floats; row r predicts `targets[r]`.
        weight: [V, d], same dtype and device as `hidden`.
        targets: [R] integers, each in its sampling mask.
        kept_ids: [nnz] integers, the concatenated sampling masks.
        kept_offsets: [R+1] integers; the mask of target r is
            `kept_ids[kept_offsets[r]:kept_offsets[r+1]]`, empty for the whole vocabulary.
        temperature: τ, above 0.
        bias: [V] floats; None for no bias.
        scale: factor of the logits z = scale · (W·h + bias).
        softcap: c, which caps the logits to c·tanh(z/c); None for no cap.
        memo: initially empty dict that caches checks and plans for further calls with the same
            index tensors.

    Returns:
        Both [R] float32 (computed in float64 for float64 inputs). The log-probabilities have exact
        gradients for `hidden`, `weight` and `bias`; the entropy has none. With R = 0 the
        gradients exist and are zero.

    Raises:
        ValueError: naming the argument and the row, if shapes or dtypes do not match, an id or
            target is outside [0, V), a target is outside its mask, a mask has a repeated id, the
            offsets do not rise from 0 to nnz, or τ is not above 0.
    """
    _check_shapes(hidden, weight, targets, kept_ids, kept_offsets, bias, temperature)
    memo = {} if memo is None else memo
    host_offsets = kept_offsets.cpu()
    offsets = host_offsets.numpy().astype(np.int64, copy=False)
    if ("checked", len(weight)) not in memo:
        _check_values(targets, kept_ids, offsets, len(weight))
        memo["checked", len(weight)] = True
    if hidden.is_cuda and len(hidden) and hidden.dtype != torch.float64:
        # Triton is installed on GPU machines only.
        from keel.model.head.gpu import build_plan, fused_head  # noqa: PLC0415
        from keel.model.head.kernels import HeadShape  # noqa: PLC0415

        vocab, dim = weight.shape
        key = (vocab, dim, hidden.device)
        if key not in memo:
            memo[key] = build_plan(
                kept_ids, host_offsets, vocabulary=vocab, d=dim, device=hidden.device
            )
        shape = HeadShape(scale=scale, softcap=softcap or 0.0, temperature=temperature)
        on_device = to_device(targets.long(), hidden.device)
        return fused_head(hidden, weight, on_device, memo[key], bias=bias, shape=shape)

    sizes = np.diff(offsets)
    transform = _LogitTransform(temperature, scale, softcap)
    device = hidden.device
    targets = to_device(targets.long(), device)
    ids = to_device(kept_ids.long(), device)
    if sizes.all():  # all tokens are truncated, or R = 0
        pairs = _Pairs.of(ids, offsets, sizes)
        return _MaskedHead.apply(hidden, weight, bias, targets, pairs, transform)
    if not len(ids):
        return _FullHead.apply(hidden, weight, bias, targets, transform)

    # Mixed: compute truncated tokens and the others separately, then restore the order.
    truncated = np.flatnonzero(sizes)
    order = np.concatenate([truncated, np.flatnonzero(sizes == 0)])
    sizes = sizes[truncated]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    pairs = _Pairs.of(ids, offsets, sizes)
    forward = to_device(torch.from_numpy(order), device)
    back = to_device(torch.from_numpy(np.argsort(order)), device)
    split = [len(truncated), len(order) - len(truncated)]
    hidden_kept, hidden_full = hidden.index_select(0, forward).split(split)
    targets_kept, targets_full = targets.index_select(0, forward).split(split)
    kept = _MaskedHead.apply(hidden_kept, weight, bias, targets_kept, pairs, transform)
    full = _FullHead.apply(hidden_full, weight, bias, targets_full, transform)
    logp, entropy = (
        torch.cat(parts).index_select(0, back) for parts in zip(kept, full, strict=True)
    )
    return logp, entropy


class _LogitTransform(NamedTuple):
    temperature: float
    scale: float
    softcap: float | None

    def apply_(self, logits: Tensor) -> None:
        if self.softcap is None:
            logits.mul_(self.scale / self.temperature)
        else:
            logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        if self.softcap is None:
            return self.scale / self.temperature
        tanh = logits * (self.temperature / self.softcap)
        return (1 - tanh.square_()).mul_(self.scale / self.temperature)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The (row of `hidden`, kept id) pairs of all sampling masks."""

    ids: Tensor
    rows: Tensor
    """[nnz] int64, row of `hidden` for each pair, in ascending order."""
    host_offsets: NDArray[np.int64]
    """[R+1] start of each token's pairs, in host memory."""

    @staticmethod
    def of(ids: Tensor, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> _Pairs:
        rows = torch.arange(len(sizes), device=ids.device).repeat_interleave(
            to_device(torch.from_numpy(sizes), ids.device), output_size=len(ids)
        )
        return _Pairs(ids, rows, offsets)

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values of each token's pairs: [nnz] → [R]."""
        return values.new_zeros(len(self.host_offsets) - 1).index_add_(0, self.rows, values)

    def flat(self, row: slice, pair: slice, vocab: int) -> Tensor:
        return (self.rows[pair] - row.start) * vocab + self.ids[pair]


class _MaskedHead(Function):
    """Computes the head for tokens sampled with truncation. Saves two floats and two integers per
    (row, id) pair for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        pairs: _Pairs,
        transform: _LogitTransform,
    ) -> tuple[Tensor, Tensor]:
        logits = _pair_logits(hidden, weight, pairs)
        if bias is not None:
            logits += bias.index_select(0, pairs.ids)
        transform.apply_(logits)

        rows = pairs.rows
        highest = logits.new_full((len(targets),), -torch.inf)
        highest.scatter_reduce_(0, rows, logits, "amax")
        weights = (logits - highest.index_select(0, rows)).exp_()
        total = pairs.sum(weights)
        probability = weights.div_(total.index_select(0, rows))
        normaliser = highest + total.log()
        entropy = normaliser - pairs.sum(probability * logits)
        at_target = pairs.ids == targets.index_select(0, rows)
        chosen = pairs.sum(logits.masked_fill(~at_target, 0))

        # d logp[row] / d raw logit of each pair.
        score = probability.neg_().add_(at_target)
        score.mul_(transform.slope(logits))
        ctx.save_for_backward(hidden, weight, score, pairs.ids, rows)
        ctx.host_offsets = pairs.host_offsets
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        entropy = entropy.float()
        ctx.mark_non_differentiable(entropy)
        return (chosen - normaliser).float(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, score, ids, rows = ctx.saved_tensors
        grad = score * grad_logp.to(score.dtype).index_select(0, rows)
        pairs = _Pairs(ids, rows, ctx.host_offsets)
        d_hidden, d_weight = _pair_grads(grad, hidden, weight, pairs, ctx.needs_input_grad[:2])
        d_bias = None
        if ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias_like
            d_bias = grad.new_zeros(shape).index_add_(0, ids, grad).to(dtype)
        return d_hidden, d_weight, d_bias, None, None, None


class _FullHead(Function):
    """Computes the head for tokens sampled without truncation. Saves one float per token for the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: _LogitTransform,
    ) -> tuple[Tensor, Tensor]:
        sums = torch.empty(3, len(hidden), dtype=_accumulate_dtype(hidden), device=hidden.device)
        normaliser, chosen, mean = sums
        operand = weight.to(sums.dtype)
        step = _rows_at_once(len(weight))
        for start in range(0, len(hidden), step):
            row = slice(start, start + step)
            logits = _full_logits(hidden[row], operand, bias, transform)
            normaliser[row] = logits.logsumexp(-1)
            chosen[row] = logits.gather(1, targets[row, None])[:, 0]
            probability = (logits - normaliser[row, None]).exp_()
            mean[row] = probability.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.transform = transform
        entropy = (normaliser - mean).float()
        ctx.mark_non_differentiable(entropy)
        return (chosen - normaliser).float(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad = grad_logp.to(normaliser.dtype)
        d_hidden = torch.zeros_like(hidden, dtype=grad.dtype) if needs[0] else None
        d_weight = torch.zeros_like(weight, dtype=grad.dtype) if needs[1] else None
        d_bias = grad.new_zeros(len(weight)) if needs[2] else None
        operand = weight.to(grad.dtype)
        step = _rows_at_once(len(weight))
        for start in range(0, len(hidden), step):
            row = slice(start, min(start + step, len(hidden)))
            logits = _full_logits(hidden[row], operand, bias, ctx.transform)
            slope = ctx.transform.slope(logits)
            block = logits.sub_(normaliser[row, None]).exp_().mul_(-grad[row, None])
            block.scatter_add_(1, targets[row, None], grad[row, None])
            block.mul_(slope)
            _gemm_grads(block, hidden, operand, row, d_hidden, d_weight)
            if d_bias is not None:
                d_bias += block.sum(0)
        return _cast(d_hidden, hidden), _cast(d_weight, weight), _cast(d_bias, bias), None, None


def _full_logits(
    hidden: Tensor, operand: Tensor, bias: Tensor | None, transform: _LogitTransform
) -> Tensor:
    logits = hidden.to(operand.dtype) @ operand.t()
    if bias is not None:
        logits += bias
    transform.apply_(logits)
    return logits


def _cast(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)


# The arithmetic at (token, id) pairs. `_gathers` chooses between two plans with equal results:
#
# - gather: one dot product per pair, O(nnz·d), for spans much shorter than the vocabulary
# - gemm: blocks of [rows, V] logits, for long spans; only the pairs are read
#
# Operands and sums are float32 (float64 for float64 inputs), whatever the dtype of the inputs.


def _accumulate_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _gathers(pairs: _Pairs, hidden: Tensor, vocab: int) -> bool:
    # Without pairs, as on a rank that got only padding, no copy of the head is made.
    return not len(pairs.ids) or len(pairs.ids) * _GATHER_COST < len(hidden) * vocab


def _pair_logits(hidden: Tensor, weight: Tensor, pairs: _Pairs) -> Tensor:
    """Compute the dot product of `hidden[rows]` and `weight[ids]` for each pair, [nnz]."""
    out = torch.empty(len(pairs.ids), dtype=_accumulate_dtype(hidden), device=hidden.device)
    vocab, dim = weight.shape
    if _gathers(pairs, hidden, vocab):
        for pair in _gather_chunks(len(pairs.ids), dim):
            product = weight.index_select(0, pairs.ids[pair]).to(out.dtype)
            product.mul_(hidden.index_select(0, pairs.rows[pair]))
            out[pair] = product.sum(-1)
        return out
    operand = weight.to(out.dtype)
    for row, pair in _gemm_chunks(pairs.host_offsets, vocab):
        logits = hidden[row].to(out.dtype) @ operand.t()
        torch.index_select(logits.view(-1), 0, pairs.flat(row, pair, vocab), out=out[pair])
    return out


def _pair_grads(
    grad: Tensor, hidden: Tensor, weight: Tensor, pairs: _Pairs, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of `hidden` and `weight`, given `grad` [nnz], the gradient of the
    logits."""
    d_hidden = torch.zeros_like(hidden, dtype=grad.dtype) if needs[0] else None
    d_weight = torch.zeros_like(weight, dtype=grad.dtype) if needs[1] else None
    vocab, dim = weight.shape
    if _gathers(pairs, hidden, vocab):
        for pair in _gather_chunks(len(pairs.ids), dim):
            ids, rows, scale = pairs.ids[pair], pairs.rows[pair], grad[pair, None]
            if d_hidden is not None:
                d_hidden.index_add_(0, rows, weight.index_select(0, ids).to(grad.dtype) * scale)
            if d_weight is not None:
                d_weight.index_add_(0, ids, hidden.index_select(0, rows).to(grad.dtype) * scale)
    else:
        operand = weight.to(grad.dtype)
        for row, pair in _gemm_chunks(pairs.host_offsets, vocab):
            block = grad.new_zeros(row.stop - row.start, vocab)
            block.view(-1).scatter_(0, pairs.flat(row, pair, vocab), grad[pair])
            _gemm_grads(block, hidden, operand, row, d_hidden, d_weight)
    return _cast(d_hidden, hidden), _cast(d_weight, weight)


def _gemm_grads(
    block: Tensor,
    hidden: Tensor,
    operand: Tensor,
    row: slice,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
) -> None:
    """Add one block of rows' contribution to the gradients of `hidden` and `weight`. `block` [rows,
    V] is the gradient of the logits for these rows."""
    if d_hidden is not None:
        d_hidden[row] = block @ operand
    if d_weight is not None:
        d_weight.addmm_(block.t(), hidden[row].to(block.dtype))


def _gather_chunks(count: int, dim: int) -> Iterator[slice]:
    step = max(1, _GATHER_ELEMENTS // dim)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _rows_at_once(vocab: int) -> int:
    return max(_GEMM_ROWS, _GEMM_ELEMENTS // vocab)


def _gemm_chunks(offsets: NDArray[np.int64], vocab: int) -> Iterator[tuple[slice, slice]]:
    rows, step = len(offsets) - 1, _rows_at_once(vocab)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop), slice(int(offsets[start]), int(offsets[stop]))


def _check_shapes(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    bias: Tensor | None,
    temperature: float,
) -> None:
    require(0 < temperature < math.inf, f"temperature is {temperature}: must be finite, above 0")
    integers = (targets, kept_ids, kept_offsets)
    fits = (
        hidden.ndim == weight.ndim == 2
        and hidden.is_floating_point()
        and len(weight) > 0
        and weight.shape[1] == hidden.shape[1]
        and (weight.dtype, weight.device) == (hidden.dtype, hidden.device)
        and not any(x.is_floating_point() or x.dtype == torch.bool for x in integers)
        and [x.shape for x in integers] == [(len(hidden),), (kept_ids.numel(),), (len(hidden) + 1,)]
        and (bias is None or (bias.is_floating_point() and bias.shape == weight.shape[:1]))
    )
    if fits:
        return
    named = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets}
    named |= {"kept_ids": kept_ids, "kept_offsets": kept_offsets}
    actual = [f"{name} {x.dtype} {list(x.shape)}" for name, x in named.items() if x is not None]
    raise ValueError(
        "hidden [R, d], weight [V, d] and bias [V] must be floats that match, and targets [R], "
        f"kept_ids [nnz] and kept_offsets [R+1] integers; they are {', '.join(actual)}"
    )


def _check_values(
    targets: Tensor, kept_ids: Tensor, offsets: NDArray[np.int64], vocab: int
) -> None:
    sizes = np.diff(offsets)
    require(
        offsets[0] == 0 and offsets[-1] == len(kept_ids) and bool((sizes >= 0).all()),
        f"kept_offsets must rise from 0 to the {len(kept_ids)} entries of kept_ids",
    )
    target, ids = targets.cpu().numpy(), kept_ids.cpu().numpy()
    outside = (target < 0) | (target >= vocab)
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(f"targets: row {row} is {target[row]}, outside [0, {vocab})")
    if not len(ids):
        return
    if ids.min() < 0 or ids.max() >= vocab:
        at = int(((ids < 0) | (ids >= vocab)).argmax())
        row = int(np.searchsorted(offsets, at, "right")) - 1
        raise ValueError(f"kept_ids: row {row} has {ids[at]}, outside [0, {vocab})")
    # Per-entry arrays stay as narrow as `ids`: the checks delay the launch of kernels.
    ids = ids if ids.dtype in (np.int32, np.int64) else ids.astype(np.int64)
    hits = np.repeat(target.astype(ids.dtype), sizes) == ids
    rises = ids[1:] > ids[:-1]
    rises[offsets[:-1][sizes > 0][1:] - 1] = True
    repeated = np.zeros(0, np.int64)
    if not rises.all():
        keys = np.repeat(np.arange(len(sizes), dtype=np.int64) * vocab, sizes) + ids
        keys.sort()
        repeated = keys[1:][keys[1:] == keys[:-1]]
    # Without repeated ids, every mask has its target iff there are as many hits as masks.
    if len(repeated) or np.count_nonzero(hits) != np.count_nonzero(sizes):
        result = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[hits], minlength=len(sizes))
        missing = (result == 0) & (sizes > 0)
        if missing.any():
            row = int(missing.argmax())
            raise ValueError(
                f"targets: row {row} is {target[row]}, which is not in its sampling mask of "
                f"{sizes[row]} ids. Masks and tokens are misaligned"
            )
        raise ValueError(f"kept_ids: row {repeated[0] // vocab} has a repeated id")


LOGIT_SCALE: Mapping[str, Callable[[Any], float]] = {
    "cohere": lambda config: config.logit_scale,
    "cohere2": lambda config: config.logit_scale,
    "cohere2_moe": lambda config: config.logit_scale,
    "falcon_h1": lambda config: config.lm_head_multiplier,
    "granite": lambda config: 1 / config.logits_scaling,
    "granite_swa": lambda config: 1 / config.logits_scaling,
    "granitemoe": lambda config: 1 / config.logits_scaling,
    "granitemoe_swa": lambda config: 1 / config.logits_scaling,
    "granitemoehybrid": lambda config: 1 / config.logits_scaling,
    "granitemoeshared": lambda config: 1 / config.logits_scaling,
    "hyperclovax": lambda config: config.logits_scaling,
}
"""Factor by which the forward pass of each `model_type` multiplies the output of lm_head."""

_SCALE_KNOBS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class SupportHead(nn.Linear):
    """Output layer that computes the targets' log-probabilities over their sampling masks
    (`support_head`). It keeps the `Parameter` objects and names of the layer it replaces, so tied
    embeddings stay tied and checkpoints don't change. It is a module so that ZeRO-3 gathers its
    weight."""

    def __init__(
        self, linear: nn.Linear, *, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate another weight
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.scale = scale
        self.softcap = softcap
        self.train(linear.training)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        kept_ids: Tensor | None = None,
        kept_offsets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        memo: dict[Any, Any] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the log-probabilities and entropies of `targets`, both [R] float32 (see
        `support_head`). Without `targets`, return W·h + bias with no scaling or capping, just like
        the replaced layer, so that `model(...).logits` and `model.generate` keep working."""
        if targets is None:
            return super().forward(hidden)
        if kept_ids is None or kept_offsets is None:
            raise ValueError("targets need kept_ids and kept_offsets")
        shape = {"bias": self.bias, "scale": self.scale, "softcap": self.softcap}
        return support_head(
            *(hidden, self.weight, targets, kept_ids, kept_offsets),
            temperature=temperature,
            memo=memo,
            **shape,
        )


def install_support_head(model: PreTrainedModel) -> SupportHead:
    """Replace the model's output layer with a `SupportHead` and return it. Does nothing if it has
    already been replaced. Raises ValueError if the output layer is not an `nn.Linear`, or if the
    config scales logits and the model family is not in `LOGIT_SCALE`."""
    layer = model.get_output_embeddings()
    if isinstance(layer, SupportHead):
        return layer
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f"{type(model).__name__}: the output layer is a {type(layer).__name__}, must be Linear"
        )
    head = SupportHead(layer, **_logit_shape(model.config))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is layer:
                setattr(parent, name, head)
    return head


def _logit_shape(config: Any) -> dict[str, Any]:
    config = config.get_text_config()
    if config.model_type in LOGIT_SCALE:
        scale = LOGIT_SCALE[config.model_type](config)
    else:
        scale = 1.0
        for knob in _SCALE_KNOBS:
            if getattr(config, knob, None) not in (None, 1.0):
                raise ValueError(
                    f"{config.model_type} has {knob} = {getattr(config, knob)}, which is not "
                    "supported for this model family. Add it to LOGIT_SCALE in "
                    "model/logprobs.py"
                )
    return {"scale": scale, "softcap": getattr(config, "final_logit_softcapping", None) or None}
