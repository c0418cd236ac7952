"""FlashAttention-4's operators with plain kernels of the same signature.

tests/gpu/test_attention.py tests the package's kernels.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from keel.model.attention import Segments, attention_kept, use_packed_attention
from keel.model.layers import flash4
from keel.model.layers.flash4 import HeadWidths, disagreement
from tests.model.layers.plain_attention import FAMILIES, Plain

LENGTHS = (3, 17, 1, 9)


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
    monkeypatch.setattr(plain, "_flash_attn_bwd", lambda *_, **options: None)
    assert "100%" in difference()

    def broken(*_: Any, **options: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(plain, "_flash_attn_fwd", broken)
    assert "RuntimeError: no kernel image" in difference()
    monkeypatch.setattr(flash4, "fits", lambda width, *_: width < 16)
    monkeypatch.setattr(flash4, "_kernels", Plain)
    assert "no kernels" in difference()
