"""LoRA adapters: the trainer computes with the weights that engines get."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from keel.configs.schema import LoraConfig
from keel.model.load import module_tensors
from keel.model.lora import adapters_off, add_adapters

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
