"""One rank of the trainer on a GPU: bfloat16 with flash attention, compiled or recomputed and
offloaded, against float32 without any of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl.metrics import values
from tests.e2e.trainer_batches import write_model
from tests.e2e.trainer_scenarios import TIGHT, Ranks, training
from tests.gpu.marks import GPU

pytestmark = GPU


def test_bfloat16_follows_float32_under_every_stage(tmp_path: Path) -> None:
    write_model(tmp_path / "untied")
    ranks = Ranks(0, 1, dist.HashStore(), tmp_path)
    plain = values(training(0)(ranks)["metrics"][0])
    for stage in (0, 1, 2, 3):
        for recomputed in (False, True):
            result = training(
                stage,
                dtype="bfloat16",
                tokens=TIGHT,
                activation_checkpointing=recomputed,
                offload_optimizer=recomputed and stage > 0,
                compile=not recomputed and stage < 3,
            )(ranks)
            first = values(result["metrics"][0])
            assert first["loss"] == pytest.approx(plain["loss"], abs=0.01)
            assert first["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.03)
            assert first["mismatch/kl"] == pytest.approx(plain["mismatch/kl"], rel=0.03)
            assert all(tensor.dtype == torch.bfloat16 for tensor in result["after"].values())
    dist.destroy_process_group()
