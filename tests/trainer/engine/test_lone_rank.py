"""One rank: the end of a run in float16 is Keel's to say, no gradient is halved, DeepSpeed's
buckets are small, weights of a second precision are no trouble, and a step in which memory ran out
leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.engine.batches import write_model, write_sparse
from tests.trainer.engine.lone_scenarios import (
    AT_THE_END,
    BUCKETS,
    DOUBLED,
    RESULTS,
    SMALL,
    SPARSE,
    WINDOW,
    run,
)
from tests.trainer.engine.scenarios import run_all

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("lone")
    write_model(folder)
    write_sparse(folder / SPARSE)
    run_all(run, [1], folder)
    return torch.load(folder / RESULTS, weights_only=True)


@pytest.mark.parametrize("name", AT_THE_END)
def test_a_run_gives_up_and_names_the_token_at_the_least_scale_too(
    results: dict[str, Any], name: str
) -> None:
    found = results[f"end {name}"]
    assert [step["train/loss_scale"] for step in found["first"]] == [4096, 2048, 2048]
    skipped = [step["train/skipped_steps"] for step in found["first"]]
    assert skipped == [0, 1, 0], "nothing is left of the one that was skipped"
    assert len(found["later"]) == 16 and found["later"][-1]["train/loss_scale"] == 1
    assert "16 optimizer steps in a row" in found["gave up"]
    assert found["findings"]


def test_weights_in_float32_beside_float16_train_at_every_stage_alike(
    results: dict[str, Any],
) -> None:
    """Of DeepSeek-V3.2's indexers. DeepSpeed rounds them, but not under ZeRO 3."""
    first, third = (results[f"half {stage}"] for stage in (1, 3))
    assert first.pop("kinds") == third.pop("kinds") == {torch.float16}
    assert third == pytest.approx(first, rel=1e-3, abs=1e-6)
    assert first["grad_norm"] > 0 and first["kl/ref"] > 0


@pytest.mark.parametrize("stage", DOUBLED)
def test_the_step_that_doubles_the_scale_has_its_whole_gradient(
    results: dict[str, Any], stage: int
) -> None:
    steps = results[f"doubled {stage}"]
    scales = [256] * WINDOW + [512] * WINDOW + [1024] * 2
    assert [step["scale"] for step in steps] == scales
    norms = [step["norm"] for step in steps]
    assert norms == pytest.approx([norms[0]] * 8, rel=1e-2)
    assert [step["taken"] for step in steps] == pytest.approx(norms, rel=1e-2)


@pytest.mark.parametrize("name", BUCKETS)
def test_a_bucket_is_as_small_as_the_model_and_may_be_smaller_than_a_tensor(
    results: dict[str, Any], name: str
) -> None:
    (whole, most), (small, less) = results[f"bucket {name}"]
    assert 0 < most <= 2 * sum(tensor.numel() for tensor in whole.values())
    assert max(tensor.numel() for tensor in whole.values()) > SMALL
    assert 0 < less <= 2 * SMALL
    assert small.keys() == whole.keys()
    assert all(torch.equal(small[name], tensor) for name, tensor in whole.items())


def test_memory_that_runs_out_in_a_backward_pass_leaves_nothing_behind(
    results: dict[str, Any],
) -> None:
    clean, again = results["memory"]
    assert clean.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in clean.items())
