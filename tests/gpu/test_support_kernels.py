"""The support head's kernels against a dense softmax in float64.

They run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from keel.model.head import gpu as support_gpu
from keel.model.head.cpu import LogitTransform
from keel.model.head.gpu import build_plan, fused_head
from keel.model.head.kernels import _LONG_ROW
from tests.gpu.marks import DEVICE, INTERPRETED, KERNELS

pytestmark = KERNELS
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3 if INTERPRETED else 4e-3}
"""Relative error ‖x − exact‖ / ‖exact‖ of gradients. Rounding to bfloat16 errs by up to 2^-9; the
interpreter truncates, which doubles the error."""


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    ids: Tensor
    offsets: Tensor
    shape: LogitTransform

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x for x in (self.hidden, self.weight, self.bias) if x is not None]
        return [x.detach().clone().to(dtype).requires_grad_() for x in inputs]


def make_case(
    *,
    tokens: int = 24,
    vocabulary: int = 96,
    d: int = 72,
    sizes: tuple[int, ...] = (1, 2, 5, 9),
    dtype: torch.dtype = torch.float32,
    biased: bool = False,
    shape: LogitTransform | None = None,
    common: int | None = None,
    seed: int = 0,
) -> Case:
    """Token t keeps `sizes[t % len(sizes)]` ids; size 0 means it was not truncated."""
    generator = torch.Generator().manual_seed(seed)
    spans, targets = [], []
    for t in range(tokens):
        size = sizes[t % len(sizes)]
        span = torch.randperm(vocabulary, generator=generator)[:size]
        if common is not None and size and not bool((span == common).any()):
            span[0] = common
        choice = span if size else torch.arange(vocabulary)
        targets.append(choice[torch.randint(len(choice), (1,), generator=generator)])
        spans.append(span)
    lengths = torch.tensor([0, *(len(span) for span in spans)])
    bias = torch.randn(vocabulary, generator=generator).to(dtype) if biased else None
    return Case(
        hidden=torch.randn(tokens, d, generator=generator).to(DEVICE, dtype),
        weight=(torch.randn(vocabulary, d, generator=generator) * 0.2).to(DEVICE, dtype),
        bias=None if bias is None else bias.to(DEVICE),
        targets=torch.cat(targets).to(DEVICE),
        ids=torch.cat(spans),
        offsets=lengths.cumsum(0),
        shape=shape or LogitTransform(),
    )


def run(case: Case, grad: Tensor) -> list[Tensor]:
    """logp, entropy, gradients of hidden, weight and bias, from the kernels."""
    leaves = case.leaves(case.hidden.dtype)
    vocabulary, d = case.weight.shape
    plan = build_plan(case.ids, case.offsets, vocabulary=vocabulary, d=d, device=DEVICE)
    hidden, weight, *bias = leaves
    logp, entropy = fused_head(
        hidden, weight, case.targets, plan, bias=bias[0] if bias else None, transform=case.shape
    )
    logp.backward(grad)
    return [logp.detach(), entropy, *(x.grad for x in leaves if x.grad is not None)]


def exact(case: Case, grad: Tensor) -> list[Tensor]:
    """The same in float64 over the whole vocabulary, without kernels."""
    leaves = case.leaves(torch.float64)
    z = leaves[0] @ leaves[1].t()
    if len(leaves) > 2:
        z = z + leaves[2]
    z = z * case.shape.scale
    if case.shape.softcap:
        z = case.shape.softcap * torch.tanh(z / case.shape.softcap)
    z = z / case.shape.temperature
    kept = torch.zeros(z.shape, dtype=torch.bool)
    for t in range(z.shape[0]):
        span = case.ids[case.offsets[t] : case.offsets[t + 1]]
        kept[t, span if len(span) else slice(None)] = True
    log_p = torch.log_softmax(z.masked_fill(~kept.to(DEVICE), float("-inf")), -1)
    logp = log_p.gather(1, case.targets[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p.masked_fill(~kept.to(DEVICE), 0.0)).sum(1)
    logp.backward(grad.double())
    return [logp.detach(), entropy.detach(), *(x.grad for x in leaves if x.grad is not None)]


def check(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(case.hidden.shape[0], generator=generator).to(DEVICE)
    results, expected = run(case, grad), exact(case, grad)
    assert len(results) == len(expected)
    for result, value in zip(results[:2], expected[:2], strict=True):
        torch.testing.assert_close(result.double(), value, atol=2e-5, rtol=1e-5)
    for result, value in zip(results[2:], expected[2:], strict=True):
        error = float((result.double() - value).norm() / value.norm())
        assert error < TOLERANCE[case.hidden.dtype], error


@pytest.fixture
def always_union(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_gpu, "_CHUNK_TOKENS", 8)
    monkeypatch.setattr(support_gpu, "_UNION_FLOOR", 6)
    monkeypatch.setattr(support_gpu, "_union_is_cheaper", lambda *_: True)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [LogitTransform(), LogitTransform(scale=0.7, softcap=3.0, temperature=0.6)],
    ids=["plain", "capped"],
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(1, 2, 5, 9), (0,), (0, 3, 0, 40), (4, 40, 8, 1, 17, 9)],
    ids=["kept", "full", "both", "union"],
)
def test_plans(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    shape: LogitTransform,
    biased: bool,
    request: pytest.FixtureRequest,
) -> None:
    if len(sizes) > 4:
        request.getfixturevalue("always_union")
    check(make_case(sizes=sizes, dtype=dtype, shape=shape, biased=biased))


@pytest.mark.usefixtures("always_union")
def test_all_three_plans_in_one_batch() -> None:
    sizes = (2,) * 8 + (30,) * 8 + (0, 3, 12, 12, 12, 12, 3, 3) + (0, 1) * 4
    case = make_case(tokens=32, sizes=sizes, biased=True)
    plan = build_plan(case.ids, case.offsets, vocabulary=96, d=72, device=DEVICE)
    assert [chunk.union is not None for chunk in plan.chunks] == [False, True, True, False]
    assert plan.full is not None and plan.full.numel() == 5
    check(case)


@DTYPES
def test_an_id_that_most_tokens_kept(dtype: torch.dtype) -> None:
    sizes = {"tokens": 2 * _LONG_ROW + 90, "vocabulary": 40, "d": 24, "sizes": (3, 1)}
    check(make_case(**sizes, dtype=dtype, common=7, biased=True))
    check(make_case(tokens=6, vocabulary=12, d=1100, sizes=(5, 3)))  # several blocks of columns


@DTYPES
def test_bits_repeat(dtype: torch.dtype) -> None:
    case = make_case(tokens=64, sizes=(3, 0, 20, 9), dtype=dtype, biased=True)
    grad = torch.ones(64, device=DEVICE)
    first, second = run(case, grad), run(case, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no device to wait for")
def test_passes_never_wait_for_the_device() -> None:
    case = make_case(tokens=64, sizes=(3, 0, 20, 9), dtype=torch.bfloat16, biased=True)
    plan = build_plan(case.ids, case.offsets, vocabulary=96, d=72, device=DEVICE)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logp, _ = fused_head(
            hidden, weight, case.targets, plan, bias=case.bias, transform=case.shape
        )
        logp.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())
