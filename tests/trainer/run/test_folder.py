"""A run folder belongs to one config and one process."""

from __future__ import annotations

import errno
import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, DataConfig, RunConfig, SourceConfig
from keel.trainer.run.checkpoint import State, config_digest, layout_of
from keel.trainer.run.folder import RunFolder, check_recipe
from keel.trainer.run.manifest import MANIFEST, Entry, check_exported, write_manifest


def config(folder: Path) -> Config:
    source = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
    return Config(run=RunConfig(dir=str(folder)), data=DataConfig(sources=(source,)))


def weights(folder: Path) -> dict[str, Entry]:
    (folder / "weights").write_text("w")
    return {}


def empty(folder: Path) -> dict[str, Entry]:
    folder.mkdir()
    return {}


def checkpoint(folder: RunFolder, config: Config, step: int) -> None:
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}}}\n')
    state = State(step=step, version=step, cursor={}, config=config_digest(config))
    folder.save(state, weights)


def test_the_resolved_config_is_kept_and_read_back(tmp_path: Path) -> None:
    made = config(tmp_path / "run")
    with RunFolder(made) as folder:
        assert folder.state() is None
        assert load_config(folder.path / "config.yaml") == made


def test_the_newest_checkpoint_is_continued(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        for step in (1, 2, 3):
            checkpoint(folder, made, step)
    longer = replace(made, run=replace(made.run, steps=made.run.steps + 1))
    with RunFolder(longer) as folder:
        state = folder.state()
        assert state is not None and state.step == 3
        assert folder.standing() == "holds a run, which goes on from step 3 of 101"
        assert folder.latest is not None and (folder.latest / "weights").read_text() == "w"
    short = replace(made, run=replace(made.run, steps=3))
    assert "has done its 3 steps; raise run.steps" in RunFolder(short).standing()


def test_the_recipe_of_a_run_that_was_moved_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made, there = config(Path("runs/one")), Path("runs/two")
    with RunFolder(made):
        pass
    check_recipe("runs/one/config.yaml", [], made)
    check_recipe("my/config.yaml", [], made)
    Path("runs/one").rename(there)
    with pytest.raises(ConfigError, match=r"of the run in runs/two, and .* run.dir=runs/two;"):
        check_recipe("runs/two/config.yaml", ["run.steps=9"], made)
    for said in ("run.dir=runs/three", "run={dir: runs/three, steps: 9}"):
        check_recipe("runs/two/config.yaml", [said], made)
    Path("mine/checkpoints").mkdir(parents=True)
    check_recipe("mine/config.yaml", [], made)  # a project's own


def test_a_full_disk_is_said_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("keel.trainer.run.folder.os.write", full)
    with (
        pytest.raises(ConfigError, match=r"run\.dir = .*/run: cannot be written \(No space left"),
        RunFolder(config(tmp_path / "run")),
    ):
        pass


def test_a_model_is_exported_whole_or_not_at_all(tmp_path: Path) -> None:
    def fails(folder: Path) -> dict[str, Entry]:
        folder.mkdir()
        (folder / "config.json").touch()
        raise OSError("no space left")

    def writes(folder: Path) -> dict[str, Entry]:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return {}

    with RunFolder(config(tmp_path)) as folder:
        with pytest.raises(OSError, match=r"/model: the model cannot be written \(no space"):
            folder.export(fails)
        assert not folder.model.exists() and not (folder.path / ".model").exists()
        folder.export(writes)
        assert sorted(path.name for path in folder.model.iterdir()) == ["config.json", MANIFEST]
        folder.check_model()
        (folder.model / "README.md").touch()
        folder.check_model()
        (folder.model / "config.json").write_text("[]")
        with pytest.raises(
            ConfigError,
            match=r"config\.json: changed.*; move that folder away and start the run as",
        ):
            folder.check_model()
        (folder.model / MANIFEST).unlink()
        check_exported(folder.model, "nothing to compare with")


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "add", "no manifest", "no state"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, harm: str
) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        for step in (1, 2):
            checkpoint(folder, made, step)
        folder.export(empty)
    newest = tmp_path / "checkpoints" / "step_000002"
    names = {"add": "more", "no manifest": MANIFEST, "no state": "state.json"}
    victim = newest / names.get(harm, "weights")
    if harm in ("flip", "truncate", "add"):
        victim.write_text({"flip": "v", "truncate": "", "add": ""}[harm])
    else:
        victim.unlink()

    looking = RunFolder(made)  # `keel check` and `keel eval` change nothing
    looking.check()
    said = "\n".join(looking.words())
    assert f"{newest} is damaged ({victim.name}: " in said
    assert "resumes from step_000001, the newest intact" in said
    assert newest.is_dir()

    with RunFolder(made) as folder:
        state, (named, resumed) = folder.state(), folder.words()
        assert state is not None and state.step == 1
        assert f"{newest} is damaged ({victim.name}: " in named and "damaged_step_000002" in named
        assert "the newest intact checkpoint" in resumed
        folder.begin(1)
        assert (tmp_path / "model_2").is_dir(), "the model is that of step 2"
        checkpoint(folder, made, 2)
    kept = newest.with_name("damaged_step_000002")
    assert kept.is_dir() and newest.is_dir()
    with RunFolder(made) as folder:
        state = folder.state()
        assert state is not None and state.step == 2 and folder.words() == []


