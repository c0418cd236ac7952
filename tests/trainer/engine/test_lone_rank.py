"""One rank: float16 loss scales, bucket sizes, mixed weight dtypes, and out-of-memory steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch import Tensor

from keel.configs.schema import Config
from keel.rl.metrics import values
from keel.rl.packing import TrainBatch
from keel.trainer.engine.deepspeed_internals import loss_scale, set_loss_scale
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.ranks import TIGHT, make_config
from tests.trainer.engine.scenarios import Ranks, run_all, same
from tests.trainer.engine.skipping import with_nan

pytestmark = pytest.mark.e2e

BUCKETS = ((1, True), (3, False))
"""ZeRO stages, and whether the optimizer is offloaded."""
SMALL = 1000
"""Elements of a bucket that is smaller than a tensor."""
DOUBLED = (1, 3)
WINDOW = 3


@contextmanager
def computing(dtype: torch.dtype) -> Iterator[pytest.MonkeyPatch]:
    """Compute in `dtype`, as on a GPU; DeepSpeed refuses float16 on most CPUs."""
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

    from keel.trainer.engine import engine  # noqa: PLC0415  (loads DeepSpeed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        patch.setattr(engine, "compute_dtype", lambda *_: dtype)
        yield patch


def one_batch(ranks: Ranks, step: int, config: Config) -> TrainBatch:
    return ranks.batch(Rollouts(step).groups(2, 3), config)


def trained(ranks: Ranks, stage: int, *, offload: bool) -> tuple[dict[str, Tensor], int]:
    """Weights after two steps, and the largest number of bucket elements."""
    from keel.trainer.engine.deepspeed_internals import buckets  # noqa: PLC0415  (loads DeepSpeed)

    config = make_config(1, stage, dtype="bfloat16", tokens=TIGHT, offload_optimizer=offload)
    engine, most = ranks.engine(config), 0

    def look(_: Tensor) -> None:
        nonlocal most
        held = buckets(engine._engine.optimizer)
        most = max(most, sum(one.untyped_storage().nbytes() // 4 for one in held))

    for parameter in engine._network.parameters():
        parameter.register_hook(look)
    for step in range(2):
        engine.step([one_batch(ranks, step, config)])
    return ranks.published(engine), most


def scaled(ranks: Ranks, scale: float, *, stage: int, lr: float) -> tuple[Any, TrainBatch]:
    config = make_config(
        1,
        stage,
        dtype="float16",
        warmup_steps=0,
        lr=lr,
        weight_decay=0.0,
        beta1=0.0,  # Adam's first moment is the gradient
        grad_clip=100.0,
        offload_optimizer=stage == 2,
    )
    engine: Any = ranks.engine(replace(config, run=replace(config.run, steps=100)))
    engine._engine.optimizer.loss_scaler.cur_scale = scale
    return engine, one_batch(ranks, 0, config)


def at_the_end(ranks: Ranks) -> dict[str, Any]:
    """A bad step between good ones, then bad ones until the run gives up."""
    engine, good = scaled(ranks, 4096.0, stage=2, lr=1e-2)
    bad = with_nan(good)
    first = [values(engine.step([batch])) for batch in (good, bad, good)]
    later: list[dict[str, float]] = []
    while not engine.gave_up and len(later) < 30:
        later.append(values(engine.step([bad])))
    findings = [str(values_) for values_ in engine.findings]
    return {"first": first, "later": later, "gave up": engine.gave_up, "findings": findings}


def doubled(ranks: Ranks, stage: int) -> list[dict[str, float]]:
    """Scale after each step, the reported norm, and the norm of Adam's gradient."""
    engine, batch = scaled(ranks, 256.0, stage=stage, lr=1e-12)
    values_: list[dict[str, float]] = []
    for _ in range(8):
        metrics = values(engine.step([batch]))
        moments = [state["exp_avg"] for state in engine._adam.state.values()]
        taken = sum(float((one**2).sum()) for one in moments) ** 0.5
        scale, norm = metrics["train/loss_scale"], metrics["grad_norm"]
        values_.append({"scale": scale, "norm": norm, "taken": taken})
    return values_


def alone(ranks: Ranks) -> dict[str, Any]:
    from keel.trainer.engine import zero  # noqa: PLC0415  (loads DeepSpeed)

    results: dict[str, Any] = {}
    with computing(torch.float16) as patch:
        results["end"] = at_the_end(ranks)
        patch.setattr(zero, "SCALE_WINDOW", WINDOW)
        results |= {f"doubled {stage}": doubled(ranks, stage) for stage in DOUBLED}
    with computing(torch.bfloat16) as patch:
        whole = [trained(ranks, stage, offload=offload) for stage, offload in BUCKETS]
        patch.setattr(zero, "bucket_elements", lambda _: SMALL)
        small = [trained(ranks, stage, offload=offload) for stage, offload in BUCKETS]
    return {**results, "buckets": list(zip(whole, small, strict=True))}


SCENARIOS = {1: {"alone": alone}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lone")
    write_model(folder / "untied")
    return run_all(folder, __name__)["alone"]


def test_run_gives_up_at_the_smallest_scale(results: dict[str, Any]) -> None:
    values_ = results["end"]
    assert [step["train/loss_scale"] for step in values_["first"]] == [4096, 2048, 2048]
    assert [step["train/skipped_steps"] for step in values_["first"]] == [0, 1, 0]
    assert len(values_["later"]) == 16 and values_["later"][-1]["train/loss_scale"] == 1
    assert "16 optimizer steps" in values_["gave up"] and values_["findings"]


@pytest.mark.parametrize("stage", DOUBLED)
def test_doubled_scale_does_not_halve_the_gradient(results: dict[str, Any], stage: int) -> None:
    steps = results[f"doubled {stage}"]
    scales = [256] * WINDOW + [512] * WINDOW + [1024] * 2
    assert [step["scale"] for step in steps] == scales
    norms = [step["norm"] for step in steps]
    assert norms == pytest.approx([norms[0]] * 8, rel=1e-2)
    assert [step["taken"] for step in steps] == pytest.approx(norms, rel=1e-2)


@pytest.mark.parametrize("index", range(len(BUCKETS)))
def test_buckets_may_be_smaller_than_a_tensor(results: dict[str, Any], index: int) -> None:
    (whole, most), (small, less) = results["buckets"][index]
    assert 0 < most <= 2 * sum(tensor.numel() for tensor in whole.values())
    assert max(tensor.numel() for tensor in whole.values()) > SMALL
    assert 0 < less <= 2 * SMALL
    same(small, whole, atol=0)


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
