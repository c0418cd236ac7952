"""What counts as a pass."""

from __future__ import annotations

import math

import pytest

from keel.rl.passing import passed


def test_a_whole_score_passes_whatever_order_its_parts_were_added_up_in() -> None:
    assert passed(1.0)
    assert passed(sum([0.1] * 10))  # 0.9999999999999999
    assert passed(sum([1 / 49] * 49))


@pytest.mark.parametrize("partial", [0.0, 0.5, 0.999, 1999 / 2000, 0.9999999, math.nan])
def test_partial_credit_is_no_pass_however_near_it_comes(partial: float) -> None:
    assert not passed(partial)
