"""Batch-invariant layers with plain kernels, and the choice of kernel variants.

tests/gpu/test_mismatch.py and test_invariant_kernels.py test them with the engine's kernels.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from keel.configs.schema import ConfigError
from keel.model import layers as model_layers
from keel.model.attention import Segments, attend, use_packed_attention
from keel.model.batch_invariant import layers, vllm_kernels
from keel.model.batch_invariant.layers import use_invariant_layers
from keel.model.batch_invariant.vllm_kernels import BLOCK, _Pages
from keel.model.routing import replay_routes

LENGTHS = (BLOCK + 3, 1, 2 * BLOCK, 7)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def rotate(positions: Tensor, x: Tensor, table: Tensor) -> None:
    cos, sin = (part.repeat(1, 2)[:, None] for part in table[positions].chunk(2, -1))
    first, second = x.chunk(2, -1)
    x.copy_(x * cos + torch.cat([-second, first], -1) * sin)


def silu_and_mul(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return functional.silu(gate) * up


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, chosen.int()


def run_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    rows = torch.einsum("td,tkid->tki", x, gate_up[experts])
    rows = torch.einsum("tki,tkdi->tkd", silu_and_mul(rows), down[experts])
    return (rows * weights[..., None]).sum(1)


def attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, None]:
    """Attend to keys and values in the kernel's block layout."""
    pages = _Pages.of(segments.lengths, query.device)
    laid = [pages.lay_out(x) for x in (key, value)]
    outputs = []
    for segment, part in enumerate(query.split(list(segments.lengths))):
        length = len(part)
        k, v = (x[pages.table[segment].long()].flatten(0, 1)[:length].transpose(0, 1) for x in laid)
        q = part.transpose(0, 1)
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs), None


def rotary_table(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = config.head_dim
    base = config.rope_parameters["rope_theta"]
    turns = 1 / base ** (torch.arange(0, size, 2) / size)
    angles = torch.arange(config.max_position_embeddings)[:, None] * turns
    return torch.cat([angles.cos(), angles.sin()], -1).to(device, dtype)


def _autograd(plain: Callable[..., Tensor], grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        return torch.autograd.grad(plain(*inputs), inputs, grad)


def flash_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    *_, offsets, _, scale = rest
    segments = Segments.of(offsets.diff().tolist())
    return _autograd(lambda *qkv: attend(*qkv, segments, scale, None), grad, q, k, v)


ENGINE = SimpleNamespace(
    prepare=lambda: None,
    linear=linear,
    rms_norm=rms_norm,
    rms_norm_of_sum=rms_norm,
    rotate=rotate,
    silu_and_mul=silu_and_mul,
    route=route,
    run_experts=run_experts,
    attention=attention,
    rotary_table=rotary_table,
)
"""Plain versions of `keel.model.batch_invariant.vllm_kernels`."""
KERNELS = SimpleNamespace(
    rms_norm_grad=lambda x, weight, eps, grad: _autograd(
        lambda x, weight: rms_norm(x, weight, eps), grad, x, weight
    ),
    swiglu_gradient=lambda grad, packed: _autograd(silu_and_mul, grad, packed)[0],
)


EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]
}  # fmt: skip


def config(family: str, **more: Any) -> Any:
    more = (EXPERTS if family == "qwen3_moe" else {}) | more
    return AutoConfig.for_model(
        family, vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0,
        max_position_embeddings=64, **more,
    )  # fmt: skip


def build(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, **more))
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # norms of 1 and biases of 0 would hide mistakes
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    use_packed_attention(model)
    return model.train()


