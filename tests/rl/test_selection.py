"""Recorded selections of sparse attention, packed with the tokens that they are about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from keel.rl.packing import pack
from keel.rl.types import Segment
from tests.rl.rollouts import scored, segment, trajectory


def recorded(first: int, tokens: int, width: int) -> Segment:
    """Whose rows hold the token's own id, so that any slip shows."""
    own = segment(first, tokens)
    rows = np.tile(own.token_ids_T[:, None, None], (1, 2, width))
    return replace(own, selected_TLk=rows)


def test_rows_go_with_their_tokens_and_are_filled_up() -> None:
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


def test_another_number_of_layers_or_tokens_is_refused() -> None:
    one = recorded(0, 4, 2)
    other = replace(one, selected_TLk=np.zeros((4, 3, 2), np.int32))
    group = scored([trajectory(one), trajectory(other, sibling=1)], [1.0, 0.0])
    with pytest.raises(ValueError, match=r"selected_TLk has \(L, k\) = \(3, 2\), others have"):
        pack([group], ranks=1, micro_batch_tokens=9)
    with pytest.raises(ValueError, match="selected_TLk has 3 entries for 4 tokens"):
        replace(one, selected_TLk=np.zeros((3, 2, 2), np.int32))
    with pytest.raises(ValueError, match=r"selected_TLk must be \[T, L, k\]"):
        replace(one, selected_TLk=np.zeros((4, 2), np.int32))
