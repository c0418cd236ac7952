"""Checkpoints are atomic and verified; a run folder belongs to one config, model and process."""

import errno
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, DataConfig, RunConfig, SourceConfig
from keel.trainer.run import manifest
from keel.trainer.run.checkpoint import (
    SaveError,
    State,
    config_digest,
    find_problems,
    list_finished,
)
from keel.trainer.run.checkpoint import (
    save as save_state,
)
from keel.trainer.run.errors import CollectiveTimeout, WorkerLost
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.manifest import (
    MANIFEST,
    Entry,
    check_exported,
    find_damage,
    join_problems,
    seal,
    write_manifest,
)


def config(folder: Path) -> Config:
    source = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
    return Config(run=RunConfig(dir=str(folder)), data=DataConfig(sources=(source,)))


def weights(folder: Path) -> dict[str, Entry]:
    (folder / "weights").write_text("w")
    return {}


def written(folder: Path) -> dict[str, Entry]:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return {}


def save(folder: RunFolder, config: Config, step: int, **fields: Any) -> Path:
    state = State(step=step, version=step, config=config_digest(config), **fields)
    return folder.save(state, weights)


def checkpoint(folder: RunFolder, config: Config, *steps: int) -> None:
    for step in steps:
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        save(folder, config, step)


def test_newest_checkpoint_is_continued(tmp_path: Path) -> None:
    made = config(tmp_path / "run")
    with RunFolder(made) as folder:
        assert folder.state() is None
        assert load_config(folder.path / "config.yaml") == made
        checkpoint(folder, made, 1, 2, 3)
    longer = replace(made, run=replace(made.run, steps=made.run.steps + 1))
    with RunFolder(longer) as folder:
        state = folder.state()
        assert state is not None and state.step == 3
        assert "step 3 of 101" in folder.status()
        assert folder.latest is not None and (folder.latest / "weights").read_text() == "w"
    done = replace(made, run=replace(made.run, steps=3))
    assert "run.steps" in RunFolder(done).status()


def test_model_export_is_atomic(tmp_path: Path) -> None:
    def fails(folder: Path) -> dict[str, Entry]:
        folder.mkdir()
        (folder / "config.json").touch()
        raise OSError("no space left")

    with RunFolder(config(tmp_path)) as folder:
        with pytest.raises(OSError, match="/model"):
            folder.export(fails)
        assert not folder.model.exists() and not (folder.path / ".model").exists()
        folder.export(written)
        assert sorted(path.name for path in folder.model.iterdir()) == ["config.json", MANIFEST]
        (folder.model / "README.md").touch()
        check_exported(folder.model, "")
        (folder.model / "config.json").write_text("[]")
        with pytest.raises(ConfigError, match=r"config\.json"):
            check_exported(folder.model, "")
        (folder.model / MANIFEST).unlink()
        check_exported(folder.model, "there is nothing to compare with")
        folder.begin(60)
        assert not folder.model.exists() and (tmp_path / "model_60").exists()


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "add", "no manifest", "no state"])
def test_damaged_checkpoint_is_set_aside(tmp_path: Path, harm: str) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1, 2)
        folder.export(written)
    newest = tmp_path / "checkpoints" / "step_000002"
    victims = {"add": "more", "no manifest": MANIFEST, "no state": "state.json"}
    victim = newest / victims.get(harm, "weights")
    if harm in ("flip", "truncate", "add"):
        victim.write_text({"flip": "v", "truncate": "", "add": ""}[harm])
    else:
        victim.unlink()

    reader = RunFolder(made)  # `keel check` and `keel eval` change nothing
    reader.check()
    text = "\n".join(reader.warnings())
    assert f"{newest} is damaged ({victim.name}: " in text and "step_000001" in text
    assert newest.is_dir()

    with RunFolder(made) as folder:
        state = folder.state()
        assert state is not None and state.step == 1 and len(folder.warnings()) == 1
        folder.begin(1)
        assert (tmp_path / "model_2").is_dir()
        checkpoint(folder, made, 2)
    assert newest.with_name("damaged_step_000002").is_dir() and newest.is_dir()
    with RunFolder(made) as folder:
        state = folder.state()
        assert state is not None and state.step == 2 and folder.warnings() == []


def test_run_does_not_restart_over_damaged_checkpoints(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1, 2)
    before = sorted(tmp_path.rglob("*"))
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step_{step:06d}" / "weights").write_text("v")
    with pytest.raises(ConfigError, match=r"step_000002: weights.*\n.*step_000001: weights"):
        RunFolder(made).check()
    for _ in range(2):
        with pytest.raises(ConfigError, match="checkpoints"):
            RunFolder(made).__enter__()
    assert sorted(tmp_path.rglob("*")) == before


def test_another_config_is_refused_with_a_checkpoint(tmp_path: Path) -> None:
    made = config(tmp_path)
    other = replace(made, trainer=replace(made.trainer, grad_clip=9.0))
    with RunFolder(made):
        pass
    with RunFolder(other) as folder:  # no checkpoint yet
        checkpoint(folder, other, 1)
    with pytest.raises(ConfigError, match=r"trainer\.grad_clip"):
        RunFolder(made).__enter__()
    never = replace(other, run=replace(other.run, resume="never"))
    with pytest.raises(ConfigError, match=r"run\.resume"):
        RunFolder(never).__enter__()
    (tmp_path / "config.yaml").unlink()
    RunFolder(replace(other, run=replace(other.run, steps=7))).check()
    with pytest.raises(ConfigError, match="step_000001"):
        RunFolder(made).check()


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made), pytest.raises(ConfigError, match=r"run\.dir"):
        RunFolder(made).__enter__()
    with RunFolder(made):
        pass


