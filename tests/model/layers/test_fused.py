"""Selection of fused layers; tests/gpu/test_fused.py tests their results."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from keel.model.layers.fused import fuses_norms, use_fused_layers
from tests.model.families import build


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_results_are_unchanged(family: str) -> None:
    model = build(family)
    tokens = torch.arange(12)[None] % 40
    before = model(tokens).logits
    names = list(model.state_dict())
    use_fused_layers(model)
    assert torch.equal(model(tokens).logits, before)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("llama", True), ("gemma3", False)])
def test_plain_norms_are_fused(family: str, fused: bool) -> None:
    kind = {"gemma3": "gemma3_text"}.get(family, family)
    config = AutoConfig.for_model(
        kind, vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        without_weights = AutoModelForCausalLM.from_config(config)
    assert fuses_norms(without_weights) == fused
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    kinds = [type(norm) for norm in norms]
    use_fused_layers(model)
    assert norms
    for norm, kind in zip(norms, kinds, strict=True):
        assert isinstance(norm, kind) and (type(norm) is not kind) == fused
        assert type(norm).__name__ == kind.__name__
    assert len(set(map(type, norms))) == len(set(kinds))
