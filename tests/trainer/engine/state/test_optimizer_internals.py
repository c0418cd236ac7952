"""What needs no engine; the rest is in `tests/trainer/engine/test_resharding.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch import nn

from keel.trainer.engine.state.optimizer_internals import (
    Held,
    Part,
    flaw,
    forget_sums,
    loss_scale,
    set_loss_scale,
    sums_missed,
)


def engine(scaler: Any) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))


@pytest.mark.parametrize(
    ("stage", "offloads", "sums", "missed"),
    [
        (1, True, {0: [1.0], 1: None}, False),
        (2, True, "elsewhere", True),
        (3, True, {0: [1.0]}, False),
        (1, False, None, False),
    ],
)
def test_what_a_skipped_step_leaves_is_forgotten_or_a_line_says_that_it_is_not(
    stage: int, offloads: bool, sums: Any, missed: bool
) -> None:
    of: Any = SimpleNamespace(
        optimizer=SimpleNamespace(averaged_gradients=sums),
        zero_cpu_offload=lambda: offloads,
        zero_optimization_stage=lambda: stage,
    )
    said = sums_missed(of)
    assert ("keeps its sums of gradients elsewhere" in said) == bool(said) == missed
    forget_sums(of)
    assert sums == ({0: None, 1: None} if (stage, offloads) == (1, True) else sums)
    if stage == 3:
        assert sums == {0: [1.0]}, "DeepSpeed's own business"


def dynamic() -> Any:
    return DynamicLossScaler(2.0**16, 100, 1.0, 1, False)


def test_the_scale_of_float16s_loss_is_kept_with_what_led_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)  # it logs an overflow once
    saved, fresh = dynamic(), dynamic()
    for overflows in (False, True, False):
        saved.update_scale(overflows)
    seen = loss_scale(engine(saved))
    assert seen["cur_scale"] == 2.0**15 and seen["cur_iter"] == 3
    set_loss_scale(engine(fresh), seen)
    for _ in range(100):  # a window: the scale is doubled in it
        saved.update_scale(False)
        fresh.update_scale(False)
        assert vars(fresh) == vars(saved)
    assert fresh.loss_scale == 2.0**16


def test_a_static_scale_is_nobodys_business() -> None:
    static = LossScaler(scale=1.0)
    for optimizer in (engine(static), SimpleNamespace(optimizer=SimpleNamespace())):
        assert loss_scale(optimizer) == {}
        set_loss_scale(optimizer, {"cur_scale": 7.0})
    set_loss_scale(engine(fresh := dynamic()), {})
    assert fresh.loss_scale == 2.0**16 and static.loss_scale == 1.0


def test_master_weights_that_are_elsewhere_are_noticed() -> None:
    master = torch.randn(100)
    weights = master[10:60].bfloat16()
    assert flaw([Held(master, [Part("w", 0, 50, 10, weights)])]) == ""
    for part in (Part("w", 0, 50, 11, weights), Part("w", 0, 50, 60, weights)):
        assert flaw([Held(master, [part])]) == "w is not where its master weights are"
    assert "not where" in flaw([Held(master, [Part("w", 0, 49, 10, weights)])])
    assert "bfloat16" in flaw([Held(nn.Parameter(master.bfloat16()), [])])
