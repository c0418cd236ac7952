"""A checkpoint can be resumed on other ranks, ZeRO stages and parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.rl.metrics import values
from tests.trainer.engine.expert_scenarios import write_family
from tests.trainer.engine.reshard_scenarios import (
    LOADS,
    MODEL,
    MOVES,
    SAVED_AFTER,
    SAVES,
    Layout,
    folder_of,
    run_loads,
    run_saves,
    whole_state,
)
from tests.trainer.engine.scenarios import results_of, run_all, same

pytestmark = pytest.mark.e2e
PAIRS = [(layout, other) for layout, others in MOVES.items() for other in others]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resharding")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Run all saving scenarios, then all loading ones."""
    write_family(folder / MODEL, MODEL)
    run_all(run_saves, SAVES, folder)
    values_ = results_of(folder, SAVES)
    run_all(run_loads, LOADS, folder)
    return values_ | results_of(folder, LOADS)


@pytest.mark.parametrize(("layout", "other"), PAIRS, ids=lambda pair: str(pair))
def test_another_layout_resumes(
    folder: Path, results: dict[str, Any], layout: Layout, other: Layout
) -> None:
    before, after = results[str(layout)], results[f"{layout} → {other}"]
    assert after["numbers"] == (SAVED_AFTER, SAVED_AFTER) and after["notes"] == []
    same(after["weights"], before["weights"], atol=0)
    state, steps = whole_state(folder_of(folder, layout))
    moved, moved_steps = whole_state(folder_of(folder, layout, other))
    assert moved_steps == steps
    same(moved, state, atol=0)
    (unmoved,), (resumed,) = before["metrics"], after["metrics"]
    if layout.dtype == "float32":
        # Sums over ranks and micro-batches are rounded in another order.
        limits = {"rel": 1e-4, "abs": 1e-6}
    else:
        # Activations have 8 bits, and differences of log-probabilities fewer.
        limits = {"rel": 0.2, "abs": 2e-3}
    assert values(resumed) == pytest.approx(values(unmoved), **limits, nan_ok=True)
