"""Packing of recorded sparse attention selections."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from keel.rl.packing import pack
from keel.rl.types import Segment
from tests.rl.rollouts import scored, segment, trajectory


def recorded(first: int, tokens: int, width: int) -> Segment:
    """Build a segment whose selections repeat the token id, to expose misalignment."""
    plain = segment(first, tokens)
    rows = np.tile(plain.token_ids_T[:, None, None], (1, 2, width))
    return replace(plain, selected_TLk=rows)


def test_selections_stay_aligned_and_padded() -> None:
    longer, shorter, none = recorded(10, 6, 4), recorded(30, 5, 3), segment(50, 3)
    group = scored([trajectory(longer, none), trajectory(shorter, sibling=1)], [1.0, 0.0])
    for capacity in (100, 9):
        batches = pack([group], ranks=1, micro_batch_tokens=capacity)
        seen = 0
        for row in batches[0].micro_batches:
            assert row.selected_NLk is not None
            assert row.selected_NLk.shape == (len(row.token_ids_N), 2, 4)
            for token, rows in zip(row.token_ids_N, row.selected_NLk, strict=True):
                width = 4 if token < 30 else 3 if token < 50 else 0
                assert (rows[:, :width] == token).all() and (rows[:, width:] == -1).all()
                seen += 1
        assert seen == batches[0].total_tokens == 14
    (plain,) = pack([scored([trajectory(none)], [1.0])], ranks=1, micro_batch_tokens=9)
    assert plain.micro_batches[0].selected_NLk is None


def test_invalid_selections_are_refused() -> None:
    one = recorded(0, 4, 2)
    other = replace(one, selected_TLk=np.zeros((4, 3, 2), np.int32))
    group = scored([trajectory(one), trajectory(other, sibling=1)], [1.0, 0.0])
    with pytest.raises(ValueError, match="selected_TLk"):
        pack([group], ranks=1, micro_batch_tokens=9)
    with pytest.raises(ValueError, match="selected_TLk"):
        replace(one, selected_TLk=np.zeros((3, 2, 2), np.int32))
    with pytest.raises(ValueError, match="selected_TLk"):
        replace(one, selected_TLk=np.zeros((4, 2), np.int32))
