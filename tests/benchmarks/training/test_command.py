"""What the command makes of cases that were measured, and of those that were not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.revision import VARIABLE
from benchmarks.training import __main__ as training
from benchmarks.training.__main__ import Group

Call = Callable[..., int]
MEASURED = {"seconds": 1.0}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command at a commit, whose processes write a row with this for each case (None: no row):
    its exit status."""

    def called(commit: str, *rows: dict[str, Any] | None) -> int:
        def start(
            group: Group, gpus: Sequence[str], options: argparse.Namespace, seconds: float
        ) -> list[Any]:
            for case, row in zip(group.cases, rows, strict=True):
                if row is not None:
                    line = {"case": asdict(case), "name": str(case), **row}
                    with (options.out / f"{group.name}.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
            return []

        monkeypatch.setenv(VARIABLE, commit)
        monkeypatch.setattr(training, "start", start)
        monkeypatch.setattr(training, "show", lambda rows: None)
        words = ["training", "--out", str(tmp_path), "--small", "--shapes", "moe-1.6b"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            training.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return called


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (None, "no row: log-one-*.txt"),
        ({"skipped": "out of time"}, "out of time"),
        ({"failed": "OutOfMemoryError()"}, "OutOfMemoryError()"),
    ],
    ids=["killed", "late", "failed"],
)
def test_a_case_that_was_not_measured_is_no_success(
    call: Call, last: dict[str, Any] | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("a", MEASURED, MEASURED, MEASURED, last) == 1
    assert capsys.readouterr().out == f"not measured: moe-1.6b, 64x16, recompute: {why}\n"
    assert call("a", *[MEASURED] * 4) == 0


def test_no_call_loses_the_rows_of_another(call: Call, tmp_path: Path) -> None:
    def kept(name: str) -> tuple[str, int]:
        content = json.loads((tmp_path / name).read_text())
        return content["commit"], len(content["rows"])

    assert call("a", *[MEASURED] * 4) == 0
    assert call("b", *[None] * 4) == 1
    assert kept("training.json") == ("a", 4)
    assert len((tmp_path / "one.1.jsonl").read_text().splitlines()) == 4
    assert call("c", MEASURED, *[None] * 3) == 1
    assert (kept("training.json"), kept("training.1.json")) == (("c", 1), ("a", 4))


def test_rows_of_an_earlier_call_are_not_taken_for_this_one(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a group's GPUs are too few this time, and it does not start."""
    assert call("a", *[MEASURED] * 4) == 0
    monkeypatch.setattr(training, "waves", lambda groups, gpus: [[]])
    assert call("b", *[MEASURED] * 4) == 1
    assert json.loads((tmp_path / "training.json").read_text())["commit"] == "a"