def test_run_without_checkpoint_is_set_aside(tmp_path: Path) -> None:
    made = config(tmp_path)
    for number in (1, 2):
        with RunFolder(made) as folder:
            assert folder.set_aside == (tmp_path / "before_1" if number == 2 else None)
            (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
            (tmp_path / "trajectories").mkdir()
            (tmp_path / "nonfinite").mkdir()
    with RunFolder(made) as folder:
        assert folder.set_aside == tmp_path / "before_2"
        assert not (tmp_path / "metrics.jsonl").exists()
        for number in (1, 2):
            aside = tmp_path / f"before_{number}"
            assert (aside / "metrics.jsonl").read_text() == f'{{"step": {number}}}\n'
            assert (aside / "trajectories").is_dir() and (aside / "nonfinite").is_dir()
            assert load_config(aside / "config.yaml") == made
        checkpoint(folder, made, 1)
    with RunFolder(made) as folder:
        assert folder.set_aside is None and (tmp_path / "metrics.jsonl").exists()


def test_run_continues_with_its_initial_model_only(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"before")
    made = load_config("quickstart", [f"run.dir={tmp_path / 'run'}"])
    made = replace(made, model=replace(made.model, path=str(base)))
    with RunFolder(made, "digest") as folder:
        (base / "model.safetensors").write_bytes(b"behind")  # changed while the run is active
        save(folder, made, 1, model=folder.base, tokenizer="other")
    with pytest.raises(ConfigError, match="other weights"):
        RunFolder(made).check()
    evaluation = RunFolder(made, "digest")
    evaluation.check(("data.",))
    weights, tokenizer, *_ = evaluation.warnings()
    assert "other weights" in weights and "tokenizer" in tokenizer
    (base / "model.safetensors").write_bytes(b"before")
    RunFolder(made, "other").check()


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
        save_state(tmp_path, state(step), content, keep=2)
    assert [path.name for path in list_finished(tmp_path)] == ["step_999999", "step_1000000"]
    assert names(tmp_path) == ["step_000005", "step_1000000", "step_999999", "step_best"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("disk full"), SaveError),
        (TimeoutError("late"), TimeoutError),
        (WorkerLost("rank 0 died"), WorkerLost),
        (CollectiveTimeout("rank 0 failed"), CollectiveTimeout),
    ],
)
def test_failed_save_leaves_previous_checkpoint(
    tmp_path: Path, error: Exception, kind: type[Exception]
) -> None:
    save_state(tmp_path, state(1), content, keep=1)

    def fail(folder: Path) -> dict[str, Entry]:
        content(folder)
        raise error

    with pytest.raises(kind, match=str(error)) as raised:
        save_state(tmp_path, state(2), fail, keep=1)
    assert type(raised.value) is kind
    assert names(tmp_path) == ["step_000001"], "nothing half-written takes space"
    save_state(tmp_path, state(3), content, keep=1)
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

    save_state(tmp_path, state(1), content, keep=99)
    failures = 0
    while calls > fails_at:
        calls, fails_at, before = 0, fails_at + 1, list_finished(tmp_path)
        with monkeypatch.context() as patch:
            for module, name in ((os, "mkdir"), (os, "rename"), (os, "fsync"), (io, "open")):
                patch.setattr(module, name, failing(getattr(module, name), module is io))
            try:
                save_state(tmp_path, state(2 + fails_at), content, keep=99)
            except SaveError:
                failures += 1
        after = list_finished(tmp_path)
        assert after[: len(before)] == before and len(names(tmp_path)) == len(after)
        assert not any(map(find_problems, after))
    assert failures > 15 and len(list_finished(tmp_path)) > 1


WEIGHTS = bytes(range(256)) * 10


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with several files, one of which has two and a half pieces."""
    monkeypatch.setattr(manifest, "_PIECE", 1024)
    made = tmp_path / "made"
    (made / "ranks").mkdir(parents=True)
    (made / "ranks" / "weights").write_bytes(WEIGHTS)
    (made / "state").write_text("here")
    (made / "empty").touch()
    write_manifest(made, seal(made, ["ranks/weights"]))
    return made


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("bit", [0, 8 * 1024 - 1, 8 * 1024, 8 * 2000 + 3, 8 * 2560 - 1])
def test_any_flipped_bit_is_located(sealed: Path, bit: int) -> None:
    content = bytearray(WEIGHTS)
    content[bit // 8] ^= 1 << bit % 8
    (sealed / "ranks" / "weights").write_bytes(content)
    (problem,) = find_damage(sealed, extra=True)
    start = bit // 8 // 1024 * 1024
    assert problem.startswith("ranks/weights: ")
    assert f"{start:,} and {min(2560, start + 1024):,}" in problem
    assert find_damage(sealed, extra=True, bits=False) == []


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda f: edit(f / MANIFEST, '"bytes": 4,', '"bytes": 5,'), f"{MANIFEST}: changed"),
        (lambda f: (f / "state").unlink(), "state: missing"),
        (lambda f: (f / "empty").unlink() or (f / "empty").symlink_to("gone"), "empty: missing"),
        (lambda f: (f / "ranks/weights").write_bytes(WEIGHTS[:-1]), "ranks/weights: truncated"),
        (lambda f: (f / "state").write_text("there"), "state: too long"),
        (lambda f: (f / "ranks/more").touch(), "ranks/more: extra"),
        (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST}: No such file"),
        (lambda f: (f / MANIFEST).write_bytes(b"\xff"), f"{MANIFEST}: cannot be parsed"),
    ],
)
def test_damage_is_named(sealed: Path, harm: Callable[[Path], object], problem: str) -> None:
    harm(sealed)
    assert problem in join_problems(find_damage(sealed, extra=True))
