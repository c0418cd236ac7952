"""The driver holds the pool, and must start quickly: no vLLM in its process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def test_the_drivers_side_does_not_import_vllm() -> None:
    code = (
        "import sys, keel.rollout.engine.worker, keel.rollout.pool.ray_engines\n"
        "print([name for name in ('vllm', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"
