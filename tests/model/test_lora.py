"""LoRA adapters: the trainer computes with the weights that engines get."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from keel.configs.schema import LoraConfig
from keel.model.load import facts_of, module_tensors
from keel.model.lora import adapters_off, add_adapters, is_adapted, save_adapter
from tests.model.families import build

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_equals_merged_model_exactly(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SIZES)
    base, model, merged = (AutoModelForCausalLM.from_config(config).to(dtype) for _ in range(3))
    model.load_state_dict(base.state_dict())
    add_adapters(model, LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "up_proj")), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tensors = {name: t for part in module_tensors(model) for name, t in part.items()}
    merged.load_state_dict(tensors, strict=False)
    tokens = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        logits, expected, before = (m(tokens).logits for m in (model, merged, base))
        assert torch.equal(logits, expected)
        assert not torch.equal(logits, before)
        with adapters_off(model):
            assert torch.equal(model(tokens).logits, before)


def test_gradients_are_those_of_the_sum() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SIZES)
    model = AutoModelForCausalLM.from_config(config).double()
    add_adapters(model, LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj")), seed=0)
    layer = model.model.layers[1].mlp.down_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(b, std=0.1)
    x = torch.randn(2, 3, 128, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    actual = [t.grad.clone() for t in (x, a, b) if t.grad is not None]
    for tensor in (x, a, b):
        tensor.grad = None
    (x @ (layer.base_layer.weight + 2.0 * b @ a).T).square().sum().backward()
    for tensor, gradient in zip((x, a, b), actual, strict=True):
        assert torch.allclose(tensor.grad, gradient)


NAMES = {
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "gpt_neox": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "qwen3_moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "qwen3_next": {"q_proj", "k_proj", "v_proj", "o_proj"}
    | {"in_proj_qkvz", "in_proj_ba", "out_proj"},
}


@pytest.mark.parametrize("family", NAMES)
def test_all_linear_layers_have_adapters_by_default(family: str, tmp_path: Path) -> None:
    """Whatever the family calls its layers; peft reads the saved adapters back."""
    from peft import PeftModel  # noqa: PLC0415

    model, merged, base = (build(family) for _ in range(3))
    lora = LoraConfig(rank=2, alpha=4.0)
    add_adapters(model, lora, seed=0)
    adapted = {n.rpartition(".")[2] for n, m in model.named_modules() if is_adapted(m)}
    assert adapted == NAMES[family]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == lora.parameters(facts_of(model.config).projections)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    tensors = {name: t for part in module_tensors(model) for name, t in part.items()}
    merged.load_state_dict(tensors, strict=False)
    tokens = torch.randint(3, 48, (1, 9))
    save_adapter(tmp_path, model, lora, "base")
    with torch.no_grad():
        expected = merged(tokens).logits
        assert torch.equal(model(tokens).logits, expected)
        adapted = PeftModel.from_pretrained(base, tmp_path)
        torch.testing.assert_close(adapted(tokens).logits, expected, rtol=1e-4, atol=1e-4)
