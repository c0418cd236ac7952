"""The support head as a module that can replace a model's output layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from keel.model.head.support import HeadSpec, support_head

if TYPE_CHECKING:  # the import takes seconds
    from transformers import PreTrainedModel

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
"""Maps a `model_type` to the factor by which its forward pass multiplies the output of lm_head."""

_SCALE_KNOBS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class SupportHead(nn.Linear):
    """An output layer that computes log-probabilities of targets over sampling masks
    (`support_head`). It has the same `Parameter` objects and names as the layer that it replaces,
    so tied embeddings stay tied and checkpoints do not change. It is a module so that ZeRO-3
    gathers its weight."""

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
        """Return the log-probabilities and entropies of `targets`, both [T] float32 (see
        `support_head`). If `targets` is omitted, return W·h + bias without the family's scaling and
        capping, as the replaced layer did, so that `model(...).logits` and `model.generate` still
        work."""
        if targets is None:
            return super().forward(hidden)
        if kept_ids is None or kept_offsets is None:
            raise ValueError("targets need kept_ids and kept_offsets")
        spec = HeadSpec(bias=self.bias, scale=self.scale, softcap=self.softcap)
        return support_head(
            hidden,
            self.weight,
            targets,
            kept_ids,
            kept_offsets,
            temperature=temperature,
            spec=spec,
            memo=memo,
        )


def install_support_head(model: PreTrainedModel) -> SupportHead:
    """Replace the model's output layer with a `SupportHead` and return it. Calling this again has
    no effect. Raises ValueError if the output layer is not a `nn.Linear`. Also raises it if the
    config scales logits and the model family is not in `LOGIT_SCALE`."""
    layer = model.get_output_embeddings()
    if isinstance(layer, SupportHead):
        return layer
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f"{type(model).__name__}: the output layer is a {type(layer).__name__}, must be Linear"
        )
    head = SupportHead(layer, **logit_shape(model.config))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is layer:
                setattr(parent, name, head)
    return head


def logit_shape(config: Any) -> dict[str, Any]:
    """Return the `scale` and `softcap` of logits that a transformers config specifies."""
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
                    "model/head/module.py"
                )
    return {"scale": scale, "softcap": getattr(config, "final_logit_softcapping", None)}
