"""Reading run and evaluation folders."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from keel.commands.report.folders import read_folder
from tests.commands.report.runs import ATTACKS, KINDS, write_evaluation, write_run, write_step


def test_run_as_data(tmp_path: Path) -> None:
    run, chunks = read_folder(write_run(tmp_path / "run"))
    assert (run.name, run.kind, run.notes) == ("run", "run", [])
    assert run.steps == [0, 1, 2, 3]
    assert run.metrics["eval/sums/pass@1"] == [0.25, None, None, None]
    assert run.metrics["time/rollout"] == [2.0] * 4
    assert [event["kind"] for event in run.events] == list(KINDS)
    assert run.knobs["algorithm.group_size"] == "8"
    assert run.knobs["data.sources[spiral].kl_coef"] == "0.002"
    assert run.summary["steps"] == "3 of 60"
    assert len(run.groups) == 3 * (len(ATTACKS) + 1) and len(chunks) == 3
    for group in run.groups:  # the index points to the right line
        line = json.loads(gzip.decompress(chunks[group.chunk].data()).splitlines()[group.line])
        assert (line["prompt"], line["domain"]) == (group.prompt, group.domain)
        assert [one["reward"] for one in line["trajectories"]] == group.rewards


def test_active_or_killed_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_step(folder, 1, [])
    write_step(folder, 2, [], **{"eval/sums/pass@1": 0.5})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": 0.')
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "step_000002.tmp").write_bytes(b"\x1f\x8b half of a file")
    run, chunks = read_folder(folder)
    assert run.steps == [1, 2] and not chunks
    # It has no config.yaml, and no trajectories.
    assert len(run.notes) == 2 and "config.yaml: no knobs" in run.notes[0]
    assert "run.save_trajectories and run.save_tokens, both above 0" in run.notes[1]


def test_damaged_files_are_omitted_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, "[1]", '{"step": 1, "los', *rest, ""]))
    packed = folder / "trajectories" / "step_000002.tokens.jsonl.gz"
    packed.write_bytes(packed.read_bytes()[:-40])
    (folder / "trajectories" / "step_000003.tokens.jsonl.gz").write_bytes(
        gzip.compress(b'{"a": 1}\n')
    )
    (folder / "config.yaml").write_text("run: {dir: [")
    run, chunks = read_folder(folder)
    assert run.steps == [0, 1, 2, 3] and list(chunks) == ["step_000001.tokens.jsonl.gz"]
    named = ("config.yaml", "metrics.jsonl:2", "metrics.jsonl:3", "step_000002", "step_000003")
    assert len(run.notes) == len(named)
    assert all(name in note for name, note in zip(named, run.notes, strict=True))


def test_evaluation_as_data(tmp_path: Path) -> None:
    run, chunks = read_folder(write_evaluation(tmp_path / "eval", prompts=45))
    assert (run.kind, len(run.groups), len(chunks)) == ("evaluation", 45, 3)
    assert run.notes == ["the evaluation has not ended: this is what there is so far"]
    assert run.summary["pass@1 sums"].startswith("0.333 (0.")
    group = run.groups[44]
    line = json.loads(gzip.decompress(chunks[group.chunk].data()).splitlines()[group.line])
    assert line["prompt"] == group.prompt == "sums/44"
    assert line["trajectories"][1]["messages"][0]["reasoning_content"] == "hm"
    assert line["dropped"] == ["cut off"]
    assert line["reference"] == "2" and line["trajectories"][0]["answer"] == "1"


def test_summary_shows_the_outcome(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=40)
    write_step(folder, 40, [], **{"eval/sums/pass@1": 0.75})
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"step": 30, "time": 1, "kind": "alarm", "text": "entropy fell"}\n')
    summary = read_folder(folder)[0].summary
    assert summary["model"] == "tiny" and summary["trained on"] == "spelling, spiral"
    assert summary["time"] == "40 min"
    assert summary["held-out sums/pass@1"] == "0.250 → 0.750 (+0.500)"
    assert summary["reward"] == "0.015 → 0.385 (means of 4 steps)"  # of steps 0 to 3, 37 to 40
    assert summary["alarms"].startswith("2, ") and "entropy fell" in summary["alarms"]


def test_changed_knobs_match_the_recipe(tmp_path: Path) -> None:
    run, _ = read_folder(write_run(tmp_path / "run", "trainer.lr=3e-4", steps=1))
    assert {"trainer.lr", "run.dir", "data.sources[spiral].task"} <= {*run.changed}
    assert not {"sft.sources", "data.sources[spiral].path", "algorithm.group_size"} & {*run.changed}
    assert len(run.changed) < 40 < len(run.knobs)
    chosen = {"values": {"rollout.engines": 2}}
    (tmp_path / "run" / "chosen.json").write_text(json.dumps(chosen))
    again, _ = read_folder(tmp_path / "run")
    assert {*run.changed} - {*again.changed} == {"rollout.engines"}


def test_evaluation_of_agents_has_curves_of_score_by_steps(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "eval")
    path = folder / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for turns, one in enumerate(line["samples"], start=2):
            one["turns"] = turns
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, _ = read_folder(folder)
    assert run.steps == [2, 5, 8]
    assert run.metrics["eval/sums: recipe/score by steps"] == [pytest.approx(1 / 3), None, None]
    wider = run.metrics["eval/sums: parallel-fewest-step/score by steps"]
    assert wider[0] == pytest.approx(1 / 3) and wider[2] == 0.0
