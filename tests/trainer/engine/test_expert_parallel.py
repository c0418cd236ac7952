"""Expert parallelism gives the weights, gradients, metrics and checkpoints of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.rl.metrics import values
from tests.trainer.engine.expert_scenarios import (
    FAMILIES,
    SAVED_AFTER,
    SCENARIOS,
    STAGES,
    run_expert_rank,
    write_family,
)
from tests.trainer.engine.scenarios import results_of, run_all, same

pytestmark = pytest.mark.e2e
SPREAD = {**SCENARIOS[2], **SCENARIOS[4]}
TRAINED = [name for name in SPREAD if name.split(",")[0] in FAMILIES]
RESUMED = [
    *(f"qwen3_moe, stage {stage}" for stage in STAGES),
    "qwen3_moe, offloaded, stage 2",
    "qwen3_moe, 4 ranks, stage 2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every scenario once."""
    folder = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        write_family(folder / family, family)
    run_all(run_expert_rank, SCENARIOS, folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return results_of(folder, SCENARIOS)


def same_metrics(actual: list[Any], expected: list[Any]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert values(one) == pytest.approx(values(other), rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_one_process(results: dict[str, Any], name: str) -> None:
    """After clipped steps, so the global gradient norm counts, too."""
    plain = results[name.split(",")[0]]
    same(results[name]["after"], plain["after"], atol=1e-5)
    same_metrics(results[name]["metrics"], plain["metrics"])
    assert values(plain["metrics"][0])["grad_norm"] > 0.05
    assert 0 < values(plain["metrics"][-1])["routing/overlap"] < 1
    moved = [not torch.equal(plain["after"][n], old) for n, old in plain["before"].items()]
    assert sum(moved) >= len(moved) - 2, "all but correction biases, which have no gradient"


@pytest.mark.parametrize("name", [name for name in SPREAD if "reference" in name])
def test_gradients_equal_one_process(results: dict[str, Any], name: str) -> None:
    plain = results[name.split(",")[0]]
    same(results[name]["gradients"], plain["gradients"], atol=1e-5)
    large = [gradient.abs().max() > 1e-3 for gradient in plain["gradients"].values()]
    assert sum(large) > 0.8 * len(large)
    same_metrics(results[name]["metrics"], plain["metrics"])


@pytest.mark.parametrize("name", ["replayed reference", "replayed reference, stage 3"])
def test_reference_with_replayed_routes_starts_at_policy(
    results: dict[str, Any], name: str
) -> None:
    """Recorded routes are random, so live routing would start elsewhere."""
    first, last = (values(metrics) for metrics in results[name]["metrics"])
    assert first["kl/ref"] == pytest.approx(0, abs=1e-9)
    assert last["kl/ref"] > 1e-3
    assert values(results["live reference"]["metrics"][0])["kl/ref"] > 1e-3


@pytest.mark.parametrize("name", [*TRAINED, *(n for n in SPREAD if n.startswith("weights"))])
def test_published_weights_equal_the_checkpoint(
    folder: Path, results: dict[str, Any], name: str
) -> None:
    family = name.removeprefix("weights of ").split(",")[0]
    same(results[name]["before"], load_file(folder / family / "model.safetensors"), atol=0)
    if name in TRAINED:
        exported = results[name]["exported"]
        same(results[name]["after"], load_file(exported / "model.safetensors"), atol=0)
        assert json.loads((exported / "config.json").read_text())["model_type"] == family.split()[0]


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_exact(results: dict[str, Any], name: str) -> None:
    assert results[name]["loaded"] == (SAVED_AFTER, SAVED_AFTER)
    same(results[name]["resumed"], results[name]["after"], atol=0)


@pytest.mark.parametrize(("stage", "times"), [(1, [1, 1]), (3, [1, 0])])
def test_only_ranks_with_distinct_experts_read(
    results: dict[str, Any], stage: int, times: list[int]
) -> None:
    values_ = results[f"read, stage {stage}"]
    assert values_["times"] == times
    assert values_["same"] == [(True, True)] * 2
    if stage == 1:  # the second cannot
        assert values_["refused"][0] == "RuntimeError('rank 1 read no model: stale file handle')"
        assert values_["refused"][1] == "OSError('stale file handle')"


@pytest.mark.parametrize("name", [name for name in SPREAD if "skipping" in name])
def test_all_ranks_skip_a_bad_step(results: dict[str, Any], name: str) -> None:
    (metrics,) = results[name]["metrics"]
    assert values(metrics)["train/skipped_steps"] == 1
    before = results["qwen3_moe"]["before"]
    finite = {n: t for n, t in results[name]["after"].items() if t.isfinite().all()}
    assert len(finite) == len(before) - 1
    same(finite, {n: before[n] for n in finite}, atol=0)
