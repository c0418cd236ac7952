"""A loss that is scaled for float16: a run's end is Keel's to say, and no gradient is halved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keel.rl.metrics import values
from keel.rl.packing import pack
from keel.trainer.engine import engine as module
from keel.trainer.engine import zero
from keel.trainer.engine.engine import TrainerEngine
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.ranks import make_config
from tests.trainer.engine.skipping import with_nan

pytestmark = pytest.mark.e2e


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "compute_dtype", lambda *_: torch.float16)
    write_model(tmp_path)
    return tmp_path


def scaled(folder: Path, scale: float, *, stage: int = 1, lr: float = 1e-2) -> TrainerEngine:
    config = make_config(
        1,
        stage,
        dtype="float16",
        warmup_steps=0,
        lr=lr,
        weight_decay=0.0,
        beta1=0.0,
        grad_clip=100.0,
        offload_optimizer=stage == 2,
    )
    engine = TrainerEngine(str(folder), replace(config, run=replace(config.run, steps=100)))
    engine._engine.optimizer.loss_scaler.cur_scale = scale
    return engine


@pytest.mark.parametrize("stage", [1, 2])
def test_a_run_gives_up_and_names_the_token_at_the_least_scale_too(
    folder: Path, stage: int
) -> None:
    engine = scaled(folder, 4096.0, stage=stage)
    (good,) = pack(Rollouts(0, folder).groups(2, 3), ranks=1, micro_batch_tokens=4096)
    scales = [values(engine.step([batch]))["train/loss_scale"] for batch in (good, with_nan(good))]
    assert scales == [4096, 2048]
    assert values(engine.step([good]))["train/skipped_steps"] == 0, "nothing is left of the other"
    for _ in range(16):
        assert not engine.gave_up
        metrics = values(engine.step([with_nan(good)]))
    assert metrics["train/loss_scale"] == 1
    assert "16 optimizer steps in a row" in engine.gave_up
    assert engine.findings


@pytest.mark.parametrize("stage", [1, 3])
def test_the_step_that_doubles_the_scale_has_its_whole_gradient(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(zero, "SCALE_WINDOW", 3)
    engine = scaled(folder, 256.0, stage=stage, lr=1e-12)
    (batch,) = pack(Rollouts(0, folder).groups(2, 3), ranks=1, micro_batch_tokens=4096)
    scales, norms, taken = list[float](), list[float](), list[float]()
    for _ in range(8):
        metrics = values(engine.step([batch]))
        scales.append(metrics["train/loss_scale"])
        norms.append(metrics["grad_norm"])
        state = engine._adam.state.values()  # with beta1 = 0 the first moment is the gradient
        taken.append(sum(float((one["exp_avg"] ** 2).sum()) for one in state) ** 0.5)
    assert scales == [256] * 3 + [512] * 3 + [1024] * 2
    assert norms == pytest.approx([norms[0]] * 8, rel=1e-2)
    assert taken == pytest.approx(norms, rel=1e-2)
