"""Marks of this folder's modules: GPU, or KERNELS where the tests are of Triton's kernels.

Those run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

import os

import pytest
import torch
from packaging import version

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: pytest -m gpu"),
]
KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="needs a GPU, or TRITON_INTERPRET=1 (slow): pytest -m gpu",
    ),
]


def skip_without_flash4() -> None:
    """Skip the test unless PyTorch can run FlashAttention-4 on this GPU."""
    pytest.importorskip("flash_attn.cute.interface")
    if version.parse(torch.__version__) < version.parse("2.13"):
        pytest.skip("older versions of PyTorch refuse FlashAttention-4's backward pass")
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs a Hopper or Blackwell GPU")
