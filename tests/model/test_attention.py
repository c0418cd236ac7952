"""Packed segments give the results of separate ones."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from keel.model.attention import Segments, use_packed_attention
from tests.model.layers.plain_attention import FAMILIES

LENGTHS = (3, 17, 1, 9, 16, 8, 2)


def test_layout_has_every_token_once() -> None:
    segments = Segments.of(LENGTHS)
    total = sum(LENGTHS)
    assert segments.offsets.tolist() == [0, 3, 20, 21, 30, 46, 54, 56]
    assert segments.longest == 17
    assert len(segments.token_of_row) == sum(count * longest for count, longest in segments.blocks)
    assert torch.equal(segments.token_of_row[segments.row_of_token], torch.arange(total))
    assert segments.blocks == ((2, 17), (2, 9), (1, 3), (1, 2), (1, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate(family: str) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager")
    packed = deepcopy(plain)
    use_packed_attention(packed)
    parts = [torch.randint(0, 31, (1, length)) for length in LENGTHS]
    weights = torch.randn(sum(LENGTHS), 32)

    alone = torch.cat([plain.base_model(ids).last_hidden_state[0] for ids in parts])
    (alone * weights).sum().backward()
    together = packed.base_model(
        torch.cat(parts, 1),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        use_cache=False,
        segments=Segments.of(LENGTHS),
    ).last_hidden_state[0]
    (together * weights).sum().backward()

    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    for (name, expected), (_, actual) in zip(
        plain.named_parameters(), packed.named_parameters(), strict=True
    ):
        if expected.grad is not None:
            scale = float(expected.grad.abs().max())
            torch.testing.assert_close(
                actual.grad, expected.grad, rtol=0, atol=1e-5 * scale, msg=name
            )
