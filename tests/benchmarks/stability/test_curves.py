"""Curves and tables of a run's metrics (benchmarks/stability/curves.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.stability.curves import read, smoothed, write_report

STEP = {
    "reward/mean": 0.5,
    "mismatch/logp_abs": 1e-4,
    "kl/ref": 0.0,
    "mask/sequence_fraction": 0.0,
    "routing/overlap": 0.95,
    "time/step": 2.0,
    "time/rollout": 1.5,
    "time/train": 0.5,
    "time/idle_fraction": 0.75,
    "throughput/tokens_per_second": 4321.0,
}


def write_run(folder: Path, steps: int) -> Path:
    folder.mkdir()
    lines = [{"step": 0, "time": 1.0, "eval/spelling/pass@1": 0.25, "eval/gcd/pass@1": 0.5}]
    lines += [{"step": n, "time": 1.0 + n, **STEP, "reward/mean": n / 100} for n in range(1, steps)]
    lines.append({**lines[-1], "step": steps, "eval/spelling/pass@1": 0.75, "eval/gcd/pass@1": 1.0})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "rew')
    return folder


def test_a_run_becomes_a_figure_tables_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "mine", 30)
    page = tmp_path / "learning.md"
    page.write_text("# Learning\n\n<!-- mine -->\nold\n<!-- end -->\n\nAfter.\n")
    write_report(run, page, "mine")
    text = page.read_text()
    assert text.startswith("# Learning\n\n<!-- mine -->\n![mine](learning/mine.png)\n")
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    assert "old" not in text
    assert "| held-out pass@1 at step | 0 | 30 |" in text
    assert "| spelling | 0.250 | 0.750 |" in text
    assert "| mean | 0.375 | 0.875 |" in text
    assert "| `reward/mean` | 0.055 | 0.254 | 0.01 | 0.29 |" in text
    assert "30 steps; a median step took 2.00 s (rollout 1.50 s, train 0.50 s)" in text
    assert "4,321 tokens per second" in text
    assert (tmp_path / "learning" / "mine.png").stat().st_size > 1000
    lines = [json.loads(line) for line in (tmp_path / "learning" / "mine.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(31))
    assert lines[0] == {"step": 0, "eval/spelling/pass@1": 0.25, "eval/gcd/pass@1": 0.5}
    monkeypatch.setattr(
        "benchmarks.stability.curves.draw", lambda curves, path: None
    )  # takes seconds
    write_report(run, page, "mine")
    assert page.read_text() == text


def test_a_page_without_a_place_for_it_is_refused_and_kept(tmp_path: Path) -> None:
    run, page = write_run(tmp_path / "mine", 3), tmp_path / "learning.md"
    page.write_text("# Learning\n")
    with pytest.raises(ValueError, match="no block <!-- mine -->"):
        write_report(run, page, "mine")
    assert page.read_text() == "# Learning\n"


def test_a_run_without_a_step_has_no_curves(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "time": 1.0, "eval/spelling/pass@1": 0.25}\n')
    with pytest.raises(ValueError, match="no step was done"):
        read(path)


def test_smoothing_looks_back_only() -> None:
    assert smoothed([1.0, 3.0]) == [1.0, 2.0]
    assert smoothed([0.0] * 10 + [10.0])[-1] == 1.0
