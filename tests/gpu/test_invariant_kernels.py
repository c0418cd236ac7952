"""Kernels against vLLM's batch-invariant kernels, and gradients against plain formulas.

Run on a GPU or under Triton's interpreter (TRITON_INTERPRET=1); bits are compared on a GPU only.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from keel.model.attention import Segments, attend
from keel.model.torch_internals import flash_gradients
from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS

# ruff: noqa: PLC0415
pytestmark = KERNELS
EPS = 1e-6
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""The interpreter multiplies no matrices of bfloat16."""
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU: vLLM's own kernels")


@pytest.fixture
def kernels() -> Any:
    from keel.model.layers import kernels

    return kernels


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def with_gaps(tokens: int, heads: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Heads as they lie in a joined projection."""
    return drawn(tokens, (heads + 3) * d, dtype=dtype)[:, d : (heads + 1) * d].unflatten(1, (-1, d))


def by_autograd(formula: Any, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(formula(*inputs), inputs, grad)


@pytest.mark.parametrize(("tokens", "heads", "d"), [(5, 3, 8), (70, 2, 128), (700, 1, 100)])
def test_gradients_of_norms(kernels: Any, tokens: int, heads: int, d: int) -> None:
    x, weight, grad = with_gaps(tokens, heads, d), drawn(d, seed=1), drawn(tokens, heads, d, seed=2)
    expected = by_autograd(lambda x, w: rms_norm(x, w.shape, w, EPS), grad, x, weight)
    for found, right in zip(kernels.rms_norm_grad(x, weight, EPS, grad), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    heads = kernels.norm_heads(x, weight, EPS)
    torch.testing.assert_close(heads, rms_norm(x, weight.shape, weight, EPS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "width"), [(3, 5), (40, 96)])
def test_gradients_of_gated_activations(kernels: Any, tokens: int, width: int) -> None:
    packed, grad = drawn(tokens, 2 * width), drawn(tokens, width, seed=1)

    def formula(packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, -1)
        return silu(gate) * up

    (expected,) = by_autograd(formula, grad, packed)
    found = kernels.swiglu_gradient(grad, packed)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows(kernels: Any, rows: int, biased: bool) -> None:
    x, weight = drawn(rows, 136, dtype=HALF), drawn(72, 136, dtype=HALF, seed=1)
    bias = drawn(72, dtype=HALF, seed=2) if biased else None
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = kernels.few_rows(x, weight, bias)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-3)


@on_a_gpu
@pytest.mark.parametrize("columns", [(4096, 1024), (1024, 3072), (2048, 6144), (4096, 12288)])
@pytest.mark.parametrize("rows", [1, 7, 16, 40, 128, 200, 512, 1000, 5000])
def test_gemms_have_vllms_bits(kernels: Any, rows: int, columns: tuple[int, int]) -> None:
    from keel.model.batch_invariant import vllm_kernels

    own = vllm_kernels._kernels().linear
    width, depth = columns
    x, weight = (drawn(n, depth, dtype=torch.bfloat16, seed=n) for n in (rows, width))
    bias = drawn(width, dtype=torch.bfloat16, seed=3)
    for of in (None, bias):
        assert torch.equal(vllm_kernels.linear(x, weight, of), own(x, weight, of))
        assert torch.equal(kernels.few_rows(x, weight, of), own(x, weight, of))
        assert vllm_kernels._choose_linear(own, x, weight, of) is not own


@on_a_gpu
@pytest.mark.parametrize(("heads", "d"), [(16, 128), (8, 128), (1, 1024), (40, 128), (1, 4096)])
def test_norms_have_vllms_bits(kernels: Any, heads: int, d: int) -> None:
    from keel.model.batch_invariant import vllm_kernels

    x, weight = (with_gaps(300, heads, d, torch.bfloat16), drawn(d, dtype=torch.bfloat16, seed=1))
    own = vllm_kernels._kernels().rms_norm(x, weight, EPS)
    assert torch.equal(vllm_kernels.rms_norm(x, weight, EPS), own)
    if heads > 1:
        assert torch.equal(kernels.norm_heads(x, weight, EPS), own)


@on_a_gpu
def test_attention_and_gradients_equal_the_plain_kernel() -> None:
    from keel.model.batch_invariant import vllm_kernels

    lengths, half, scale = (37, 200, 1, 128), torch.bfloat16, 128**-0.5
    segments = Segments.of(lengths, DEVICE)
    query = with_gaps(sum(lengths), 8, 128, half)
    key, value = (with_gaps(sum(lengths), 2, 128, half).roll(n, 0) for n in (1, 2))
    grad = drawn(sum(lengths), 8, 128, dtype=half, seed=5)
    out, sums = vllm_kernels.attention(query, key, value, segments, scale)
    ends = segments.offsets, segments.longest
    found = flash_gradients(grad, query, key, value, out, sums, *ends, scale)
    plain = attend(query, key, value, segments, scale, None)
    expected = by_autograd(
        lambda q, k, v: attend(q, k, v, segments, scale, None), grad, query, key, value
    )
    for one, other in ((out, plain), *zip(found, expected, strict=True)):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 5e-3


@on_a_gpu
@pytest.mark.parametrize("normalize", [False, True])
def test_experts_are_batch_invariant(normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from keel.model.batch_invariant import vllm_kernels
    from keel.model.batch_invariant.layers import _expert_weights, _Routed

    monkeypatch.setenv(vllm_kernels.VARIABLE, "1")
    tokens, experts, top_k, width, inner = 300, 16, 4, 512, 256
    x, router = drawn(tokens, width), drawn(experts, width, seed=1) / width**0.5
    gate_up = drawn(experts, 2 * inner, width, seed=2) / width**0.5
    down, grad = drawn(experts, width, inner, seed=3) / inner**0.5, drawn(tokens, width, seed=4)
    x, router, gate_up, down, grad = (
        tensor.bfloat16() for tensor in (x, router, gate_up, down, grad)
    )
    logits = linear(x, router)
    exact, chosen = vllm_kernels.route(logits, top_k, normalize)

    def exact_layer(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weights = _expert_weights(logits, chosen.long(), normalize)
        assert torch.equal(weights, exact)
        return _Routed.apply(x, chosen.long(), weights, gate_up, down)

    def formula(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weights = logits.softmax(-1).gather(1, chosen.long())
        weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
        gate, up = torch.einsum("td,tkid->tki", x, gate_up[chosen.long()]).chunk(2, -1)
        rows = torch.einsum("tki,tkdi->tkd", silu(gate) * up, down[chosen.long()])
        return (rows * weights[..., None]).sum(1)

    inputs = (x, logits, gate_up, down)
    whole = exact_layer(*inputs)
    for few in (1, 7, 64):
        part = vllm_kernels.run_experts(x[:few], chosen[:few], exact[:few], gate_up, down)
        assert torch.equal(part, whole[:few])
    wide = [tensor.float() for tensor in inputs]
    found = whole, *by_autograd(exact_layer, grad, *inputs)
    expected = formula(*wide), *by_autograd(formula, grad.float(), *wide)
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).norm() / other.double().norm() < 2e-2


@on_a_gpu
@pytest.mark.parametrize("experts", [(128, 2048, 768, 8), (32, 1024, 256, 4)])
@pytest.mark.parametrize("tokens", [1, 16, 300, 1000, 9000])
def test_expert_tiles_have_vllms_bits(
    experts: tuple[int, ...], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    from keel.model.batch_invariant import vllm_kernels

    if torch.cuda.get_device_capability()[0] != vllm_kernels._HOPPER:
        pytest.skip("vLLM's own tiles are used on other GPUs than Hopper")
    monkeypatch.setenv(vllm_kernels.VARIABLE, "1")
    patched: Any = fused_moe.get_default_config  # perhaps by another test
    own = getattr(patched, "keel_patch", patched)
    monkeypatch.setattr(fused_moe, "get_default_config", own)
    count, width, inner, top_k = experts
    draw = torch.Generator(DEVICE).manual_seed(0)

    def weights(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=DEVICE, dtype=torch.bfloat16) / 30

    x, gate_up, down = (
        weights(tokens, width),
        weights(count, 2 * inner, width),
        weights(count, width, inner),
    )
    shares, chosen = weights(tokens, count).float().softmax(-1).topk(top_k, -1)
    plain = vllm_kernels.run_experts(x, chosen, shares, gate_up, down)
    vllm_kernels.use_larger_expert_tiles()
    assert fused_moe.get_default_config is not own
    assert torch.equal(vllm_kernels.run_experts(x, chosen, shares, gate_up, down), plain)
