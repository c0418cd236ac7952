"""The support head against a dense float64 softmax."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keel.model.head import support
from keel.model.head.support import HeadSpec, support_head
from keel.model.logprobs import support_logprobs
from keel.rl.types import SamplingMasks
from tests.model.head.dense import close, dense


def case(sizes: list[int], vocab: int, dim: int, seed: int = 0, dtype=torch.float32):
    """Draw inputs whose token t keeps sizes[t] ids; 0 means no truncation."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    spans = [rng.permutation(vocab)[:size] for size in sizes]
    targets = [rng.choice(span) if len(span) else rng.integers(vocab) for span in spans]
    hidden = torch.randn(len(sizes), dim).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim).to(dtype).requires_grad_()
    return hidden, weight, torch.tensor(targets, dtype=torch.long), SamplingMasks.from_lists(spans)


def tensors(kept: SamplingMasks) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(kept.ids), torch.from_numpy(kept.offsets)


def against_dense(hidden, weight, targets, kept, *, temperature=1.0, spec=None, tolerance=1e-4):
    inputs = [hidden, weight] + ([spec.bias] if spec and spec.bias is not None else [])
    logp, entropy = support_head(
        hidden, weight, targets, *tensors(kept), temperature=temperature, spec=spec or HeadSpec()
    )
    expected, expected_entropy = dense(hidden, weight, targets, kept, temperature, spec)
    assert logp.dtype == torch.float32 and logp.shape == targets.shape
    close(logp, expected, tolerance)
    close(entropy, expected_entropy, tolerance)
    assert not entropy.requires_grad
    upstream = torch.linspace(-1, 1, len(targets))
    grads = torch.autograd.grad(logp, inputs, upstream)
    for grad, expected_grad, value in zip(
        grads, torch.autograd.grad(expected, inputs, upstream.double()), inputs, strict=True
    ):
        assert grad.dtype == value.dtype
        close(grad, expected_grad, tolerance * (100 if value.dtype == torch.bfloat16 else 1))


@pytest.fixture(params=["gather", "gemm"])
def plan(request, monkeypatch):
    """Force each plan, with uneven chunks."""
    monkeypatch.setitem(support.GATHER_COST, "cpu", 0 if request.param == "gather" else 10**9)
    monkeypatch.setitem(support.GATHER_ELEMENTS, "cpu", 40)
    monkeypatch.setitem(support.GEMM_ELEMENTS, "cpu", 1)
    monkeypatch.setattr(support, "GEMM_ROWS", 3)


@pytest.mark.parametrize("sizes", [[3, 1, 7, 11, 2, 5, 4], [0] * 7, [0, 4, 0, 1, 0, 11, 6], [2]])
def test_batches_match_a_dense_softmax(plan, sizes):
    against_dense(*case(sizes, vocab=11, dim=6), temperature=0.7)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 13), min_size=1, max_size=12),
    gemm=st.booleans(),
    temperature=st.floats(0.3, 3.0),
    scale=st.floats(0.25, 4.0),
    softcap=st.none() | st.floats(2.0, 30.0),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_spans_match_a_dense_softmax(sizes, gemm, temperature, scale, softcap, biased, seed):
    hidden, weight, targets, kept = case(sizes, vocab=13, dim=5, seed=seed)
    bias = torch.randn(13, requires_grad=True) if biased else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(support.GATHER_COST, "cpu", 10**9 if gemm else 0)
        spec = HeadSpec(bias=bias, scale=scale, softcap=softcap)
        # float32 rounds logits relative to their size.
        tolerance = 1e-4 * max(1.0, scale / temperature)
        against_dense(
            hidden, weight, targets, kept, temperature=temperature, spec=spec, tolerance=tolerance
        )


def test_float64_gradients(plan):
    against_dense(
        *case([3, 0, 5, 1], vocab=9, dim=4, dtype=torch.float64),
        spec=HeadSpec(softcap=5.0),
        tolerance=1e-6,
    )


def test_bfloat16_is_summed_in_float32(plan):
    """Sums in bfloat16 would be off by 0.1."""
    against_dense(*case([3, 0, 30, 7], vocab=40, dim=256, dtype=torch.bfloat16), tolerance=2e-4)


def test_huge_logits_stay_finite(plan):
    hidden, weight, targets, kept = case([3, 0, 5], vocab=9, dim=4)
    logp, entropy = support_head(
        (hidden * 1e4).detach(), weight, targets, *tensors(kept), temperature=0.5
    )
    assert torch.isfinite(logp).all() and torch.isfinite(entropy).all()


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize(("size", "most"), [(4, 10_000), (0, support.GEMM_ROWS * 1000)])
def test_tokens_times_vocabulary_never_exists(size, most):
    """T·V is 600,000; the largest tensor is the weight or one block of logits."""
    hidden, weight, targets, kept = case([size] * 600, vocab=1000, dim=10)
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as largest:
        patch.setitem(support.GEMM_ELEMENTS, "cpu", 1)
        support_logprobs(hidden, weight, targets, *tensors(kept)).sum().backward()
    assert largest.elements <= max(most, weight.numel(), 600 * 4 * 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.long)}, "hidden"),
        ({"weight": torch.zeros(8, 5)}, "weight"),
        ({"targets": torch.tensor([1, 2, 8])}, "targets: row 2"),
        ({"targets": torch.tensor([1, 2, -1])}, "targets: row 2"),
        ({"targets": torch.tensor([1, 5, 3])}, "targets: row 1"),
        ({"kept_ids": torch.tensor([1, 0, 2, 8])}, "kept_ids: row 1"),
        ({"kept_ids": torch.tensor([1, -1, 2, 4])}, "kept_ids: row 0"),
        ({"kept_ids": torch.tensor([1, 1, 2, 4])}, "kept_ids: row 0"),
        ({"kept_ids": torch.tensor([1, 0, 2])}, "kept_offsets"),
        ({"kept_offsets": torch.tensor([0, 2, 4])}, "kept_offsets"),
        ({"kept_offsets": torch.tensor([1, 2, 4, 4])}, "kept_offsets"),
        ({"kept_offsets": torch.tensor([0, 4, 2, 4])}, "kept_offsets"),
        ({"spec": HeadSpec(bias=torch.zeros(7))}, "bias"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    arguments = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(8, 4),
        "targets": torch.tensor([1, 2, 3]),
        "kept_ids": torch.tensor([1, 0, 2, 4]),
        "kept_offsets": torch.tensor([0, 2, 4, 4]),
    }
    support_head(**arguments)
    with pytest.raises(ValueError, match=message):
        support_head(**{**arguments, **change})


@given(st.data())
def test_masks_are_validated_like_sets(data):
    """Compare with a naive check of each mask."""
    vocab, token = 7, st.integers(-1, 7)  # one beyond either end
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    dtype = data.draw(st.sampled_from([torch.int8, torch.int32, torch.int64]))
    spans = [[data.draw(token) for _ in range(size)] for size in sizes]
    targets = [data.draw(token) for _ in sizes]
    valid = all(
        t in range(vocab)
        and all(i in range(vocab) for i in span)
        and len(set(span)) == len(span)
        and (t in span or not span)
        for t, span in zip(targets, spans, strict=True)
    )
    ids = torch.tensor([i for span in spans for i in span], dtype=dtype)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    with nullcontext() if valid else pytest.raises(ValueError, match="row"):
        support._check_values(torch.tensor(targets), ids, offsets, vocab)
