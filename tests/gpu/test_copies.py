"""Updates by copies on a GPU: from host memory, from memory shared with the sender, after sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.gpu.marks import GPU
from tests.gpu.test_recorders_native import BLOCKS, EXACT
from tests.recorders.updates import check

pytestmark = GPU


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("of", ["experts", "dense"])
def test_updates_by_copies(tmp_path: Path, of: Literal["experts", "dense"], sleeps: bool) -> None:
    check(tmp_path, of, sleeps=sleeps, shared=sleeps, gpu=True, blocks=BLOCKS, variables=EXACT)