def forward_backward(model: Any, segments: Segments) -> tuple[Tensor, dict[str, Tensor]]:
    """Return hidden states and gradients of a random sum of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(40, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    hidden = model.get_decoder()(
        input_ids=tokens, position_ids=positions, use_cache=False, segments=segments
    ).last_hidden_state
    model.zero_grad()
    (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
    actual = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    return hidden.detach(), actual


@pytest.mark.parametrize(
    ("family", "replayed", "recomputed"),
    [
        *((name, False, False) for name in layers.FAMILIES),
        ("qwen3", False, True),
        *(("qwen3_moe", replayed, True) for replayed in (False, True)),
    ],
)
def test_hidden_states_and_gradients_are_unchanged(
    family: str, replayed: bool, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "HEAD", 8)
    model, segments = build(family, norm_topk_prob=recomputed), Segments.of(LENGTHS)

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        if not replayed:
            return forward_backward(model, segments)
        routes = torch.tensor([[[4, 1], [0, 3]]]).repeat(sum(LENGTHS), 1, 1)
        routes[::3] = -1
        with replay_routes(model, routes):
            return forward_backward(model, segments)

    hidden, gradients = run()
    names = list(model.state_dict())
    monkeypatch.setattr(layers, "engine", ENGINE)
    monkeypatch.setattr(layers, "_kernels", lambda: KERNELS)
    monkeypatch.setattr(layers, "flash_gradients", flash_gradients)
    monkeypatch.setattr(layers, "fused_experts", run_experts)
    use_invariant_layers(model)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    again, new = run()
    torch.testing.assert_close(again, hidden, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names
    assert set(new) == set(gradients)
    for name, gradient in gradients.items():
        terms = max(1.0, float(gradient.abs().max()))  # scale of cancelling terms
        torch.testing.assert_close(new[name], gradient, rtol=1e-3, atol=1e-5 * terms, msg=name)


def test_experts_in_float16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HEAD", 8)
    check = partial(layers.check_invariant, config("qwen3_moe"), "")
    check(dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"model\.dtype = 'float16'"):
        check(dtype="float16")


# --- kernel variants

WIDE = torch.ones(3, 4, dtype=torch.bfloat16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake Hopper GPU whose kernels are PyTorch functions."""
    fake = SimpleNamespace(
        capability=(9, 0),
        capturing=False,
        kernels=SimpleNamespace(
            few_rows=lambda *inputs: linear(*inputs), norm_heads=lambda x, weight, eps: x * weight
        ),
        seconds=(2.0, 1.0),
    )
    monkeypatch.setattr(vllm_kernels, "_CHOICES", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: fake.capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(model_layers, "kernels", fake.kernels, raising=False)
    monkeypatch.setitem(sys.modules, "keel.model.layers.kernels", fake.kernels)
    monkeypatch.setattr(vllm_kernels, "_without_split_k", lambda *inputs: linear(*inputs))
    monkeypatch.setattr(vllm_kernels, "_default", lambda *inputs: linear(*inputs))
    clock = iter(fake.seconds)
    monkeypatch.setattr(vllm_kernels, "_seconds", lambda _: next(clock))
    return fake


def own(*inputs: Any) -> Tensor:
    return linear(*inputs)


def other(*inputs: Any) -> Tensor:
    return linear(*inputs) + 1


def taken() -> Callable[..., Any]:
    vllm_kernels.linear_like(own, WIDE[:2], WIDE)
    (choice,) = vllm_kernels._CHOICES.values()
    return choice


@pytest.mark.parametrize("differs", ["few_rows", "whole", "both"])
def test_variants_must_be_bit_identical(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    if differs != "whole":
        gpu.kernels.few_rows = other
    if differs != "few_rows":
        monkeypatch.setattr(vllm_kernels, "_without_split_k", other)
    expected = {
        "few_rows": vllm_kernels._without_split_k,
        "whole": gpu.kernels.few_rows,
        "both": own,
    }
    assert taken() is expected[differs]


@pytest.mark.parametrize("same", [False, True])
def test_norms_must_be_bit_identical(gpu: SimpleNamespace, same: bool) -> None:
    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * weight + float(not same)

    vllm_kernels.norm_heads_like(plain, torch.ones(2, 3, 4), torch.ones(4), 1e-6)
    assert list(vllm_kernels._CHOICES.values()) == [gpu.kernels.norm_heads if same else plain]
