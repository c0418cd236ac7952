"""What a command finds in a run folder, and says."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.session import run_with_restarts, save_checkpoint

supervised = partial(
    run_with_restarts, ["sft", "recipe.yaml"], text="plan", restore=lambda _: None, position=dict
)


@pytest.mark.parametrize(("epochs", "knob"), [(2, "sft.epochs"), (0, "run.steps")])
def test_a_run_that_is_done_names_the_knob_that_makes_it_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: float, knob: str
) -> None:
    given = load_config("sft-quickstart", [f"run.dir={tmp_path}", f"sft.epochs={epochs}"])
    config = given.supervised(1)
    with RunFolder(config) as folder:
        (tmp_path / "metrics.jsonl").touch()
        folder.save(State(step=1, version=1, config=config_digest(config)), lambda _: {})
        folder.model.mkdir()

    def never(*_: Any) -> Any:
        raise AssertionError("it is done")

    run_with_restarts(
        ["sft", "recipe.yaml"],
        config,
        text="plan",
        restore=never,
        position=never,
        started=never,
        drive=never,
    )
    assert f"has done its 1 steps. Raise {knob} to go on" in capsys.readouterr().out


def test_a_run_that_resumes_says_after_which_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config("sft-quickstart", [f"run.dir={tmp_path}"]).supervised(3)

    def nothing_starts(_: RunFolder) -> Any:
        raise RuntimeError("no GPU")

    def said() -> str:
        with pytest.raises(RuntimeError, match="no GPU"):
            supervised(config, started=nothing_starts, drive=lambda *_: 0)
        return capsys.readouterr().out

    assert said() == "plan\n"
    with RunFolder(config) as folder:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        folder.save(State(step=2, version=2, config=config_digest(config)), lambda _: {})
    assert said() == "plan\nresumes after step 2; later steps will be repeated\n"


def test_checkpoints_know_the_tokenizer(tmp_path: Path) -> None:
    config = load_config("sft-quickstart", [f"run.dir={tmp_path}"]).supervised(3)
    learner: Any = SimpleNamespace(version=1, save=lambda _: {}, load=lambda _: None)

    def drive(_: Any, folder: RunFolder, *__: Any) -> int:
        save_checkpoint(folder, config, learner, 1, {}, stop=lambda: False, say=print)
        return 1

    system = SimpleNamespace(learner=learner)
    supervised(config, started=lambda _: nullcontext(system), drive=drive, tokenizer="digest")
    state = RunFolder(config).state()
    assert state is not None and state.tokenizer == "digest"
