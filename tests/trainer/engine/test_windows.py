"""Split trajectories, shared prompts and conversations train as in one large micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.rl.metrics import values
from tests.trainer.engine import lesson_scenarios
from tests.trainer.engine.batches import write_dense, write_model, write_sparse
from tests.trainer.engine.scenarios import results_of, run_all, same
from tests.trainer.engine.window_scenarios import SCENARIOS, run_window_rank

pytestmark = pytest.mark.e2e
WHOLE = ("whole", "whole, updates", "whole, reference", "whole, dense")
PROMPTED = "whole, prompted"
OTHERS = [name for size in SCENARIOS.values() for name in size if name not in (*WHOLE, PROMPTED)]
SHARED = [name for name in OTHERS if name.startswith("prompted")]
SPLIT = [name for name in OTHERS if name not in SHARED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("windows")
    write_model(folder / "untied")
    write_dense(folder / "dense")
    write_sparse(folder / "sparse")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Run every scenario once."""
    run_all(run_window_rank, SCENARIOS, folder)
    return results_of(folder, SCENARIOS)


@pytest.mark.parametrize("name", OTHERS)
def test_micro_batches_and_ranks_do_not_matter(results: dict[str, Any], name: str) -> None:
    first = name.split(",")[0]
    plain = results["whole" if first == "whole" else f"whole, {first}"]
    # Adam divides by the root of a tiny moment: rounding, which differs by machine, grows there.
    same(results[name]["after"], plain["after"], atol=1e-5)
    for expected, actual in zip(plain["metrics"], results[name]["metrics"], strict=True):
        values_, reference = values(actual), values(expected)
        if name in SHARED:
            packed = values_.pop("train/tokens")
            assert packed + values_.pop("train/shared_tokens", 0) == reference.pop("train/tokens")
            for of_tokens in ("routing/overlap", "routing/fallback_fraction"):
                assert values_.pop(of_tokens) == pytest.approx(reference.pop(of_tokens), abs=0.1)
        assert values_ == pytest.approx(reference, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", [PROMPTED, *SHARED])
def test_prompts_are_shared_as_configured(results: dict[str, Any], name: str) -> None:
    """Step 1 has one group, which may be split over two ranks."""
    shared = results[name]["shared"]
    assert [shared[0], shared[2]] == [[name in SHARED]] * 2
    tokens = [
        [values(metrics)["train/tokens"] for metrics in results[one]["metrics"]]
        for one in (name, PROMPTED)
    ]
    share = [local / all_ for local, all_ in zip(*tokens, strict=True)]
    assert max(share[0], share[2]) < 0.75 or name == PROMPTED, share


@pytest.mark.parametrize("name", SPLIT)
def test_all_ranks_score_equally_often(results: dict[str, Any], name: str) -> None:
    """Otherwise collectives of ZeRO-3 or experts would hang."""
    for passes in results[name]["scored"]:
        assert all(counts == passes[0] for counts in passes)
    assert all(min(counts) > 0 for counts in results[name]["split"])


LESSONS = [
    name
    for size in lesson_scenarios.SCENARIOS.values()
    for name in size
    if name not in ("lessons", "warm-up")
]


@pytest.mark.parametrize("name", LESSONS)
def test_conversations_train_alike_on_any_layout(results: dict[str, Any], name: str) -> None:
    plain = results["warm-up" if name.startswith("warm-up") else "lessons"]
    # Adam divides by the root of a tiny moment: rounding, which differs by machine, grows there.
    same(results[name]["after"], plain["after"], atol=1e-5)
    for expected, actual in zip(plain["heldout"], results[name]["heldout"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-4)
    for expected, actual in zip(plain["metrics"], results[name]["metrics"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_sft_matches_transformers(folder: Path, results: dict[str, Any]) -> None:
    """transformers' loss on each context, and PyTorch's AdamW."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (slow to load)

    from keel.model.load import checkpoint_tensors  # noqa: PLC0415  (slow to load)

    model = AutoModelForCausalLM.from_pretrained(folder / "untied", dtype=torch.float32)

    def loss(seed: int) -> Tensor:
        total, count = torch.zeros(()), 0
        for lesson in lesson_scenarios.lessons(seed):
            for segment in lesson.segments:
                ids = torch.from_numpy(segment.token_ids_T).long()[None]
                labels = ids.where(torch.from_numpy(segment.trainable_T), -100)
                output = int(segment.trainable_T.sum())
                total = total + model(input_ids=ids, labels=labels).loss * output
                count += output
        return total / count

    weights = [one for one in model.parameters() if one.ndim >= 2]
    others = [one for one in model.parameters() if one.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": weights}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-2,
        weight_decay=0.1,
    )
    engine_result = results["lessons"]
    with torch.no_grad():
        assert engine_result["heldout"][0]["nll"] == pytest.approx(
            float(loss(lesson_scenarios.HELDOUT)), rel=1e-5
        )
    for step, metrics in enumerate(engine_result["metrics"]):
        theirs = loss(step)
        assert metrics["loss"] == pytest.approx(float(theirs.detach()), rel=1e-5)
        assert metrics["nll"] == pytest.approx(metrics["loss"], rel=1e-5)
        theirs.backward()
        adam.step()
        adam.zero_grad()
    same(engine_result["after"], dict(checkpoint_tensors(model)), atol=1e-5)
    with torch.no_grad():
        assert engine_result["heldout"][1]["nll"] == pytest.approx(
            float(loss(lesson_scenarios.HELDOUT)), rel=1e-5
        )
