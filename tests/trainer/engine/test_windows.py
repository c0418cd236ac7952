"""Trajectories of more windows than a micro-batch holds, on the real engine: under every ZeRO
stage, over ranks and slices, the weights and metrics of one rank with one large micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.rl.metrics import values
from tests.trainer.engine.batches import write_dense, write_model
from tests.trainer.engine.scenarios import results_of, run_all, same
from tests.trainer.engine.window_scenarios import SCENARIOS, STEPS, run_window_rank

pytestmark = pytest.mark.e2e
WHOLE = ("whole", "whole, updates", "whole, reference", "whole, dense")
SPLIT = [name for size in SCENARIOS.values() for name in size if name not in WHOLE]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of every scenario: one, two and four processes at once."""
    folder: Path = tmp_path_factory.mktemp("windows")
    write_model(folder / "untied")
    write_dense(folder / "dense")
    run_all(run_window_rank, SCENARIOS, folder)
    return results_of(folder, SCENARIOS)


@pytest.mark.parametrize("name", SPLIT)
def test_micro_batches_and_ranks_make_no_difference(results: dict[str, Any], name: str) -> None:
    first = name.split(",")[0]
    plain = results["whole" if first == "whole" else f"whole, {first}"]
    same(results[name]["after"], plain["after"], atol=1e-6)
    for expected, actual in zip(plain["metrics"], results[name]["metrics"], strict=True):
        assert values(actual) == pytest.approx(values(expected), rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", SPLIT)
def test_all_ranks_score_equally_often(results: dict[str, Any], name: str) -> None:
    """A rank that did not would keep the others waiting in a collective of ZeRO-3 or of experts."""
    for passes in results[name]["scored"]:
        assert all(counts == passes[0] for counts in passes)
    assert all(min(counts) > 0 for counts in results[name]["split"]), "it must have had to"


@pytest.mark.parametrize("name", WHOLE)
def test_some_are_masked_and_others_not(results: dict[str, Any], name: str) -> None:
    assert [set(counts) for counts in results[name]["split"]] == [{0}] * STEPS
    fractions = [values(metrics)["mask/sequence_fraction"] for metrics in results[name]["metrics"]]
    assert max(fractions) > 0.1 and max(fractions) < 0.9
    assert all(values(metrics)["mask/logp_gap_max"] > 0 for metrics in results[name]["metrics"])
