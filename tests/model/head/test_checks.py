"""The quick answer of the head's checks is the slow one's, whatever is wrong with the masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.model.head import checks

VOCAB = 7


def refusal(targets, ids, sizes) -> str:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    try:
        checks.check_values(targets, ids, offsets, VOCAB)
    except ValueError as error:
        return str(error)
    return ""


@given(st.data())
def test_quick_and_thorough_checks_agree(data) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    token = st.integers(-1, VOCAB)  # one beyond either end
    dtype = data.draw(st.sampled_from([torch.int8, torch.int32, torch.int64]))
    ids = torch.tensor([data.draw(token) for _ in range(sum(sizes))], dtype=dtype)
    targets = torch.tensor([data.draw(token) for _ in sizes])
    quick = refusal(targets, ids, sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_all_is_well", lambda *_: False)
        assert refusal(targets, ids, sizes) == quick


def test_right_masks_are_looked_at_once(monkeypatch) -> None:
    def never(*_):
        raise AssertionError("looked at twice")

    monkeypatch.setattr(checks, "_repeated_row", never)
    ascending, drawn = [1, 3, 5, 0, 2], [5, 1, 3, 2, 0]
    for ids in (ascending, drawn):
        given_ids = torch.tensor(ids, dtype=torch.int32)
        assert not refusal(torch.tensor([3, 6, 2]), given_ids, [3, 0, 2])
