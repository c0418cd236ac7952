"""Damaged run folders: readable parts are shown, the rest is noted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from keel.commands.report.folders import read_folder
from keel.configs.schema import ConfigError
from tests.commands.report.runs import write_evaluation, write_run

DEEP = "[" * 1_200 + "]" * 1_200
HUGE = "1" + "0" * 400


def test_odd_numbers_are_omitted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 4, "time": "abc", "reward/mean": {HUGE}, "loss": NaN}}\n')
        file.write(f'{{"step": {HUGE}, "time": {HUGE}}}\n')
        file.write(f'{{"step": 5, "time": 1e999, "x": {DEEP}}}\n')
    with (folder / "events.jsonl").open("a") as file:
        for step in ("NaN", "Infinity", "-1e999", HUGE, '"abc"'):
            file.write(f'{{"step": {step}, "time": {HUGE}, "kind": "alarm"}}\n')
    run, _ = read_folder(folder)
    assert run.steps == [0, 1, 2, 3, 4] and run.times[-1] == 0.0
    assert (run.metrics["reward/mean"][-1], run.metrics["loss"][-1]) == (None, None)
    assert [(event["step"], event["time"]) for event in run.events[3:]] == [(0, 0.0)] * 5
    (note,) = run.notes
    assert "metrics.jsonl:7: not a JSON object" in note


@pytest.mark.parametrize(
    "trajectories",
    ['[{"reward": 1, "tokens": 1e999}]', DEEP, "null", '[{"reward": 1, "tokens": "many"}]', "[7]"],
)
def test_foreign_step_file_is_omitted(tmp_path: Path, trajectories: str) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    path = folder / "trajectories" / "step_000001.tokens.jsonl.gz"
    line = f'{{"prompt": "p", "domain": "d", "trajectories": {trajectories}}}\n'
    path.write_bytes(gzip.compress(line.encode()))
    run, chunks = read_folder(folder)
    (note,) = run.notes
    assert f"{path}: cannot be read" in note
    assert list(chunks) == ["step_000002.tokens.jsonl.gz"]


def test_deep_nesting_with_non_json_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    path = folder / "trajectories" / "step_000001.tokens.jsonl.gz"
    facts: Any = float("nan")
    for _ in range(600):
        facts = [facts]
    one = {"sibling": 0, "reward": float("inf"), "tokens": 1, "parts": {}, "facts": facts}
    group = {"prompt": "p", "domain": "d", "trajectories": [one]}
    path.write_bytes(gzip.compress(json.dumps(group).encode()))
    run, chunks = read_folder(folder)
    assert run.groups[0].rewards == [0.0]
    assert b"[[null]]" in gzip.decompress(chunks[path.name].data())


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (f"run: {DEEP[400:-400]}", False),  # what YAML's parser takes grows with the square
        ("a: &x {b: *x}", False),
        ("a: [{2020-01-01: 1}]", False),
        (f"a: {HUGE}", True),
    ],
)
def test_odd_knobs_are_shown_or_noted(tmp_path: Path, text: str, read: bool) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    (folder / "config.yaml").write_text(text)
    run, _ = read_folder(folder)
    assert run.steps == [0, 1] and bool(run.knobs) == read
    assert ["config.yaml: no knobs can be read" in note for note in run.notes] == [True] * (
        not read
    )


def test_odd_evaluation_settings_are_noted(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "eval")
    for text in (f'{{"a": {DEEP}}}', "[1]", ""):
        (folder / "settings.json").write_text(text)
        run, _ = read_folder(folder)
        assert run.knobs == {} and "settings.json: cannot be read" in run.notes[0]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("samples", None, "NoneType"),
        ("missing", None, "NoneType"),
        ("samples", [{"correct": 1.0}], "missing 'finish_reason'"),
        ("tokens", "absent", "missing 'tokens'"),
        ("tokens", float("inf"), "infinity"),
        ("correct", "abc", "could not convert"),
    ],
)
def test_invalid_evaluation_line_is_named(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    path = write_evaluation(tmp_path / "eval") / "samples.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    of = second if key in second else second["samples"][1]
    if value == "absent":
        del of[key]
    else:
        of[key] = value
    lines = [json.dumps(line) for line in (first, second)]
    path.write_text("\n".join(lines).replace("Infinity", "1e999") + "\n")
    with pytest.raises(
        ConfigError, match=rf"samples\.jsonl:2: no line of an evaluation: .*{message}"
    ):
        read_folder(path.parent)


@pytest.mark.parametrize("line", ["", "[]", "{}", DEEP, '{"variant": '])
def test_foreign_line_is_named(tmp_path: Path, line: str) -> None:
    path = write_evaluation(tmp_path / "eval") / "samples.jsonl"
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=r"samples\.jsonl:3: no line of an evaluation: \w"):
        read_folder(path.parent)
