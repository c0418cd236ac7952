"""The residual stream in float32 by a GPU's own kernels, compiled and not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keel.model.layers.fused import use_fused_layers
from keel.model.layers.residual import use_float32_residual
from keel.model.trainable import decoder_layers
from tests.gpu.marks import GPU
from tests.gpu.mismatch import mismatch
from tests.model.layers.test_residual import build, error, gradients

pytestmark = GPU
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_float32(dtype: torch.dtype, compiled: bool) -> None:
    model = build("qwen3", dtype).to("cuda").train()
    use_fused_layers(model)
    use_float32_residual(model)
    if compiled:
        for layer in decoder_layers(model):
            layer.compile(dynamic=True)
    ours = gradients(model)
    exact = gradients(build("qwen3", dtype).float())
    assert ours.keys() == exact.keys()
    assert not [name for name in ours if error(ours[name], exact[name]) > 0.03]


def test_engine_and_trainer_differ_less(tmp_path: Path) -> None:
    """The second engine reuses the compile cache of the first."""
    found = mismatch(tmp_path, "qwen3", "float16-compiled", "float16-residual")
    ours, plain = (found[name]["logp_abs"] for name in ("float16-residual", "float16-compiled"))
    assert ours < 0.9 * plain
