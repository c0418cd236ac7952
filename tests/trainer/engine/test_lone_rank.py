"""One rank: float16 loss scales, bucket sizes, mixed weight dtypes, and out-of-memory steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.engine.batches import write_model
from tests.trainer.engine.lone_scenarios import (
    AT_THE_END,
    BUCKETS,
    DOUBLED,
    RESULTS,
    SMALL,
    WINDOW,
    run,
)
from tests.trainer.engine.scenarios import run_all

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("lone")
    write_model(folder)
    run_all(run, [1], folder)
    return torch.load(folder / RESULTS, weights_only=True)


@pytest.mark.parametrize("name", AT_THE_END)
def test_run_gives_up_at_the_smallest_scale(results: dict[str, Any], name: str) -> None:
    values_ = results[f"end {name}"]
    assert [step["train/loss_scale"] for step in values_["first"]] == [4096, 2048, 2048]
    skipped = [step["train/skipped_steps"] for step in values_["first"]]
    assert skipped == [0, 1, 0]
    assert len(values_["later"]) == 16 and values_["later"][-1]["train/loss_scale"] == 1
    assert "16 optimizer steps" in values_["gave up"]
    assert values_["findings"]


@pytest.mark.parametrize("stage", DOUBLED)
def test_doubled_scale_does_not_halve_the_gradient(results: dict[str, Any], stage: int) -> None:
    steps = results[f"doubled {stage}"]
    scales = [256] * WINDOW + [512] * WINDOW + [1024] * 2
    assert [step["scale"] for step in steps] == scales
    norms = [step["norm"] for step in steps]
    assert norms == pytest.approx([norms[0]] * 8, rel=1e-2)
    assert [step["taken"] for step in steps] == pytest.approx(norms, rel=1e-2)


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_may_be_smaller_than_a_tensor(results: dict[str, Any], name: str) -> None:
    (whole, most), (small, less) = results[f"bucket {name}"]
    assert 0 < most <= 2 * sum(tensor.numel() for tensor in whole.values())
    assert max(tensor.numel() for tensor in whole.values()) > SMALL
    assert 0 < less <= 2 * SMALL
    assert small.keys() == whole.keys()
    assert all(torch.equal(small[name], tensor) for name, tensor in whole.items())
