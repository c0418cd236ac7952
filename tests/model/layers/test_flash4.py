"""FlashAttention-4's operators with plain kernels of the same signature.

tests/gpu/test_attention.py tests the package's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel, Qwen3Config

from keel.model.attention import Segments, attention_kept, use_packed_attention
from keel.model.layers import flash4
from keel.model.layers.flash4 import HeadWidths, disagreement

LENGTHS = (3, 17, 1, 9)
SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FAMILIES = {"full": Qwen3Config(**SMALL), "sliding": MistralConfig(**SMALL, sliding_window=5)}


def weights_of(
    query: Tensor, key: Tensor, causal: bool, scale: float, reach: int | None
) -> tuple[Tensor, Tensor]:
    """Return float64 scores of one segment and its mask, [H, N, N]."""
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    step = torch.arange(len(key))
    back = step[len(key) - len(query) :, None] - step  # queries are the last positions
    far = (back < 0) if causal else (back < 0) | (back > (reach or 0))
    return scores.masked_fill(far, -torch.inf), far


def pieces(*inputs: tuple[Tensor, Tensor], heads: int) -> Iterator[list[Tensor]]:
    """Yield the float64 tensors of each segment with `heads` heads."""
    parts = [x.double().tensor_split(offsets[1:-1].long()) for x, offsets in inputs]
    for cut in zip(*parts, strict=True):
        yield [x.repeat_interleave(heads // x.shape[1], 1) for x in cut]


class Plain:
    """Imitates the package's module."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        out: Tensor,
        lse: Tensor,
        return_lse: bool,
    ) -> None:
        self.calls.append("forward")
        actual: list[tuple[Tensor, Tensor]] = []
        of_keys = [(x, cu_seqlens_k) for x in (k, v)]
        for query, key, value in pieces((q, cu_seqlens_q), *of_keys, heads=q.shape[1]):
            scores, _ = weights_of(query, key, causal, softmax_scale, window_size_left)
            actual.append(
                (torch.einsum("hij,jhd->ihd", scores.softmax(-1), value), scores.logsumexp(-1))
            )
        out.copy_(torch.cat([one for one, _ in actual]))
        lse.copy_(torch.cat([one for _, one in actual], 1))

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        self.calls.append("backward")
        start, key_start, heads = 0, 0, q.shape[1]
        of_queries = [(x, cu_seqlens_q) for x in (q, out, dout)]
        of_keys = [(x, cu_seqlens_k) for x in (k, v)]
        for piece in pieces(*of_queries, *of_keys, heads=heads):
            query, output, slope, key, value = piece
            part, of_context = (
                slice(start, start + len(query)),
                slice(key_start, key_start + len(key)),
            )
            start, key_start = start + len(query), key_start + len(key)
            scores, far = weights_of(query, key, causal, softmax_scale, window_size_left)
            weights = (scores - lse[:, part, None].double()).exp().masked_fill(far, 0)
            of_weights = torch.einsum("ihd,jhd->hij", slope, value)
            of_scores = weights * (of_weights - (slope * output).sum(-1).T[:, :, None])
            for_keys = torch.einsum("hij,ihd->jhd", of_scores, query) * softmax_scale
            for_values = torch.einsum("hij,ihd->jhd", weights, slope)
            shared = (-1, heads // k.shape[1])
            dq[part] = (torch.einsum("hij,jhd->ihd", of_scores, key) * softmax_scale).to(q.dtype)
            dk[of_context] = for_keys.unflatten(1, shared).sum(2).to(k.dtype)
            dv[of_context] = for_values.unflatten(1, shared).sum(2).to(v.dtype)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Plain:
    kernels = Plain()
    monkeypatch.setattr(flash4, "_kernels", lambda: kernels)
    return kernels


def trained(model: PreTrainedModel) -> list[Tensor]:
    """Return hidden states and all gradients."""
    torch.manual_seed(1)
    hidden = model.base_model(
        torch.randint(0, 31, (1, sum(LENGTHS))),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        use_cache=False,
        segments=Segments.of(LENGTHS),
    ).last_hidden_state[0]
    (hidden * torch.randn(hidden.shape)).sum().backward()
    return [hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def with_kernels(model: PreTrainedModel) -> PreTrainedModel:
    copy = deepcopy(model).train()
    use_packed_attention(copy, flash4=True)
    return copy


def close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * max(1.0, scale))


@pytest.mark.parametrize("family", FAMILIES)
def test_results_match_pytorch(family: str, plain: Plain) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    model.train()
    ours = with_kernels(model)
    use_packed_attention(model)
    close(trained(ours), trained(model))
    assert plain.calls == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_attention_outputs_survive_checkpointing(plain: Plain, compiled: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["full"])
    expected = trained(with_kernels(model))
    for kept, forwards in ((True, 2), (False, 4)):
        again = with_kernels(model)
        options = {"context_fn": attention_kept} if kept else {}
        again.gradient_checkpointing_enable({"use_reentrant": False, **options})
        if compiled:
            for layer in again.get_decoder().layers:  # pyright: ignore
                layer.compile(backend="aot_eager", dynamic=True, fullgraph=True)
        plain.calls.clear()
        close(trained(again), expected)
        assert [plain.calls.count(half) for half in ("forward", "backward")] == [forwards, 2]


def test_wrong_results_are_detected(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "fits", lambda *_: True)
    cpu = torch.device("cpu")
    shapes = (HeadWidths(4, 2, 8, 8), HeadWidths(4, 2, 16, 8, window=9))

    def difference() -> str:
        disagreement.cache_clear()
        return disagreement(shapes, cpu, torch.float32)

    assert difference() == ""
    correct = plain._flash_attn_bwd

    def wrong(*given: Any, dk: Tensor, **options: Any) -> None:
        correct(*given, dk=dk, **options)
        if "window_size_left" in options:
            dk *= 1.2

    monkeypatch.setattr(plain, "_flash_attn_bwd", wrong)
    assert "gradients of K" in difference() and "20%" in difference()
    monkeypatch.setattr(plain, "_flash_attn_fwd", lambda *_, out, **options: out.zero_())
    assert "100%" in difference()

    def broken(*_: Any, **options: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(plain, "_flash_attn_fwd", broken)
    assert "RuntimeError: no kernel image" in difference()
    monkeypatch.setattr(flash4, "fits", lambda width, *_: width < 16)
    monkeypatch.setattr(flash4, "_kernels", Plain)
    assert "no kernels" in difference()
