"""Fixtures of the GPU tests."""

import pytest

from tests.gpu.marks import INTERPRETED
from tests.rollout import interpreted


@pytest.fixture(scope="session", autouse=True)
def triton() -> None:
    """Let vLLM use Triton's interpreter on a CPU, before a test imports vLLM."""
    if INTERPRETED:
        interpreted.lend_triton()
