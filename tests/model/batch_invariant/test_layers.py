"""Batch-invariant layers with plain kernels match transformers.

tests/gpu/test_invariant.py tests them with the engine's kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from keel.configs.schema import ConfigError
from keel.model.attention import Segments, use_packed_attention
from keel.model.batch_invariant import layers
from keel.model.batch_invariant.layers import check_invariant, use_invariant_layers
from keel.model.batch_invariant.vllm_kernels import BLOCK, Pages
from tests.model.batch_invariant import plain_kernels

LENGTHS = (BLOCK + 3, 1, 2 * BLOCK, 7)


def config(family: str, **more: Any) -> Any:
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


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", layers.FAMILIES)
def test_hidden_states_and_gradients_are_unchanged(
    family: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "HEAD", 8)
    model, segments = build(family), Segments.of(LENGTHS)
    hidden, gradients = forward_backward(model, segments)
    names = list(model.state_dict())
    monkeypatch.setattr(layers, "engine", plain_kernels)
    monkeypatch.setattr(layers, "gradients", plain_kernels.gradients)
    use_invariant_layers(model)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    again, new = forward_backward(model, segments)
    torch.testing.assert_close(again, hidden, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names
    assert set(new) == set(gradients)
    for name, gradient in gradients.items():
        terms = max(1.0, float(gradient.abs().max()))  # scale of cancelling terms
        torch.testing.assert_close(new[name], gradient, rtol=1e-3, atol=1e-5 * terms, msg=name)


def test_segments_have_separate_blocks() -> None:
    pages = Pages.of(LENGTHS, torch.device("cpu"))
    count = sum(LENGTHS)
    x = torch.arange(1, count + 1.0)[:, None, None]
    laid = pages.lay_out(x)
    assert laid.shape == (2 + 1 + 2 + 1, BLOCK, 1, 1)
    for segment, part in enumerate(x.split(list(LENGTHS))):
        own = laid[pages.table[segment].long()].flatten()[: len(part)]
        assert own.tolist() == part.flatten().tolist()
    assert int((laid > 0).sum()) == count


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (config("mixtral"), "mixtral"),
        (config("qwen3", **WINDOWS), "sliding windows"),
        (config("llama", rope_parameters=PARTIAL), "partial rotary"),
        (config("qwen3"), "head size of 8"),
    ],
)
def test_unsupported_models_are_refused(kind: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=f"model.batch_invariant.*{what}.*'somewhere'"):
        check_invariant(kind, "somewhere")
