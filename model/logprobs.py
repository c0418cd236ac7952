"""Compute log-probabilities over sampling masks, as truncated sampling assigns them.

Under Keep Sampling Mask (DeepSeek-V3.2, section 3.1) a token o sampled with the mask S has

    log π(o) = z_o/τ − logsumexp_{v∈S} z_v/τ,      z = cap(scale · (W h + b))

so forward and backward only need the logits in S. A token without truncation (an empty mask) needs
the full head, which is computed for a few rows at a time and again in the backward pass. Neither
case creates a tensor of tokens × vocabulary.

`keel.model.head.cpu` computes it in PyTorch on CPUs and in float64, and `keel.model.head.gpu` with
kernels on GPUs.

The index tensors should stay on the CPU, even with `hidden` on a GPU: checks and planning run on
the host, and index tensors on the GPU would require a synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keel.model.head.cpu import LogitTransform, cpu_head
from keel.model.torch_internals import to_device
from keel.rl.checks import require

if TYPE_CHECKING:  # the import takes seconds
    from transformers import PreTrainedModel


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
    transform = LogitTransform(temperature, scale, softcap or 0.0)
    if hidden.is_cuda and len(hidden) and hidden.dtype != torch.float64:
        # Triton is installed on GPU machines only.
        from keel.model.head.gpu import build_plan, fused_head  # noqa: PLC0415

        vocab, dim = weight.shape
        key = (vocab, dim, hidden.device)
        if key not in memo:
            memo[key] = build_plan(
                kept_ids, host_offsets, vocabulary=vocab, d=dim, device=hidden.device
            )
        on_device = to_device(targets.long(), hidden.device)
        return fused_head(hidden, weight, on_device, memo[key], bias=bias, transform=transform)
    return cpu_head(hidden, weight, targets, kept_ids, offsets, bias=bias, transform=transform)


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
