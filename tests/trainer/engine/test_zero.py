"""Process groups, learning rates, the loss scale, and library versions, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from keel.trainer.engine.deepspeed_internals import (
    loss_scale,
    set_loss_scale,
)

pytestmark = pytest.mark.e2e  # loads DeepSpeed


def test_loss_scale_is_restored_with_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(scaler: Any) -> Any:
        return SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)  # it logs an overflow
    saved, fresh = (DynamicLossScaler(2.0**16, 100, 1.0, 1, False) for _ in range(2))
    for overflows in (False, True, False):
        saved.update_scale(overflows)
    state = loss_scale(engine(saved))
    assert state["cur_scale"] == 2.0**15 and state["cur_iter"] == 3
    set_loss_scale(engine(fresh), state)
    for _ in range(100):  # doubles within this window
        saved.update_scale(False)
        fresh.update_scale(False)
        assert vars(fresh) == vars(saved)
    assert fresh.loss_scale == 2.0**16
    static = LossScaler(scale=1.0)
    for unscaled in (engine(static), SimpleNamespace(optimizer=SimpleNamespace())):
        assert loss_scale(unscaled) == {}
        set_loss_scale(unscaled, {"cur_scale": 7.0})
    assert static.loss_scale == 1.0