def test_another_layout_is_said(tmp_path: Path) -> None:
    def writes(folder: Path) -> dict[str, Entry]:
        (folder / "trainer.json").write_text(json.dumps({"steps": 1, **layout_of(made)}))
        return {}

    made = config(tmp_path)
    engines = replace(made, rollout=replace(made.rollout, engines=3))
    ranks = replace(engines, trainer=replace(made.trainer, ranks=4, expert_parallel=2))
    with RunFolder(made) as folder:
        folder.save(State(step=1, version=1, cursor={}, config="c"), writes)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        assert folder.words() == []
    with RunFolder(engines) as folder:
        assert folder.words() == [
            "step_000001 was saved with rollout.engines = 1; this run has rollout.engines = 3"
        ]
    with RunFolder(ranks) as folder:
        (line,) = folder.words()
    assert "saved with trainer.ranks = 1, trainer.expert_parallel = 1, rollout.en" in line
    assert "has trainer.ranks = 4, trainer.expert_parallel = 2, rollout.engines = 3" in line
    assert line.endswith("re-sharded, and numbers are added up in another order")


def test_a_checkpoint_with_pickles_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        folder.save(State(step=1, version=1, cursor={}, config="c"), lambda _: {})
    saved = tmp_path / "checkpoints" / "step_000001"
    (saved / "deepspeed").mkdir()
    (saved / MANIFEST).unlink()
    write_manifest(saved, {})  # whoever plants a payload can write a manifest, too
    with pytest.raises(ConfigError, match=r"deepspeed/: pickles .*are not read"):
        RunFolder(made).check()
    with pytest.raises(ConfigError, match=r"deepspeed/: pickles .*are not read"):
        RunFolder(made).chosen("eval.checkpoint", "1")


def test_what_is_damaged_twice_is_kept_twice(tmp_path: Path) -> None:
    made = config(tmp_path)
    for _ in range(2):
        with RunFolder(made) as folder:
            if folder.latest is None:
                checkpoint(folder, made, 1)
            checkpoint(folder, made, 2)
        (tmp_path / "checkpoints" / "step_000002" / "weights").unlink()
    with RunFolder(made):
        pass
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "damaged_step_000002",
        "damaged_step_000002_2",
        "step_000001",
    ]


def test_a_run_does_not_start_over_beside_damaged_checkpoints(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        for step in (1, 2):
            checkpoint(folder, made, step)
    before = sorted(tmp_path.rglob("*"))
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step_{step:06d}" / "weights").write_text("v")
    said = r"is damaged:\n  step_000002: weights: changed.*\n  step_000001: weights: changed"
    with pytest.raises(ConfigError, match=said):
        RunFolder(made).check()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"move .*checkpoints away"):
            RunFolder(made).__enter__()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_goes_on_keeps_the_model_of_its_earlier_end(tmp_path: Path) -> None:
    with RunFolder(config(tmp_path)) as folder:
        folder.begin(0)
        folder.export(empty)
        folder.begin(60)
        assert not folder.model.exists() and (tmp_path / "model_60").exists()
        folder.export(empty)
        assert folder.model.exists()


