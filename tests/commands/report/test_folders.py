"""Reading run and evaluation folders."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from keel.commands.report import folders
from keel.commands.report.folders import read_folder
from keel.commands.report.shape import listed
from keel.configs.load import dump_config, load_config
from keel.configs.schema import ConfigError
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


def test_run_of_an_older_release(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    there = folder / "trajectories"
    (there / "step_000001.tokens.jsonl.gz").rename(there / "step_000001.jsonl.gz")
    (there / "step_000001.jsonl").write_text("{}\n")  # for `keel sft`
    run, chunks = read_folder(folder)
    assert run.notes == [] and [group.step for group in run.groups[:1]] == [1]
    assert list(chunks) == ["step_000001.jsonl.gz", "step_000002.tokens.jsonl.gz"]


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


def test_run_before_its_first_step(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    run, _ = read_folder(tmp_path / "run")
    assert run.steps == [] and "no step has ended so far" in run.notes


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


def test_non_json_numbers_are_omitted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_step(folder, 1, [])
    group = {"prompt": "p", "domain": "d", "messages": [], "reference": "", "dropped": []}
    one = {"sibling": 0, "reward": 1.0, "tokens": 1, "parts": {}, "facts": {"x": float("nan")}}
    line = json.dumps({**group, "trajectories": [one]})
    (folder / "trajectories").mkdir()
    path = folder / "trajectories" / "step_000001.tokens.jsonl.gz"
    path.write_bytes(gzip.compress(line.encode()))
    _, chunks = read_folder(folder)
    assert b"NaN" not in gzip.decompress(chunks[path.name].data())


def test_empty_list_is_a_knob(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    text = "data: {sources: [], tags: [a], named: [{name: x, size: 1}]}"
    (folder / "config.yaml").write_text(text)
    run, _ = read_folder(folder)
    assert run.knobs == {
        "data.sources": "[]",
        "data.tags": '["a"]',
        "data.named[x].name": '"x"',
        "data.named[x].size": "1",
    }


def test_evaluation_knobs_match_run_knobs(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "eval")
    given = {
        "model.path": "x's",
        "eval.k": None,
        "eval.raw": True,
        "eval.sets": ("a", "b"),
        "trainer.lr": 1e-6,
    }
    settings = {"policy": "step 3", **{name: repr(value) for name, value in given.items()}}
    (folder / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "run").mkdir()
    sections = [
        'model: {path: "x\'s"}',
        "eval: {k: null, raw: true, sets: [a, b]}",
        "trainer: {lr: 1.0e-06}",
    ]
    (tmp_path / "run" / "config.yaml").write_text("\n".join(sections))
    (evaluation, _), (run, _) = read_folder(folder), read_folder(tmp_path / "run")
    assert evaluation.knobs == {"policy": "step 3", **run.knobs}


def test_supervised_run_has_no_sampling_advice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step, loss in enumerate([2.0, 1.5]):
        write_step(folder, step, [], **{"sft/tokens": 10.0, "eval/sums/loss": loss})
    (folder / "config.yaml").write_text(dump_config(load_config("sft-quickstart")))
    run, _ = read_folder(folder)
    assert run.notes == []
    assert run.summary["held-out sums/loss"] == "2.000 → 1.500 (-0.500)"
    (folder / "metrics.jsonl").unlink()
    (folder / "config.yaml").write_text("data: {sources: []}")
    write_step(folder, 1, [])
    assert read_folder(folder)[0].notes == []


def test_long_read_prints_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, known = write_run(tmp_path / "run", steps=3), dict[Path, folders.StepFile]()
    monkeypatch.setattr(folders, "PROGRESS_S", 0.0)
    read_folder(folder, known)
    lines = [f"{folder}: read {done} of 3 step files" for done in (1, 2, 3)]
    assert capsys.readouterr().err.splitlines() == lines


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


def test_evaluation_of_an_older_release(tmp_path: Path) -> None:
    path = write_evaluation(tmp_path / "eval") / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["samples"] = [
            {key: value for key, value in sample.items() if key not in ("parts", "thinking")}
            for sample in line["samples"]
        ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, chunks = read_folder(path.parent)
    group = json.loads(gzip.decompress(chunks[run.groups[1].chunk].data()).splitlines()[1])
    assert [one["parts"] for one in group["trajectories"]] == [{"correct": 0.0}, {"correct": 1.0}]


def test_other_folder_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "recipe.yaml").touch()
    file = tmp_path / "runs" / "a" / "metrics.jsonl"
    for folder, message in (
        (tmp_path / "nowhere", "does not exist; give the folder .* eval.dir; there are .*/runs/a$"),
        (tmp_path / "runs" / "aa", "does not exist; .* there are .*/runs/a$"),
        (file, "is a file; .*/runs/a$"),
        (tmp_path / "recipe.yaml", "is a file; give the folder that the recipe calls run.dir, or"),
        (tmp_path / "empty", "holds no run .* run.dir, or eval.dir"),
        (tmp_path / "runs", f"holds no run .* there are {tmp_path / 'runs' / 'a'}"),
        (tmp_path / "runs" / "a" / "trajectories", f"there are {tmp_path}/runs/a"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_folder(folder)


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


@pytest.mark.parametrize(
    ("content", "question"),
    [
        ("What is\n 2 + 2?", "What is 2 + 2?"),
        ("x " * 400 + "the end", "x " * 35 + "… " + "x " * 21 + "the end"),
        ("字" * 400, "字" * 70 + " … " + "字" * 50),
        ([{"type": "text", "text": "hm"}], '[{"type":"text","text":"hm"}]'),
        (None, ""),
    ],
)
def test_group_is_listed_by_its_question(content: object, question: str) -> None:
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    one = {"reward": 1, "tokens": 1, "messages": [*opening, {"role": "assistant"}], "opening": 2}
    for messages in (opening, []):  # an episode's prompt is in its transcript
        group = {"prompt": "p", "domain": "d", "messages": messages, "trajectories": [one]}
        assert listed(group, 1, "c", 0).question == question
