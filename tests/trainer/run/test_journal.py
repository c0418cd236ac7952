"""What a run writes down survives a resume without doubles, and reads well."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keel.rl.metrics import Mean
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory, Usage, Verdict
from keel.trainer.run.batches import list_batches, save_batch
from keel.trainer.run.journal import Journal, describe, files_after, keep_until
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
        said = {"role": "assistant", "content": f"{sibling}", "raw": f"<think>hm</think>{sibling}"}
        return Trajectory(
            prompt_id="p",
            sibling=sibling,
            segments=(segment,),
            finish_reason="stop",
            messages=(said,),
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


def write(folder: Path, steps: range, resumed_at: int, capsys_view: PlainView) -> None:
    journal = Journal(folder, capsys_view, trajectories=2, resumed_at=resumed_at)
    for step in steps:
        journal.record(
            step, {"loss": Mean(step, 1), "empty": Mean(0, 0)}, [scored()] if step else []
        )
    journal.close()


def test_each_step_is_one_object_and_values_without_count_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, range(3), 0, PlainView(2))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert lines(tmp_path)[2]["loss"] == 2
    assert "empty" not in lines(tmp_path)[2]
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(5), 0, PlainView(4))
    for step in (2, 3):
        save_batch(tmp_path, step, [], [])
    mine = tmp_path / "trajectories" / "step_000004 (copy).txt"
    mine.touch()
    # Of tokens, which the run that goes on may write no more: run.save_tokens.
    tokens = [tmp_path / "trajectories" / f"step_00000{step}.tokens.jsonl.gz" for step in (2, 3, 4)]
    for path in tokens:
        path.touch()
    write(tmp_path, range(3, 4), 2, PlainView(4))
    assert mine.exists() and [path.exists() for path in tokens] == [True, False, False]
    mine.unlink()
    assert [path.stem for path in list_batches(tmp_path)] == ["step_000002"]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]
    names = sorted(path.stem for path in (tmp_path / "trajectories").glob("*.txt"))
    assert names == sorted(path.stem for path in (tmp_path / "trajectories").glob("*.jsonl"))
    assert names == ["step_000001", "step_000002", "step_000003"]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    keep_until(path, 5)
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"loss": 1}', r"metrics.jsonl:2: not an object with a whole number `step`; repair"),
        ('{"step": "two"}', r"metrics.jsonl:2: not an object with a whole number `step`"),
        ("7", r"metrics.jsonl:2: not an object with"),
        ('{"step": 2, "lo', r"metrics.jsonl:2: not JSON"),
    ],
)
def test_a_line_that_no_run_wrote_is_named_and_nothing_is_lost(
    tmp_path: Path, line: str, complaint: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        keep_until(path, 5)
    assert path.read_text() == text


def test_a_trajectory_shows_question_answer_and_reward(tmp_path: Path) -> None:
    write(tmp_path, range(2), 0, PlainView(1))
    text = (tmp_path / "trajectories" / "step_000001.txt").read_text()
    for part in ("1 - 1?", "<think>hm</think>0", "reward 1", "correct 0", "advantage -0.500"):
        assert part in text


def test_an_episode_is_written_with_its_calls_results_and_verdict() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    plain = scored()
    trajectory = replace(
        plain.group.trajectories[0],
        messages=(
            {"role": "user", "content": "Sum."},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "content": "3", "name": "add"},
            {"role": "assistant", "content": "3"},
        ),
        verdict=Verdict(parts={"correct": 1.0}, facts={"asked": 3}),
        usage=Usage(turns=2, calls=1, tools_s=0.25),
    )
    prompt = replace(plain.group.prompt, environment="sums")
    group = replace(
        plain, group=replace(plain.group, prompt=prompt, trajectories=(trajectory,) * 2)
    )
    text = describe(group, 0)
    assert text.splitlines()[1:] == [
        "    2 turns, 1 calls (0 failed, 0 of them malformed), 1 contexts (0 rewritten), 0 of 0 "
        "repeated tokens from the cache, 0.00 s in engines, 0.25 s in tools",
        '    the environment says: {"asked": 3}',
        "[user] Sum.",
        "[assistant] <think>Hm.</think>",
        '[call add] {"a": 1}',
        "[tool add] 3",
        "[assistant] 3",
    ]


def test_half_a_surrogate_pair_does_not_end_the_run(tmp_path: Path) -> None:
    plain = scored()
    said = replace(
        plain.group.trajectories[0], messages=({"role": "assistant", "content": "a\ud83d"},)
    )
    group = replace(plain.group, trajectories=(said, said))
    journal = Journal(tmp_path, PlainView(1), trajectories=2, resumed_at=0)
    journal.record(1, {"loss": Mean(1, 1)}, [replace(plain, group=group)])
    journal.close()
    assert "a?" in (tmp_path / "trajectories" / "step_000001.txt").read_text()


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path, PlainView(1), trajectories=0)
    (tmp_path / "metrics.jsonl").mkdir()
    said = rf"run\.dir = {tmp_path}: step 1 cannot be written \(.*Is a directory"
    with pytest.raises(OSError, match=said):
        journal.record(1, {}, [])
    journal.close()


def test_where_tensorboard_cannot_write_the_folder_is_named_once_and_no_traceback_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)  # pytest has one of its own
    view = PlainView(1)
    journal = Journal(tmp_path, view, trajectories=0)
    (curves,) = (tmp_path / "tensorboard").iterdir()
    while not curves.is_dir():  # its thread may write the file again in between
        curves.unlink(missing_ok=True)
        with suppress(FileExistsError):
            curves.mkdir()

    def record() -> None:
        for step in range(1, 1000):  # its thread is told of it in its own time
            journal.record(step, {"loss": Mean(1, 1)}, [])

    with pytest.raises(OSError, match=rf"run\.dir = {tmp_path}: step \d+ cannot be written \("):
        record()
    journal.close()
    assert not hooked
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "TensorBoard's curves lack their end" in said.out + said.err
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join(timeout=60)
    assert not other.is_alive()
    assert [raised.exc_type for raised in hooked] == [ZeroDivisionError]


def test_files_of_later_steps_are_found_without_a_look_at_each_earlier_one(tmp_path: Path) -> None:
    def calls(files: int) -> int:
        """Of Python's functions."""
        folder = tmp_path / str(files)
        folder.mkdir()
        for step in range(1, files + 1):
            (folder / f"step_{step:06d}.txt").touch()
        for name in ("step_late.txt", "step_999999_mine.txt", "notes.txt"):
            (folder / name).touch()
        counted: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, argument: counted.update([event]))
        found = files_after(folder, files - 1)
        sys.setprofile(None)
        assert found == [folder / f"step_{files:06d}.txt"]
        return counted["call"]

    # A few more where something else runs meanwhile; a path makes a dozen calls.
    assert calls(500) < calls(5) + 500
    assert files_after(tmp_path / "none", 0) == []


