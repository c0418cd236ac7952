"""Hybrid models: packed training with and without flash-linear-attention, and engine against
trainer. `tests/e2e/test_hybrid.py` runs whole steps, on GPUs, too."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from keel.model import attention
from keel.model.attention import LINEAR_FAMILIES, Segments, use_packed_attention
from tests.gpu.marks import GPU
from tests.gpu.test_mismatch import mismatch

pytestmark = GPU

LENGTHS = (3, 700, 1, 90, 1300, 64, 65)
HEADS = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


@pytest.mark.parametrize("kernels", ["fla", "torch"])
@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_packed_equals_separate(family: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel on packed rows against transformers on separate ones. All experts are chosen, so
    that rounding changes no routes; flash-linear-attention compiles for minutes in float32."""
    dtype = torch.float32
    if kernels == "fla":
        pytest.importorskip("fla")
        assert attention._fla_kernels() is not None
        dtype = torch.bfloat16
    else:
        monkeypatch.setattr(attention, "_fla_kernels", lambda: None)
    torch.manual_seed(0)
    experts = {**EXPERTS, "num_experts_per_tok": EXPERTS["num_experts"]}
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "head_dim": 64}
    config = AutoConfig.for_model(
        family, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        pad_token_id=None, eos_token_id=0, initializer_range=0.05, **sizes, **HEADS, **experts,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config).to("cuda", dtype)
    packed = AutoModelForCausalLM.from_config(config).to("cuda", dtype)
    packed.load_state_dict(plain.state_dict())
    parts = [torch.randint(0, 512, (1, length), device="cuda") for length in LENGTHS]
    weights = torch.randn(sum(LENGTHS), 512, device="cuda", dtype=dtype)

    alone = torch.cat([plain.base_model(p, use_cache=False).last_hidden_state[0] for p in parts])
    (alone * weights).sum().backward()
    use_packed_attention(packed)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].cuda()
    together = packed.base_model(
        torch.cat(parts, 1),
        position_ids=positions,
        use_cache=False,
        segments=Segments.of(LENGTHS, "cuda"),
    ).last_hidden_state[0]
    (together * weights).sum().backward()

    assert (together - alone).norm() < 0.05 * alone.norm()
    mixed = [n for n, _ in plain.named_parameters() if "linear_attn" in n]
    gradients = dict(plain.named_parameters()), dict(packed.named_parameters())
    for name in mixed:
        expected, actual = (each[name].grad for each in gradients)
        assert (actual - expected).norm() < 0.1 * expected.norm(), name


@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_engine_agrees_with_trainer(tmp_path: Path, family: str) -> None:
    arm = mismatch(tmp_path, family, "bfloat16", **HEADS, **EXPERTS)["bfloat16"]
    print(family, arm)
    assert arm["logp_abs"] < 0.05
