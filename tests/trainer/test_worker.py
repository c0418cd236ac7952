"""Rank processes without Ray and DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keel.trainer.worker import PINNED, TrainerWorker, host_threads, last_lines


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(10_000)))
    assert last_lines(str(log), 2) == "last lines of its log:\nline 9998\nline 9999"
    log.write_text("")
    assert last_lines(str(log)) == last_lines("") == last_lines(str(tmp_path / "absent")) == ""


@pytest.mark.parametrize(
    ("ranks", "gpus", "threads"),
    [(1, 1, 32), (8, 8, 4), (16, 8, 4), (2, 8, 16), (64, 64, 1), (4, 0, 8)],
)
def test_offloading_ranks_share_cores(ranks: int, gpus: int, threads: int) -> None:
    """Ray would give each rank one thread."""
    assert host_threads(ranks, gpus, cores=32) == threads


@pytest.mark.parametrize(
    ("there", "then"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": PINNED}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True,{PINNED}"},
        ),
        *[
            ({name: "pinned_use_background_threads:True"},) * 2
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        ],
    ],
)
def test_pinned_memory_settings_are_merged(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, str], then: dict[str, str]
) -> None:
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **there}
    monkeypatch.setattr(os, "environ", environment)
    TrainerWorker(0, 1, gpu=True)
    assert {n: v for n, v in environment.items() if n.endswith("ALLOC_CONF")} == then