@pytest.mark.parametrize(("every", "count"), [(True, 6), (False, 2)])
def test_trajectories_are_lines_to_be_learned_from(tmp_path: Path, every: bool, count: int) -> None:
    journal = Journal(tmp_path, PlainView(1), trajectories=2, every=every, tokenizer="t")
    journal.record(1, {}, [scored()] * 3)
    journal.close()
    path = tmp_path / "trajectories" / "step_000001.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert {one.suffix for one in path.parent.iterdir()} == {".txt", ".jsonl"}
    assert len(found) == count
    for line in found:
        assert (line["step"], line["tokenizer"]) == (1, "t")
        assert line["messages"][0]["role"] == "user" and line["segments"][0]["said"]


def test_no_file_of_a_step_is_another_one_unpacked(tmp_path: Path) -> None:
    class Tokens(TokenFile):
        def __init__(self) -> None:
            pass

        def write(self, path: Path, groups: Sequence[ScoredGroup]) -> None:
            path.touch()

    journal = Journal(tmp_path, PlainView(1), trajectories=1, tokens=Tokens())
    journal.record(1, {}, [scored()])
    journal.close()
    names = {path.name.removesuffix(".gz") for path in (tmp_path / "trajectories").iterdir()}
    assert names == {"step_000001.txt", "step_000001.jsonl", "step_000001.tokens.jsonl"}


def test_what_happened_besides_steps_is_kept_over_a_resume(tmp_path: Path) -> None:
    journal = Journal(tmp_path, PlainView(3), trajectories=0)
    journal.record(1, {"loss": Mean(1, 1)}, [])
    journal.say("engine", "rollout engine 0 is started again: it died")
    journal.close()
    Journal(tmp_path, PlainView(3), trajectories=0, resumed_at=1).close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["kind"]) for event in events] == [(1, "engine"), (1, "resume")]
    assert "it died" in events[0]["text"]
