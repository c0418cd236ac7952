"""`model.batch_invariant`: the trainer equals the engine bit for bit, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.model.batch_invariant.layers import FAMILIES
from tests.gpu.marks import GPU
from tests.gpu.mismatch import mismatch

pytestmark = GPU

HEAD = 1e-5
"""Nats: float32 logits, added up in another order."""


@pytest.mark.parametrize("family", FAMILIES)
def test_ratios_are_one(family: str, tmp_path: Path) -> None:
    found = mismatch(tmp_path, family, "bfloat16", "bfloat16-invariant")
    ours = found["bfloat16-invariant"]
    assert ours["logp_abs"] < HEAD
    assert ours["ratio_max"] < 1 + 10 * HEAD
    assert found["bfloat16"]["logp_abs"] > 100 * HEAD  # or this could not fail
