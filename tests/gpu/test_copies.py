"""Updates by copies on a GPU: from host memory, from memory shared with the sender, after sleep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.marks import GPU
from tests.gpu.test_recorders_native import EXACT
from tests.weights.updates import Model, check

pytestmark = GPU


@pytest.mark.parametrize(("of", "sleeps"), [("experts", True), ("dense", False)])
def test_updates_by_copies(tmp_path: Path, of: Model, sleeps: bool) -> None:
    check(tmp_path, of, sleeps=sleeps, shared=sleeps, gpu=True, variables=EXACT)
