"""The trainer gives the same result on one and two ranks, under every ZeRO stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.rl.metrics import values
from tests.trainer.engine.batches import write_model
from tests.trainer.engine.ranks import SAVED_AFTER, STEPS
from tests.trainer.engine.scenarios import SCENARIOS, run_all, same, same_training

pytestmark = pytest.mark.e2e
TWO_RANKS = [name for name in SCENARIOS[2] if name.startswith("stage")]
APART = [name for name in SCENARIOS[2] if name.startswith("apart")]
SKIPPING = [name.removeprefix("skipping ") for name in SCENARIOS[2] if "skipping" in name]
RECOMPUTED = ["recomputed", "recomputed but attention", "recomputed sparse"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    write_model(folder / "untied")
    write_model(folder / "tied", tie_word_embeddings=True)
    write_model(folder / "dense", "dense")
    write_model(folder / "sparse", "sparse")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return run_all(folder, "tests.trainer.engine.scenarios")


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_reads_the_model_for_all(results: dict[str, Any], stage: int) -> None:
    result = results[f"read once {stage}"]
    assert result["times"] == [1, 0] and result["same"] == [(True, True)] * 2


def test_read_failure_is_raised_on_all_ranks(results: dict[str, Any]) -> None:
    assert results["read once 0"]["refused"] == ["ConfigError('there is nothing')"] * 2
    first, second = results["read once 3"]["refused"]
    assert first == "OSError('stale file handle')"
    assert second == "RuntimeError('rank 0 read no model: stale file handle')"


def model_of(name: str) -> str:
    return next((model for model in ("tied", "dense", "sparse") if model in name), "untied")


@pytest.mark.parametrize("name", [*TWO_RANKS, "accumulated", *RECOMPUTED])
def test_layout_does_not_change_the_result(results: dict[str, Any], name: str) -> None:
    plain, other = results[f"plain {model_of(name)}".removesuffix(" untied")], results[name]
    assert plain["version"] == STEPS
    same_training(other, plain)


def test_mass_penalty_is_equal_on_any_layout(results: dict[str, Any]) -> None:
    plain, held = results["plain"], results["masses held"]
    for layout in ("accumulated", "stage 3 sequence"):
        same_training(results[f"masses held, {layout}"], held)
    assert not torch.equal(held["after"]["lm_head.weight"], plain["after"]["lm_head.weight"])
    last = values(held["metrics"][-1])
    assert last["sampling/mass_shortfall"] > 0
    assert last["sampling/kept_mass"] > values(plain["metrics"][-1])["sampling/kept_mass"]
    assert "sampling/mass_shortfall" not in values(plain["metrics"][0])


def test_indexer_warm_up_trains_indexers_only(results: dict[str, Any]) -> None:
    plain = results["indexers alone"]
    for name in ("indexers alone", "indexers alone, recomputed"):
        before, after = results[name]["before"], results[name]["after"]
        moved = {each for each in before if not torch.equal(before[each], after[each])}
        assert moved == {each for each in before if ".indexer." in each}, name
        same(after, plain["after"], atol=1e-5)
    frozen = results["indexers frozen"]
    selected = {
        n for n, tensor in frozen["before"].items() if torch.equal(tensor, frozen["after"][n])
    }
    assert {each for each in plain["before"] if ".indexer." in each} <= selected
    assert len(selected) < len(plain["before"]) / 2
    assert "indexer/kl" not in values(frozen["metrics"][0])


@pytest.mark.parametrize("name", APART)
def test_indexers_are_optimized_apart(results: dict[str, Any], name: str) -> None:
    plain, heavier, slower = (results[name][key] for key in ("plain", "heavier", "slower"))
    first, other = plain["metrics"], heavier["metrics"]
    assert slower["metrics"]["indexer/lr"] == pytest.approx(first["lr"] / 4)
    assert first["grad_norm"] > 0.05 and first["indexer/grad_norm"] > 0.05, "both are clipped"
    assert other["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-6)
    ratio = other["indexer/grad_norm"] / first["indexer/grad_norm"]
    assert ratio == pytest.approx(64, rel=0.01)
    for each, moved in plain["moved"].items():
        if ".indexer." in each:
            quarter = slower["moved"][each].norm() / moved.norm()
            # Vectors are near 1, where bfloat16 is coarse.
            assert moved.ndim == 1 or quarter == pytest.approx(0.25, rel=0.1), each
        else:
            assert torch.equal(heavier["moved"][each], moved), each
            assert torch.equal(slower["moved"][each], moved), each


@pytest.mark.parametrize("name", ["plain", "plain tied", *TWO_RANKS])
def test_published_weights_equal_the_checkpoint(
    folder: Path, results: dict[str, Any], name: str
) -> None:
    same(results[name]["before"], load_file(folder / model_of(name) / "model.safetensors"), atol=0)
    exported = results[name]["exported"]
    same(results[name]["after"], load_file(exported / "model.safetensors"), atol=0)
    modes = [(exported / one).stat().st_mode for one in ("model.safetensors", "config.json")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("name", ["1", "3 asleep"])
def test_resume_is_exact(results: dict[str, Any], name: str) -> None:
    result = results[f"resumed {name}"]
    assert result["loaded"] == (SAVED_AFTER, SAVED_AFTER)
    same(result["resumed"], result["straight"], atol=0)
    same(result["repeated"], result["straight"], atol=0)
    assert "lm_head.weight" in result["refused"]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["offloaded", "stays"])
def test_offloading_changes_nothing(results: dict[str, Any], stage: int, how: str) -> None:
    awake, offloaded = (results[f"bfloat16 {stage}"][key] for key in ("awake", how))
    same_training(offloaded, awake, atol=0, rel=0, abs=0)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("how", ["partly", "lacking", "crowded"])
def test_crowded_gpu_learns_the_same(results: dict[str, Any], stage: int, how: str) -> None:
    awake, found = (results[f"crowded {stage}"][key] for key in ("awake", how))
    same_training(found, awake, atol=0, rel=0, abs=0)
    gradients, update, sampling = (found[key] for key in ("gradients", "update", "sampling"))
    whole = results[f"crowded {stage}"]["crowded"]
    state = max(away["state"] for away in whole["gradients"])
    assert not any(away["state"] or away["weights"] for away in update)
    assert not any(away["weights"] or away["reference"] for away in gradients)
    assert not any(away.pop("rest") for away in sampling), "nothing outside the plan"
    if how == "partly":  # loaded again for the first update of a batch
        assert [away["state"] > 0 for away in gradients[2:]] == [True, False]
        assert 0 < sampling[-1]["state"] < state
        assert all(away["reference"] and not away["weights"] for away in sampling)
    elif how == "lacking":  # offloads the minimum, and the reference does not fit
        assert all(0 < away["state"] < state for away in gradients)
        assert all(away["reference"] for away in update)
        assert not any(away["state"] or away["weights"] for away in sampling)
    else:
        assert all(away["state"] == state > 0 for away in gradients[1:])
        assert all(away["reference"] for away in update)
        assert all(all(away.values()) for away in sampling)


def test_gradient_sums_equal_those_of_deepspeed(results: dict[str, Any]) -> None:
    engine_result, reference = (results["bfloat16 1"][key] for key in ("awake", "theirs"))
    names = [result["optimizer"] for result in (engine_result, reference)]
    assert names == ["SummingOptimizer", "BF16_Optimizer"]
    assert not engine_result["notes"]
    same(engine_result["after"], reference["after"], atol=0)


@pytest.mark.parametrize("name", ["0", "3 asleep"])
def test_reference_starts_at_the_policy(results: dict[str, Any], name: str) -> None:
    first, *_, last = (values(metrics) for metrics in results[f"reference {name}"]["metrics"])
    assert first["routing/overlap"] == 1
    assert first["kl/ref"] == pytest.approx(0, abs=1e-9)
    assert last["kl/ref"] > 1e-6


@pytest.mark.parametrize("how", SKIPPING)
def test_non_finite_steps_leave_no_trace(results: dict[str, Any], how: str) -> None:
    result = results[f"skipping {how}"]
    same(result["kept"], result["before"], atol=0)
    assert any((result["after"][name] != old).any() for name, old in result["before"].items())
    same(result["after"], result["straight"], atol=0)
    same(result["end"], result["after"], atol=0)
    skipped = [values(m)["train/skipped_steps"] for m in result["metrics"]]
    assert skipped == [1, 1, 0, 0, 1, 1, 1] and result["version"] == 7
    assert ["grad_norm" in m for m in result["metrics"]] == [not n for n in skipped]
    assert result["gave up"][0] == ""
    assert "run.max_skipped_steps" in result["gave up"][1]


def test_step_without_signal_moves_no_weight(results: dict[str, Any]) -> None:
    result = results["without signal"]
    silent, last = map(values, result["metrics"])
    same(result["after"], result["before"], atol=0)
    assert silent["train/skipped_no_signal"] == 1 and silent["train/skipped_steps"] == 0
    assert last["train/skipped_no_signal"] == 0 and last["grad_norm"] > 0
    for name in ("skipped", "resumed"):
        same(result[name], result["straight"], atol=0)
    assert result["counts"] == (3, 3)
