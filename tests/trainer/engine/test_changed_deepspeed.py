"""A DeepSpeed in which something that the trainer leans on has changed: it is noticed before the
first step, said, and done without, with the same result."""

from __future__ import annotations

from typing import Any

import pytest

from keel.rl.metrics import values
from tests.trainer.engine.batches import write_model
from tests.trainer.engine.changed_deepspeed import CHANGES, run_changes
from tests.trainer.engine.scenarios import results_of, run_all, same

pytestmark = pytest.mark.e2e
SAID = {
    "1 another name": "BF16_Optimizer has no _update_hp_grad",
    "1 another parameter": "BF16_Optimizer._update_hp_grad has other parameters",
    "1 another way": "BF16_Optimizer adds gradients up by other ways than _update_hp_grad",
    "1 another meaning": "BF16_Optimizer._update_hp_grad does something else",
    "1 another attribute": "BF16_Optimizer has no autoep_folding_tp_group",
    "1 asleep, another name": "SummingOptimizer has no fp32_groups_gradients_flat",
    "3 asleep, another name": "DeepSpeedZeroOptimizer_Stage3 has no ipg_buckets",
}
LOST = {
    "asleep": "Nothing of the trainer's is offloaded between its steps",
    "1": "It adds gradients up itself, which takes longer",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deepspeed")
    write_model(folder / "untied")
    run_all(run_changes, [1], folder)
    return results_of(folder, [1])


def test_with_the_deepspeed_that_is_known_nothing_is_lost(results: dict[str, Any]) -> None:
    for name in ("1 as it is", "3 as it is"):
        assert results[name]["notes"] == []
    assert results["1 as it is"]["optimizer"] == "SummingOptimizer"


def test_state_in_another_place_is_refused_at_the_start(results: dict[str, Any]) -> None:
    assert "has no attribute 'grad_position'" in results["place"]["error"]
    assert "install deepspeed==0.19.8" in results["place"]["error"]


@pytest.mark.parametrize("name", [name for name, (_, change) in CHANGES.items() if change])
def test_a_change_is_said_and_the_result_is_the_same(results: dict[str, Any], name: str) -> None:
    found, plain = results[name], results[f"{name[0]} as it is"]
    (note,) = found["notes"]
    assert note.startswith("DeepSpeed 0.") and "is not as 0.19.8 was: " in note
    what, _, lost = note.partition(" was: ")[2].partition(". ")
    assert what == SAID[name]
    assert lost == next(text for part, text in LOST.items() if part in name)
    same(found["resumed"], found["moved"], atol=0)
    if "asleep" in name:
        assert not found["offloads"]
    elif name[0] == "1":
        assert found["optimizer"] == "BF16_Optimizer"
    same(found["after"], plain["after"], atol=0)
    for changed, usual in zip(found["metrics"], plain["metrics"], strict=True):
        assert values(changed) == pytest.approx(values(usual), rel=0, abs=0, nan_ok=True)
