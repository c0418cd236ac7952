from __future__ import annotations

import errno
import io
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import Config, DataConfig, RunConfig, SourceConfig
from keel.trainer.run.checkpoint import (
    SaveError,
    State,
    config_digest,
    finished,
    latest,
    latest_complete,
    problems,
    prune,
    read_state,
    save,
)
from keel.trainer.run.manifest import MANIFEST, Entry, seal
from keel.trainer.run.restarts import CollectiveTimeout, WorkerLost


def state(step: int) -> State:
    return State(step=step, version=2 * step, cursor={"source": [1, "a"]}, config="abc")


def content(folder: Path) -> dict[str, Entry]:
    (folder / "ranks").mkdir()
    (folder / "ranks" / "weights").write_text("w")
    return seal(folder, ["ranks/weights"])


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_saved_checkpoint_is_found_and_read(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert latest(root) is None
    folder = save(root, state(7), content, keep=2)
    assert folder == latest(root) == root / "step_000007"
    assert read_state(folder) == state(7)
    assert (folder / "ranks" / "weights").read_text() == "w"


def test_a_checkpoint_that_lacks_files_is_passed_over_at_once(tmp_path: Path) -> None:
    older, newer = (save(tmp_path, state(step), content, keep=2) for step in (1, 2))
    (newer / "ranks" / "weights").write_text("v")
    assert latest_complete(tmp_path) == newer and problems(newer), "as long as it was"
    (newer / "ranks" / "weights").write_text("")
    assert latest_complete(tmp_path) == older
    (older / "ranks" / "weights").unlink()
    assert latest_complete(tmp_path) is None


def test_the_newest_stay_by_number(tmp_path: Path) -> None:
    for step in (1, 2, 999_999, 1_000_000):
        save(tmp_path, state(step), content, keep=2)
    assert [path.name for path in finished(tmp_path)] == ["step_999999", "step_1000000"]
    assert names(tmp_path) == ["step_1000000", "step_999999"]


def test_a_crash_while_writing_leaves_the_last_one_in_force(tmp_path: Path) -> None:
    save(tmp_path, state(1), content, keep=1)

    def crash(folder: Path) -> dict[str, Entry]:
        content(folder)
        raise OSError("disk full")

    said = r"step_000002: cannot be written: disk full\nstep_000001 is there to resume from; "
    with pytest.raises(RuntimeError, match=said + r"\d+\.\d GiB are free"):
        save(tmp_path, state(2), crash, keep=1)
    assert latest(tmp_path) == tmp_path / "step_000001"
    assert names(tmp_path) == ["step_000001"], "what was written takes no room"
    save(tmp_path, state(3), content, keep=1)
    assert names(tmp_path) == ["step_000003"]


def test_a_rank_that_is_lost_while_it_writes_is_as_lost_as_any(tmp_path: Path) -> None:
    save(tmp_path, state(1), content, keep=1)

    def dies(_: Path) -> dict[str, Entry]:
        raise WorkerLost("trainer rank 0 died")

    with pytest.raises(WorkerLost, match=r"^trainer rank 0 died$"):
        save(tmp_path, state(2), dies, keep=1)
    assert names(tmp_path) == ["step_000001"]


def test_ranks_that_wait_for_one_that_failed_are_not_asked_again(tmp_path: Path) -> None:
    def stuck(_: Path) -> dict[str, Entry]:
        raise CollectiveTimeout("trainer rank 0 failed")

    with pytest.raises(
        CollectiveTimeout, match=r"step_000002: cannot be written: trainer rank 0 failed"
    ):
        save(tmp_path, state(2), stuck, keep=1)
    assert names(tmp_path) == []


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    """It was deleted and another file put there, or is read-only, or the disk is full."""
    root = tmp_path / "checkpoints"
    save(root, state(1), content, keep=1)

    def large(folder: Path) -> dict[str, Entry]:
        (folder / "weights").write_bytes(bytes(1000))
        return {}

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # bytes
    try:
        with pytest.raises(RuntimeError, match=r"step_000002: cannot be written: .*File too large"):
            save(root, state(2), large, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(root) == ["step_000001"] and problems(root / "step_000001") == []

    shutil.rmtree(root)
    root.touch()
    with pytest.raises(RuntimeError, match=r"s/step_000002: cannot be written: .*File exists"):
        save(root, state(2), content, keep=1)


def test_whichever_call_fails_nothing_half_written_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up, is remounted read-only or fails, at every call in turn."""
    calls, fails_at = 0, -1

    def failing(function: Callable[..., Any], writes: bool = False) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls - 1 != fails_at:
                return function(path, *args, **kwargs)
            if writes and "w" in args[0]:
                with function(path, *args, **kwargs) as file:
                    file.write("{" if "b" not in args[0] else b"{")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        return call

    save(tmp_path, state(1), content, keep=99)
    failures = 0
    while calls > fails_at:
        calls, fails_at, before = 0, fails_at + 1, finished(tmp_path)
        step = 2 + fails_at
        with monkeypatch.context() as patch:
            for module, name in ((os, "mkdir"), (os, "rename"), (os, "fsync"), (io, "open")):
                patch.setattr(module, name, failing(getattr(module, name), module is io))
            try:
                save(tmp_path, state(step), content, keep=99)
            except SaveError as error:
                assert f"step_{step:06d}: cannot be written: [Errno 28] No space" in str(error)
                failures += 1
        left = finished(tmp_path)
        assert left[: len(before)] == before and len(names(tmp_path)) == len(left)
        assert not any(map(problems, left))
    assert failures > 15 and len(finished(tmp_path)) > 1


def test_what_a_crash_left_is_gone_before_the_next_is_written(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    (tmp_path / ".step_000009").mkdir()
    content(tmp_path / ".step_000009")

    def look(folder: Path) -> dict[str, Entry]:
        seen.append(names(tmp_path))
        return {}

    save(tmp_path, state(3), look, keep=1)
    assert seen == [[".step_000003"]]


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, state(1), content, keep=1)
    save(tmp_path, replace(state(1), version=9), content, keep=1)
    assert read_state(tmp_path / "step_000001").version == 9
    assert names(tmp_path) == ["step_000001"]


def test_a_checkpoint_is_verified_to_its_last_file(tmp_path: Path) -> None:
    folder = save(tmp_path, state(1), content, keep=1)
    assert problems(folder) == []
    for name in ("state.json", "ranks/weights", MANIFEST):
        whole = (folder / name).read_text()
        (folder / name).write_text(whole.swapcase())
        assert [line.partition(":")[0] for line in problems(folder)] == [name]
        (folder / name).unlink()
        assert [line.partition(":")[0] for line in problems(folder)] == [name]
        assert finished(tmp_path) == [folder], "damaged, it is there nevertheless"
        (folder / name).write_text(whole)
    assert problems(folder) == []


def test_another_checkpoint_in_its_place_is_found_out(tmp_path: Path) -> None:
    folder = save(tmp_path, state(1), content, keep=1)
    folder.rename(tmp_path / "step_000002")
    (found,) = problems(tmp_path / "step_000002")
    assert "state.json: of step 1, so this is another" in found


def test_folders_without_a_state_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "step_000005").mkdir()
    (tmp_path / "step_best").mkdir()
    assert finished(tmp_path) == []
    prune(tmp_path, tmp_path / "step_000007", keep=1)
    assert names(tmp_path) == ["step_000005", "step_best"], "prune deletes only what it wrote"


def test_a_later_one_that_is_damaged_takes_no_place(tmp_path: Path) -> None:
    """A run that has lost a process goes on from before it."""
    for step in (90, 100):
        save(tmp_path, state(step), content, keep=2)
    (tmp_path / "step_000100" / "ranks" / "weights").write_bytes(b"")
    newest = save(tmp_path, state(95), content, keep=1)
    assert problems(newest) == [] and names(tmp_path) == ["step_000095", "step_000100"]


def test_one_that_was_moved_and_linked_is_let_go(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    root.mkdir()
    save(root, state(1), content, keep=1).rename(elsewhere)
    (root / "step_000001").symlink_to(elsewhere)
    said: list[str] = []
    save(root, state(2), content, keep=1, say=said.append)
    assert not said and names(root) == ["step_000002"] and elsewhere.is_dir()


@pytest.mark.parametrize("text", ["", "{}", '{"step": 1, "colour": "red"}', "[]"])
def test_a_broken_state_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json: not the state of a checkpoint"):
        read_state(tmp_path)


def test_an_older_one_that_cannot_be_deleted_is_said_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    save(tmp_path, state(1), content, keep=1)
    said: list[str] = []
    monkeypatch.setattr("keel.trainer.run.checkpoint.prune", busy)
    newest = save(tmp_path, state(2), content, keep=1, say=said.append)
    assert problems(newest) == [] and names(tmp_path) == ["step_000001", "step_000002"]
    assert said == [
        f"warning: {tmp_path}: older checkpoints cannot be deleted: [Errno 39] Directory not empty"
    ]


def test_at_least_one_checkpoint_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep = 0"):
        prune(tmp_path, tmp_path / "step_000007", keep=0)


def test_the_digest_is_about_training_alone() -> None:
    source = SourceConfig(name="s", source="reasoning_gym", task="chain_sum", size=8)
    config = Config(data=DataConfig(sources=(source,)))
    longer = replace(config, run=RunConfig(steps=5, dir="elsewhere"))
    faster = replace(config, trainer=replace(config.trainer, lr=1e-3))
    assert config_digest(longer) == config_digest(config) != config_digest(faster)
