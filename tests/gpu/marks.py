"""Marks of this folder's modules: GPU, or KERNELS where the tests are of Triton's kernels.

Those run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

import os

import pytest
import torch

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
