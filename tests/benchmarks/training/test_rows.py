"""Benchmarks that measure row by row keep what they have when a later row fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.revision import VARIABLE
from benchmarks.training import attention, replay


class OutOfTime(Exception):
    pass


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "abc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def once(row: Any) -> Callable[..., Any]:
    """Measures one row, and no other."""
    rows = [row]

    def measure(*_: object) -> Any:
        if not rows:
            raise OutOfTime
        return rows.pop()

    return measure


def test_attention_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "kernel", lambda name: None)
    monkeypatch.setattr(attention, "measure", once({"forward_ms": 1.5}))
    words = ["attention", "--out", str(tmp_path), "--kernels", "torch"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(OutOfTime):
        attention.main()
    kept = json.loads((tmp_path / "attention.json").read_text())
    assert kept["rows"] == [{"kernel": "torch", "forward_ms": 1.5}] and kept["commit"] == "abc"


def test_attention_looks_for_its_package_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "measure", once({}))
    monkeypatch.setattr(attention, "check_kernels", lambda: "flash-attn-4 is not installed")
    monkeypatch.setattr(sys, "argv", ["attention", "--out", str(tmp_path / "out")])
    assert attention.main() == 1
    said = "fa4: flash-attn-4 is not installed; --kernels torch goes without\n"
    assert capsys.readouterr().out == said
    assert not (tmp_path / "out").exists()


def test_replay_says_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{arm}_{unit}" for arm in replay.ARMS for unit in ("ms", "gib")]
    names += ["mean_set", "routing_cost", "both_to_full", "tokens_per_second"]
    row = dict.fromkeys(names, 8.0)
    monkeypatch.setattr(replay, "write_model", lambda folder, size: 10**9)
    monkeypatch.setattr(replay, "TrainerEngine", lambda folder, config: None)
    monkeypatch.setattr(replay, "measure", once(row))
    path = tmp_path / "replay.json"
    monkeypatch.setattr(sys, "argv", ["replay", "--json", str(path)])
    with pytest.raises(OutOfTime):
        replay.main()
    assert json.loads(path.read_text()) == {"commit": "abc", "rows": [row]}
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1.00 B parameters") and said[1].startswith("mean set")
    assert said[2].split()[:3] == ["8.0"] * 3


@pytest.fixture
def support_head() -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    from benchmarks.training import support_head  # noqa: PLC0415

    return support_head


def test_the_support_head_keeps_its_rows(
    support_head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = support_head.Row.__dataclass_fields__
    row = support_head.Row(**{name: "union" if name == "plans" else 1 for name in names})
    monkeypatch.setattr(support_head, "measure", once(row))
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["support_head", "--json", str(path)])
    with pytest.raises(OutOfTime):
        support_head.main()
    assert [one["plans"] for one in json.loads(path.read_text())] == ["union"]


def test_a_sweep_of_the_support_head_leaves_rows_alone(
    support_head: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support_head, "sweep", lambda *_: iter(["gather: 1.0"]))
    path = tmp_path / "rows.json"
    path.write_text("[1]")
    monkeypatch.setattr(sys, "argv", ["support_head", "--sweep", "--json", str(path)])
    support_head.main()
    assert path.read_text() == "[1]"
