"""LoRA adapters: the trainer computes with the weights that engines get."""

from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from keel.configs.schema import EXPERTS, LoraConfig
from keel.model.load import facts_of, module_tensors
from keel.model.lora import adapters_off, add_adapters, is_adapted, save_adapter
from tests.model.families import VOCAB, build


def adapted_model(base: PreTrainedModel, lora: LoraConfig) -> PreTrainedModel:
    """Return a copy of `base` with random adapters."""
    model = deepcopy(base)
    add_adapters(model, lora, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [("q_proj", "up_proj"), (EXPERTS, "q_proj")])
def test_forward_equals_merged_model_exactly(targets: tuple[str, ...], dtype: torch.dtype) -> None:
    base = build("qwen3_moe" if EXPERTS in targets else "qwen3").to(dtype)
    model = adapted_model(base, LoraConfig(rank=4, alpha=8.0, targets=targets))
    merged = deepcopy(base)
    tensors = {name: t for part in module_tensors(model) for name, t in part.items()}
    merged.load_state_dict(tensors)
    tokens = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        logits, expected, before = (m(tokens).logits for m in (model, merged, base))
        assert torch.equal(logits, expected)
        assert not torch.equal(logits, before)
        with adapters_off(model):
            assert torch.equal(model(tokens).logits, before)


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
DEFAULTS = {
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "gpt_neox": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "qwen3_moe": ATTENTION,
    "deepseek_v3": LATENT,
    "qwen3_next": ATTENTION | {"in_proj_qkvz", "in_proj_ba", "out_proj"},
}
WITH_EXPERTS = {family: {EXPERTS, "o_proj"} for family in ("qwen3_moe", "mixtral", "gpt_oss")}


@pytest.mark.parametrize(
    ("family", "names", "targets"),
    [(family, names, ()) for family, names in DEFAULTS.items()]
    + [(family, names, tuple(names)) for family, names in WITH_EXPERTS.items()],
)
def test_saved_adapters_compute_and_learn_the_same_in_peft(
    family: str, names: set[str], targets: tuple[str, ...], tmp_path: Path
) -> None:
    """By default, all linear layers have adapters, whatever the family calls them."""
    base = build(family)
    lora = LoraConfig(rank=2, alpha=4.0, targets=targets)
    model = adapted_model(base, lora)
    layers = {
        path.removesuffix(".base_layer") for path, m in model.named_modules() if is_adapted(m)
    }
    assert {path.rpartition(".")[2] for path in layers} == names
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    count = sum(p.numel() for p in trained.values())
    assert count == lora.parameters(facts_of(model.config).projections)
    sent, expected = ([*map(sorted, module_tensors(each))] for each in (model, base))
    assert sent == expected
    save_adapter(tmp_path, model, lora, "base")
    other = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    tokens = torch.randint(3, VOCAB, (1, 9))
    logits, logits_of_peft = model(tokens).logits, other(tokens).logits
    assert_close(logits, logits_of_peft)
    for each in (logits, logits_of_peft):
        each.square().sum().backward()
    theirs = dict(other.named_parameters())
    for name, parameter in trained.items():
        assert_close(parameter.grad, theirs[f"base_model.model.{name}"].grad)
