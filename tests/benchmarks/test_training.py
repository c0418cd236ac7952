"""A rank of `benchmarks.training` on a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks.training.cases import Case
from benchmarks.training.measure import Job, run
from tests.forked import forked_from
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


def test_small_case_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = tmp_path / "rows.jsonl"
    job = Job(
        cases=[Case(shape="qwen3-0.6b", length=8, micro_batch_tokens=16, step_tokens=16)],
        rank=0,
        ranks=1,
        store="",
        rows=str(rows),
        seconds=PATIENCE_S,
        rounds=1,
        small=True,
    )
    process = forked_from("tests.trainer.engine.preloaded").Process(target=run, args=(job,))
    process.start()
    process.join(PATIENCE_S)
    row = json.loads(rows.read_text())
    assert row.get("seconds"), row
