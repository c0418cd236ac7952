"""Runs that another commit has done are done again, and nothing of them is lost."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.revision import VARIABLE


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    # What is set the import leaves alone, and with it the GPUs of other tests.
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    if not gpus:
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from benchmarks.stability import __main__ as command  # noqa: PLC0415

    def run_arm(run: Any, engines: object, folder: Path) -> dict[str, Any]:
        return {
            "experiment": run.experiment,
            "arm": run.arm,
            "seed": run.seed,
            "steps": run.steps,
            "overrides": command.overrides_of(run),
            "revision": command.commit(),
        }

    monkeypatch.setattr(command, "run_arm", run_arm)
    monkeypatch.setattr(command.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(command, "start_ray", lambda: None)
    monkeypatch.setattr(command, "ray", SimpleNamespace(shutdown=lambda: None))
    return command


@pytest.mark.parametrize("kept", [(), ("--revisions", "a")], ids=["again", "kept"])
def test_runs_of_another_commit(
    kept: tuple[str, ...],
    command: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def call(commit: str, *more: str) -> None:
        monkeypatch.setenv(VARIABLE, commit)
        words = ["stability", "--out", str(tmp_path), "--only", "kl_stale", *more]
        monkeypatch.setattr(sys, "argv", words)
        command.run_all(command.parse())

    def lines(name: str) -> list[tuple[str, int, str]]:
        path = tmp_path / name
        read = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        return [(line["arm"], line["seed"], line["revision"]) for line in read]

    call("a", "--seeds", "0", "1")
    done = lines("runs.jsonl")
    assert len(done) == 4
    call("a", "--seeds", "0", "1")
    assert lines("runs.jsonl") == done and capsys.readouterr().out == ""

    call("b", "--arms", "k3", "--seeds", "0", *kept)
    said = capsys.readouterr().out
    if kept:
        assert lines("runs.jsonl") == done and said == ""
        return
    assert "kl_stale / k3 / 0: again, it was done at a (--revisions a keeps it)\n" in said
    assert "kl_stale: runs of several commits: 3 of a, 1 of b\n" in said
    assert sorted(lines("runs.jsonl")) == sorted({*done, ("k3", 0, "b")} - {("k3", 0, "a")})
    assert lines("replaced.jsonl") == [("k3", 0, "a")]
