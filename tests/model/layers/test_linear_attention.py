"""Packed segments of hybrid models give the results of separate ones."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from keel.model.attention import LINEAR_FAMILIES, Segments, use_packed_attention

LENGTHS = (3, 130, 1, 9, 8, 2)
"""The delta rule computes chunks of 64 tokens."""
SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "pad_token_id": None,
    "eos_token_id": 0,
    "initializer_range": 0.2,
}


def small(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL)).eval()
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    return model


def logprobs(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    """The log-probability of each token after the first, [N − 1]."""
    logits = model(input_ids=tokens, use_cache=False, **options).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_packed_equals_separate(family: str) -> None:
    plain = small(family)
    packed = deepcopy(plain)
    parts = [torch.randint(0, 31, (1, length)) for length in LENGTHS]
    weights = torch.randn(sum(LENGTHS))
    starts = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)

    rows = [logprobs(plain, part) for part in parts]  # before transformers' functions are replaced
    kept = torch.ones(sum(LENGTHS), dtype=torch.bool).index_fill(0, starts, False)[1:]
    alone, scale = torch.cat(rows), weights[1:][kept]
    (alone * scale).sum().backward()
    use_packed_attention(packed)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    options = {"position_ids": positions, "segments": Segments.of(LENGTHS)}
    together = logprobs(packed, torch.cat(parts, 1), **options)[kept]
    (together * scale).sum().backward()

    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
    assert (together - alone).abs().mean() < 1e-5
    for (name, expected), (_, actual) in zip(
        plain.named_parameters(), packed.named_parameters(), strict=True
    ):
        most = float(expected.grad.abs().max()) if expected.grad is not None else 0.0
        if most:
            torch.testing.assert_close(
                actual.grad, expected.grad, rtol=0, atol=2e-3 * most, msg=name
            )
    torch.testing.assert_close(logprobs(plain, parts[1]), rows[1], rtol=0, atol=0)  # unpacked rows


def test_segments_do_not_see_earlier_ones() -> None:
    model = small("qwen3_next")
    use_packed_attention(model)
    options = {
        "position_ids": torch.cat([torch.arange(n) for n in (5, 7)])[None],
        "segments": Segments.of((5, 7)),
    }
    tokens = torch.randint(1, 31, (1, 12))
    before = logprobs(model, tokens, **options)
    tokens[0, :5] = 0
    assert torch.equal(logprobs(model, tokens, **options)[5:], before[5:])


def test_shared_prompts_are_refused() -> None:
    model = small("qwen3_next")
    use_packed_attention(model)
    with pytest.raises(ValueError, match="no shared prompts"):
        model(
            input_ids=torch.zeros(1, 5, dtype=torch.long),
            position_ids=torch.arange(5)[None],
            use_cache=False,
            segments=Segments.of((2, 3), follows=(-1, 0)),
        )
