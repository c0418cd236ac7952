"""A checkpoint can be resumed on other ranks, ZeRO stages and parallelism."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from keel.rl.metrics import values
from tests.trainer.engine.scenarios import Ranks, Result, Scenario, run_all, same
from tests.trainer.engine.test_expert_parallel import configure, train, write_family

pytestmark = pytest.mark.e2e

SAVED_AFTER = 1
MODEL = "qwen3_moe"


class Layout(NamedTuple):
    ranks: int
    stage: int
    dtype: str = "float32"
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        more = [f"{name} {value}" for name, value in self.changes]
        return ", ".join([f"{self.ranks} ranks", f"stage {self.stage}", self.dtype, *more])


def spread(ranks: int, stage: int, dtype: str = "float32", **changes: Any) -> Layout:
    return Layout(ranks, stage, dtype, tuple({"expert_parallel": 1, **changes}.items()))


EXPERTS = {"expert_parallel": 2}
BF16 = "bfloat16"
MOVES: Mapping[Layout, tuple[Layout, ...]] = {
    spread(1, 0): (
        spread(2, 2, sequence_parallel=2, **EXPERTS),
        spread(2, 3, offload_optimizer=True),
    ),
    spread(2, 0, **EXPERTS): (spread(2, 2),),
    spread(2, 2, sequence_parallel=2): (spread(1, 0), spread(2, 3, **EXPERTS)),
    spread(2, 3): (spread(2, 1, offload_optimizer=True),),
    spread(2, 3, **EXPERTS): (spread(1, 2), spread(2, 0)),
    spread(2, 1, BF16): (spread(1, 3, BF16), spread(2, 3, BF16, **EXPERTS)),
    spread(2, 3, BF16, sleep=True): (spread(1, 1, BF16), spread(2, 1, BF16, **EXPERTS)),
}
"""Layouts that resume from the checkpoint of each layout."""


def folder_of(root: Path, *layouts: Layout) -> Path:
    return root / " → ".join(map(str, layouts))


def started(ranks: Ranks, layout: Layout) -> tuple[Any, Any]:
    from keel.trainer.engine import engine as module  # noqa: PLC0415  (loads DeepSpeed)

    on_cpu, module.compute_dtype = module.compute_dtype, lambda *_: getattr(torch, layout.dtype)
    try:
        config = configure(ranks, layout.stage, dtype=layout.dtype, **dict(layout.changes))
        return ranks.engine(config, MODEL), config
    finally:
        module.compute_dtype = on_cpu


def saved(ranks: Ranks, engine: Any, folder: Path) -> None:
    if ranks.rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    engine.save(folder)


def saving(layout: Layout) -> Scenario:
    """Train, save, and take another step."""

    def run(ranks: Ranks) -> Result:
        engine, config = started(ranks, layout)
        train(ranks, engine, config, range(SAVED_AFTER))
        saved(ranks, engine, folder_of(ranks.folder, layout))
        weights = ranks.published(engine)
        metrics = train(ranks, engine, config, range(SAVED_AFTER, SAVED_AFTER + 1))
        return {"weights": weights, "metrics": metrics}

    return run


def moving(layout: Layout, other: Layout) -> Scenario:
    """Load the checkpoint of `layout`, save it again, and take another step."""

    def run(ranks: Ranks) -> Result:
        engine, config = started(ranks, other)
        engine.load(folder_of(ranks.folder, layout))
        numbers, weights = (engine.steps, engine.version), ranks.published(engine)
        saved(ranks, engine, folder_of(ranks.folder, layout, other))
        metrics = train(ranks, engine, config, range(SAVED_AFTER, SAVED_AFTER + 1))
        return {"weights": weights, "numbers": numbers, "metrics": metrics, "notes": engine.notes}

    return run


def whole_state(folder: Path) -> tuple[dict[Any, torch.Tensor], set[float]]:
    """Whole tensors of a checkpoint by (kind, parameter), and Adam's steps."""
    ranks = json.loads((folder / "optimizer" / "index.json").read_text())["ranks"]
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for number, rank in enumerate(ranks):
        path = folder / "optimizer" / f"rank_{number}.safetensors"
        tensors = load_file(path) if rank["pieces"] else {}
        for name, start, count, tensor, offset in rank["pieces"]:
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                piece = tensors[f"{kind}.{tensor}"][offset : offset + count]
                assert start not in parts.setdefault((kind, name), {})
                parts[kind, name][start] = piece
    whole = {
        key: torch.cat([results[s] for s in sorted(results)]) for key, results in parts.items()
    }
    return whole, {step for rank in ranks for step in rank["steps"].values()}


SAVES: Mapping[int, Mapping[str, Scenario]] = {
    ranks: {str(layout): saving(layout) for layout in MOVES if layout.ranks == ranks}
    for ranks in (1, 2)
}
LOADS: Mapping[int, Mapping[str, Scenario]] = {
    ranks: {
        f"{layout} → {other}": moving(layout, other)
        for layout, others in MOVES.items()
        for other in others
        if other.ranks == ranks
    }
    for ranks in (1, 2)
}


PAIRS = [(layout, other) for layout, others in MOVES.items() for other in others]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resharding")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """Run all saving scenarios, then all loading ones."""
    write_family(folder / MODEL, MODEL)
    return run_all(folder, __name__, "SAVES") | run_all(folder, __name__, "LOADS")


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
