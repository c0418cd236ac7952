"""Checkpoints are written atomically, verified and pruned."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import Config, DataConfig, RunConfig, SourceConfig
from keel.trainer.run import manifest
from keel.trainer.run.checkpoint import (
    SaveError,
    State,
    config_digest,
    finished,
    problems,
    save,
)
from keel.trainer.run.manifest import (
    MANIFEST,
    Entry,
    find_damage,
    join_problems,
    seal,
    write_manifest,
)
from keel.trainer.run.restarts import CollectiveTimeout, WorkerLost


def state(step: int) -> State:
    return State(step=step, version=2 * step, cursor={"source": [1, "a"]}, config="abc")


def content(folder: Path) -> dict[str, Entry]:
    (folder / "ranks").mkdir()
    (folder / "ranks" / "weights").write_text("w")
    return seal(folder, ["ranks/weights"])


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_newest_checkpoints_are_kept_by_number(tmp_path: Path) -> None:
    (tmp_path / "step_best").mkdir()
    (tmp_path / "step_000005").mkdir()  # without a state it is no checkpoint
    for step in (1, 2, 999_999, 1_000_000):
        save(tmp_path, state(step), content, keep=2)
    assert [path.name for path in finished(tmp_path)] == ["step_999999", "step_1000000"]
    assert names(tmp_path) == ["step_000005", "step_1000000", "step_999999", "step_best"]
    with pytest.raises(ValueError, match="keep = 0"):
        save(tmp_path, state(7), content, keep=0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("disk full"), SaveError),
        (SaveError("rank 0: disk full"), SaveError),
        (TimeoutError("late"), RuntimeError),
        (RuntimeError("rank 0 failed"), RuntimeError),
        (WorkerLost("rank 0 died"), WorkerLost),
        (CollectiveTimeout("rank 0 failed"), CollectiveTimeout),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_failed_save_leaves_previous_checkpoint(
    tmp_path: Path, error: Exception, kind: type[Exception]
) -> None:
    save(tmp_path, state(1), content, keep=1)

    def fail(folder: Path) -> dict[str, Entry]:
        content(folder)
        raise error

    with pytest.raises(kind, match=str(error)) as raised:
        save(tmp_path, state(2), fail, keep=1)
    assert type(raised.value) is kind
    assert names(tmp_path) == ["step_000001"], "nothing half-written takes space"
    save(tmp_path, state(3), content, keep=1)
    assert names(tmp_path) == ["step_000003"]


def test_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with monkeypatch.context() as patch:
            for module, name in ((os, "mkdir"), (os, "rename"), (os, "fsync"), (io, "open")):
                patch.setattr(module, name, failing(getattr(module, name), module is io))
            try:
                save(tmp_path, state(2 + fails_at), content, keep=99)
            except SaveError:
                failures += 1
        after = finished(tmp_path)
        assert after[: len(before)] == before and len(names(tmp_path)) == len(after)
        assert not any(map(problems, after))
    assert failures > 15 and len(finished(tmp_path)) > 1


def test_damage_of_any_file_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, state(1), content, keep=1)
    assert problems(folder) == []
    for name in ("state.json", "ranks/weights", MANIFEST):
        text = (folder / name).read_text()
        (folder / name).write_text(text.swapcase())
        assert [line.partition(":")[0] for line in problems(folder)] == [name]
        (folder / name).unlink()
        assert [line.partition(":")[0] for line in problems(folder)] == [name]
        assert finished(tmp_path) == [folder], "it is listed nevertheless"
        (folder / name).write_text(text)
    assert problems(folder) == []
    folder.rename(tmp_path / "step_000002")
    (problem,) = problems(tmp_path / "step_000002")
    assert "step 1" in problem


def test_digest_covers_training_only() -> None:
    source = SourceConfig(name="s", source="reasoning_gym", task="chain_sum", size=8)
    config = Config(data=DataConfig(sources=(source,)))
    longer = replace(config, run=RunConfig(steps=5, dir="elsewhere"))
    faster = replace(config, trainer=replace(config.trainer, lr=1e-3))
    assert config_digest(longer) == config_digest(config) != config_digest(faster)


WEIGHTS = bytes(range(256)) * 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with several files, one of which has two and a half pieces."""
    monkeypatch.setattr(manifest, "PIECE", 1024)
    made = tmp_path / "made"
    (made / "ranks").mkdir(parents=True)
    (made / "ranks" / "weights").write_bytes(WEIGHTS)
    (made / "state").write_text("here")
    (made / "empty").touch()
    write_manifest(made, seal(made, ["ranks/weights"]))
    return made


@pytest.mark.parametrize("bit", [0, 8 * 1024 - 1, 8 * 1024, 8 * 2000 + 3, 8 * 2560 - 1])
def test_any_flipped_bit_is_located(folder: Path, bit: int) -> None:
    content = bytearray(WEIGHTS)
    content[bit // 8] ^= 1 << bit % 8
    (folder / "ranks" / "weights").write_bytes(content)
    (problem,) = find_damage(folder, extra=True)
    start = bit // 8 // 1024 * 1024
    assert problem.startswith("ranks/weights: ")
    assert f"{start:,} and {min(2560, start + 1024):,}" in problem
    assert find_damage(folder, extra=True, bits=False) == []


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda f: (f / "state").unlink(), "state: missing"),
        (lambda f: (f / "empty").unlink(), "empty: missing"),
        (lambda f: (f / "empty").unlink() or (f / "empty").symlink_to("gone"), "empty: missing"),
        (lambda f: (f / "ranks/weights").write_bytes(WEIGHTS[:-1]), "ranks/weights: truncated"),
        (lambda f: (f / "state").write_text("there"), "state: too long"),
        (lambda f: (f / "ranks/more").touch(), "ranks/more: extra"),
        (lambda f: (f / "state").rename(f / "fate"), "state: missing; fate: extra"),
        (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST}: No such file"),
        (lambda f: (f / MANIFEST).write_text("{}"), f"{MANIFEST}: cannot be parsed"),
        (lambda f: (f / MANIFEST).write_text("[1]"), f"{MANIFEST}: cannot be parsed"),
        (lambda f: (f / MANIFEST).write_bytes(b"\xff"), f"{MANIFEST}: cannot be parsed"),
        (
            lambda f: (f / MANIFEST).write_text(
                (f / MANIFEST).read_text().replace('"bytes": 4,', '"bytes": 5,')
            ),
            f"{MANIFEST}: changed",
        ),
    ],
)
def test_damage_is_named(folder: Path, harm: Callable[[Path], object], problem: str) -> None:
    harm(folder)
    assert problem in join_problems(find_damage(folder, extra=True))
