"""The record of a run has no duplicates after a resume, and is easy to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from keel.rl.metrics import Mean
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory
from keel.trainer.run.batches import list_batches, save_batch
from keel.trainer.run.journal import Journal, truncate
from keel.trainer.run.trajectory_files import TokenFile
from keel.trainer.run.view import PlainView


def scored() -> ScoredGroup:
    def answer(sibling: int) -> Trajectory:
        segment = Segment(
            prompt_id="p",
            token_ids_T=np.array([1, 2], np.int32),
            trainable_T=np.array([False, True]),
            logp_old_T=np.array([0, -1], np.float32),
            version_T=np.array([-1, 0], np.int32),
        )
        message = {"role": "assistant", "content": f"{sibling}"}
        return Trajectory(
            prompt_id="p",
            sibling=sibling,
            segments=(segment,),
            finish_reason="stop",
            messages=({**message, "raw": f"<think>hm</think>{sibling}"},),
        )

    prompt = Prompt(prompt_id="p", domain="d", messages=({"role": "user", "content": "1 - 1?"},))
    return ScoredGroup(
        group=Group(prompt=prompt, trajectories=(answer(0), answer(1))),
        rewards_G=np.array([1, 0], np.float32),
        parts_G=({"correct": 1.0}, {"correct": 0.0}),
        advantages_G=np.array([0.5, -0.5], np.float32),
    )


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder: Path, steps: range, resumed_at: int = 0) -> None:
    journal = Journal(folder, PlainView(4), trajectories=2, resumed_at=resumed_at)
    for step in steps:
        metrics = {"loss": Mean(step, 1), "empty": Mean(0, 0)}
        journal.record(step, metrics, [scored()] if step else [])
    journal.close()


def test_resumed_run_replaces_steps_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(5))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]
    assert lines(tmp_path)[2]["loss"] == 2 and "empty" not in lines(tmp_path)[2]
    assert list((tmp_path / "tensorboard").glob("events*"))
    for step in (2, 3):
        save_batch(tmp_path, step, [], [])
    trajectories = tmp_path / "trajectories"
    local = [trajectories / "step_000004 (copy).txt", trajectories / "step_late.txt"]
    tokens = [trajectories / f"step_00000{step}.tokens.jsonl.gz" for step in (2, 3, 4)]
    for path in (*local, *tokens):
        path.touch()
    write(tmp_path, range(3, 4), resumed_at=2)
    assert all(path.exists() for path in local)
    assert [path.exists() for path in tokens] == [True, False, False]
    assert [path.stem for path in list_batches(tmp_path)] == ["step_000002"]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]
    names = sorted(path.stem for path in trajectories.glob("*.jsonl"))
    assert names == ["step_000001", "step_000002", "step_000003"]


def test_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    truncate(path, 5)
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(("save_all", "count"), [(True, 6), (False, 2)])
def test_trajectories_are_saved_as_jsonl(tmp_path: Path, save_all: bool, count: int) -> None:
    class Tokens(TokenFile):
        def __init__(self) -> None:
            pass

        def write(self, path: Path, groups: Sequence[ScoredGroup]) -> None:
            path.touch()

    options = {"trajectories": 2, "save_all": save_all, "tokenizer": "t", "tokens": Tokens()}
    journal = Journal(tmp_path, PlainView(1), **options)
    journal.record(1, {}, [scored()] * 3)
    journal.close()
    path = tmp_path / "trajectories" / "step_000001.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    names = {path.name.removesuffix(".gz") for path in path.parent.iterdir()}
    assert names == {"step_000001.txt", "step_000001.jsonl", "step_000001.tokens.jsonl"}
    assert len(records) == count
    for line in records:
        assert (line["step"], line["tokenizer"]) == (1, "t")
        assert line["messages"][0]["role"] == "user" and line["segments"][0]["said"]


def test_events_are_kept_over_a_resume(tmp_path: Path) -> None:
    journal = Journal(tmp_path, PlainView(3), trajectories=0)
    journal.record(1, {"loss": Mean(1, 1)}, [])
    journal.say("engine", "rollout engine 0 restarts: it died")
    journal.close()
    Journal(tmp_path, PlainView(3), trajectories=0, resumed_at=1).close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["kind"]) for event in events] == [(1, "engine"), (1, "resume")]
    assert "it died" in events[0]["text"]
