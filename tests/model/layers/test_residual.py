"""The float32 residual stream: dtypes, sums and gradients."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from keel.model.layers.fused import use_fused_layers
from keel.model.layers.residual import use_float32_residual
from keel.model.trainable import decoder_layers
from keel.trainer.placement.families import _FLOAT32_RESIDUAL as FAMILIES

IDS = torch.arange(24)[None] * 7 % 40
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def build(family: str, dtype: torch.dtype = torch.float32, layers: int = 3) -> PreTrainedModel:
    """Build a model whose blocks add a thousandth of the stream, below bfloat16 rounding."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        family, vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, pad_token_id=0,
        tie_word_embeddings=False, **(MOE if family.endswith(("moe", "mixtral")) else {}),
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.normal_(std=0.02)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def hidden(model: PreTrainedModel) -> torch.Tensor:
    return model.get_decoder()(IDS.to(model.device), use_cache=False).last_hidden_state


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_stream_is_float32_and_norms_half_precision(family: str) -> None:
    model = build(family, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    use_fused_layers(model)
    use_float32_residual(model)
    seen: dict[str, set[torch.dtype]] = {"layers": set(), "norms": set()}

    def watch(where: str) -> Any:
        return lambda _, __, out: seen[where].add((out[0] if isinstance(out, tuple) else out).dtype)

    for layer in decoder_layers(model):
        layer.register_forward_hook(watch("layers"))
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.register_forward_hook(watch("norms"))
    assert hidden(model).dtype == torch.bfloat16
    assert seen == {"layers": {torch.float32}, "norms": {torch.bfloat16}}
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    toward = torch.randn(1, IDS.shape[1], 64).to(model.device)
    (hidden(model).float() * toward).sum().backward()
    return {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((family, "plain") for family in FAMILIES),
        ("qwen3_moe", "recomputed"),
        pytest.param("qwen3", "compiled", marks=pytest.mark.e2e),
    ],
)
def test_gradients_match_float32(family: str, mode: str) -> None:
    model = build(family, torch.bfloat16).train()
    use_fused_layers(model)
    use_float32_residual(model)
    if mode == "recomputed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mode == "compiled":
        for layer in decoder_layers(model):
            layer.compile(backend="aot_eager", dynamic=True)
        counters.clear()
    ours = gradients(model)
    if mode == "compiled":
        assert counters["stats"]["unique_graphs"] == 1  # all layers share one graph
    exact = gradients(build(family, torch.bfloat16).float())
    assert ours.keys() == exact.keys()
    assert not [name for name in ours if error(ours[name], exact[name]) > 0.03]
