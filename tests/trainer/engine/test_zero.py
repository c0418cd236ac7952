"""Process groups, learning rates, the loss scale, and library versions, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch.distributed import distributed_c10d

from keel.model.torch_internals import limit_all_groups
from keel.trainer.engine.deepspeed_internals import (
    forget_sums,
    loss_scale,
    set_loss_scale,
)
from keel.trainer.engine.zero import join_ranks

pytestmark = pytest.mark.e2e  # loads DeepSpeed


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    join_ranks(0, 1, None, timeout_s=77)
    yield
    dist.destroy_process_group()


def test_later_groups_have_the_same_timeout(joined: None) -> None:
    def timeouts() -> list[timedelta]:
        backends = [
            group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map
        ]
        return [backend.options._timeout for backend in backends]

    dist.new_group([0])  # as DeepSpeed makes them
    assert timeouts() == [timedelta(seconds=77), timedelta(minutes=30)]
    limit_all_groups(77)
    assert timeouts() == [timedelta(seconds=77)] * 2


@pytest.mark.parametrize(
    ("stage", "offloads", "forgets"), [(1, True, True), (3, True, False), (1, False, False)]
)
def test_skipped_step_drops_offloaded_sums(stage: int, offloads: bool, forgets: bool) -> None:
    sums: dict[int, Any] = {0: [1.0], 1: None}
    engine: Any = SimpleNamespace(
        optimizer=SimpleNamespace(averaged_gradients=sums),
        zero_cpu_offload=lambda: offloads,
        zero_optimization_stage=lambda: stage,
    )
    forget_sums(engine)
    assert sums == ({0: None, 1: None} if forgets else {0: [1.0], 1: None})


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