def test_another_config_is_refused_only_when_something_would_be_lost(tmp_path: Path) -> None:
    made = config(tmp_path)
    other = replace(made, trainer=replace(made.trainer, grad_clip=9.0))
    with RunFolder(made):
        pass
    with RunFolder(other) as folder:  # no checkpoint yet: nothing to mix up
        checkpoint(folder, other, 1)
    with pytest.raises(ConfigError, match=r"another config:\n  trainer.grad_clip: 9.0 → "):
        RunFolder(made).__enter__()
    never = replace(other, run=replace(other.run, resume="never"))
    with pytest.raises(ConfigError, match=r"holds step_000001, and run\.resume is never"):
        RunFolder(never).__enter__()


def test_a_changed_learning_rate_is_named_with_its_first_step(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 4)
    slower = replace(made, trainer=replace(made.trainer, lr=1e-9))
    with RunFolder(slower) as folder:
        assert f"from step 5 on: trainer.lr {made.trainer.lr} → 1e-09" in folder.words()
    with RunFolder(slower) as folder:
        assert not [line for line in folder.words() if "trainer.lr" in line]


def test_without_its_config_a_folder_is_known_by_its_checkpoint(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1)
    (tmp_path / "config.yaml").unlink()
    RunFolder(replace(made, run=replace(made.run, steps=7))).check()
    other = replace(made, trainer=replace(made.trainer, lr=1.0))
    with pytest.raises(ConfigError, match=r"holds step_000001 of a run with another config"):
        RunFolder(other).check()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made), pytest.raises(ConfigError, match="another process is running there"):
        RunFolder(made).__enter__()
    with RunFolder(made):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run.dir = .*file/run: cannot be written"):
        RunFolder(config(tmp_path / "file" / "run")).__enter__()


def test_a_file_in_its_place_is_named_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    folder = RunFolder(config(path))
    with pytest.raises(ConfigError, match="is a file; choose another folder"):
        folder.check()


def test_rays_copy_of_a_jobs_folder_is_no_place_for_a_run(tmp_path: Path) -> None:
    """Where `ray job submit --working-dir .` runs a recipe whose `run.dir` is relative."""
    inside = tmp_path / "working_dir_files" / "_ray_pkg_892ed6d3" / "runs"
    with pytest.raises(ConfigError, match=r"copy of --working-dir.*run.dir=\$PWD/runs/NAME"):
        RunFolder(config(inside)).check()


def test_evaluations_are_read_from_the_metrics(tmp_path: Path) -> None:
    with RunFolder(config(tmp_path)) as folder:
        lines = ['{"step": 0, "eval/sums/pass@1": 0.25}', '{"step": 1, "loss": 0.1}']
        lines.append('{"step": 2, "eval/sums/pass@1": 0.75}')
        (folder.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert folder.evaluations() == {"sums/pass@1": [(0, 0.25), (2, 0.75)]}


def test_what_a_run_without_a_checkpoint_wrote_is_kept(tmp_path: Path) -> None:
    made = config(tmp_path)
    for number in (1, 2):
        with RunFolder(made) as folder:
            assert folder.set_aside == (tmp_path / "before_1" if number == 2 else None)
            (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
            (tmp_path / "trajectories").mkdir()
            (tmp_path / "trajectories" / "step_000001.txt").write_text("?")
            (tmp_path / "nonfinite").mkdir()
    with RunFolder(made) as folder:
        assert folder.set_aside == tmp_path / "before_2"
        assert not (tmp_path / "metrics.jsonl").exists()
        for number in (1, 2):
            aside = tmp_path / f"before_{number}"
            assert (aside / "metrics.jsonl").read_text() == f'{{"step": {number}}}\n'
            assert (aside / "trajectories" / "step_000001.txt").exists()
            assert (aside / "nonfinite").is_dir()
            assert load_config(aside / "config.yaml") == made
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        checkpoint(folder, made, 1)
    with RunFolder(made) as folder:  # goes on
        assert folder.set_aside is None and (tmp_path / "metrics.jsonl").exists()


def test_metrics_that_cannot_be_read_are_named_before_anything_starts(tmp_path: Path) -> None:
    made = config(tmp_path)
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1)
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:1: not an object with"):
        RunFolder(made).check()


def test_on_a_full_disk_the_config_stays_as_it_was(tmp_path: Path) -> None:
    made = config(tmp_path / "run")
    with RunFolder(made) as folder:
        checkpoint(folder, made, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # bytes; a config has thousands
    try:
        with pytest.raises(ConfigError, match="run: cannot be written"), RunFolder(made):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with RunFolder(made) as folder:
        assert load_config(folder.path / "config.yaml") == made
