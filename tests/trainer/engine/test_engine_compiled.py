"""Compiled decoder layers train like uncompiled ones, with few graphs, and none after a warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.trainer.engine import test_expert_parallel as experts
from tests.trainer.engine import test_windows as windows
from tests.trainer.engine.batches import write_model
from tests.trainer.engine.scenarios import TIGHT, Scenario, run_all, same_training, training
from tests.trainer.engine.test_expert_parallel import write_family

pytestmark = pytest.mark.e2e

FAMILY = "qwen3_moe"
SCENARIOS: Mapping[int, Mapping[str, Scenario]] = {
    1: {
        "compiled": training(0, tokens=TIGHT, compile=True, agents=True),
        "plain": training(0),
        "prompted": windows.prompted(0, kl_coef=0.1),
        "prompted, compiled": windows.prompted(0, kl_coef=0.1, compile=True),
        FAMILY: experts.training(0),
    },
    2: {
        "stage 2 sequence recomputed offloaded compiled asleep": training(
            2,
            sequence_parallel=2,
            tokens=TIGHT,
            activation_checkpointing=True,
            offload_optimizer=True,
            compile=True,
            sleep=True,
        ),
        f"{FAMILY}, compiled, stage 1": experts.training(1, compile=True),
    },
}


TWO_RANKS = "stage 2 sequence recomputed offloaded compiled asleep"
EXPERTS = f"{FAMILY}, compiled, stage 1"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run every scenario once."""
    folder = tmp_path_factory.mktemp("compiled")
    write_model(folder / "untied")
    write_family(folder / FAMILY, FAMILY)
    return run_all(folder, __name__)


def test_layers_compile_once_for_all_lengths(results: dict[str, Any]) -> None:
    assert 0 < results["compiled"]["graphs"] < 20
    assert 0 < results[TWO_RANKS]["graphs"] < 20
    assert results["plain"]["graphs"] == 0


@pytest.mark.parametrize(
    ("name", "plain", "atol", "rel"),
    [
        ("compiled", "plain", 1e-5, 1e-4),
        (TWO_RANKS, "plain", 1e-5, 1e-4),
        (EXPERTS, FAMILY, 1e-5, 1e-4),
        ("prompted, compiled", "prompted", 3e-6, 1e-5),
    ],
)
def test_compiled_layers_learn_the_same(
    results: dict[str, Any], name: str, plain: str, atol: float, rel: float
) -> None:
    same_training(results[name], results[plain], atol=atol, rel=rel)
