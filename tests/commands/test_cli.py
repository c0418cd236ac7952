"""The command line and its early checks, and `keel doctor`."""

from pathlib import Path

import pytest

from keel.commands import doctor
from keel.commands.cli import main
from keel.commands.doctor import _check_step_metrics
from keel.commands.preflight import _MAX_QUICK_BYTES, check_quickly, check_resume
from keel.configs.dump import dump_config
from keel.configs.load import load_config, load_recipe
from keel.configs.schema import ConfigError


def test_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("keel.commands.cli.find_spec", lambda n: None if n == "ray" else n)
    for command in (["train", "quickstart"], ["check", "quickstart"], ["judge", "answers.jsonl"]):
        assert main(command) == 2
        assert capsys.readouterr().err.startswith("keel: ray not installed")


def test_mistyped_command_lines_get_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    for line, hint in (
        ("check q --trainer.lr=3", "trainer.lr=3"),
        ("check q --trainer.lr 3", "trainer.lr=3"),
        ("report --foo a", "--foo"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        assert ended.value.code == 2 and hint in capsys.readouterr().err


def test_mismatch_of_engine_and_trainer() -> None:
    zeros = ("routing/fallback_fraction", "rollout/dropped_completions")
    well = {"mismatch/logp_abs": 1e-7, **dict.fromkeys(zeros, 0.0)}
    assert _check_step_metrics(well, 30.0)[0] == "ok"
    assert all(_check_step_metrics({**well, name: 1.0}, 30.0)[0] == "WRONG" for name in well)


@pytest.mark.e2e
def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    *looks, _ = doctor._CHECKS  # other tests run steps
    monkeypatch.setattr(doctor, "_CHECKS", looks)
    status = main(["doctor"])
    output = capsys.readouterr()
    assert status == 0, output.out + output.err
    looked = {line.split()[0] for line in output.out.splitlines()}
    assert {look.__name__[1:] for look in looks} <= looked


def said(folder: Path, *overrides: str, recipe: str = "quickstart", command: str = "check") -> str:
    try:
        check_quickly(load_config(recipe, [f"run.dir={folder / 'run'}", *overrides]), command)
    except ConfigError as error:
        return str(error)
    return ""


def source(path: str, more: str = "columns: {prompt: question}", kind: str = "file") -> str:
    return f"data.sources=[{{name: s, source: {kind}, path: {path}, {more}}}]"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("keel.model.hub.hub_answers", lambda: False)


def test_files_must_exist_and_small_ones_parse(tmp_path: Path) -> None:
    table = tmp_path / "sums.csv"
    table.write_text("question,answer\nWhat is 1 + 1?,2\n")
    assert said(tmp_path, source("sums.csv")) == ""
    assert "no such file" in said(tmp_path, source("sumz.csv"))
    wrong = said(tmp_path, source("sums.csv", "columns: {prompt: qestion}"))
    assert "columns.prompt = 'qestion'" in wrong and "has question, answer" in wrong
    folder = tmp_path / "gsm"
    folder.mkdir()
    assert "no file of a known kind" in said(tmp_path, source("gsm"))
    (folder / "train.csv").write_text("question,answer\nWhat is 1 + 1?,\n")
    assert "train.csv:2" in said(tmp_path, source("gsm"))
    (folder / "test.csv").write_bytes(b" " * (_MAX_QUICK_BYTES + 1))
    assert said(tmp_path, source("gsm")) == ""  # deferred, because it is slow


def test_pretraining_takes_texts_only(tmp_path: Path) -> None:
    message = said(tmp_path, recipe="sft-quickstart", command="pretrain")
    assert "sft.sources: spelling, spiral" in message
    assert said(tmp_path, recipe="sft-quickstart", command="sft") == ""


def test_missing_local_model_is_not_a_hub_name(tmp_path: Path) -> None:
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    assert "models/qwen4" in said(tmp_path, "model.path=models/qwen4")
    assert said(tmp_path, "model.path=Qwen/Qwen3-0.6B") == ""  # deferred, because it needs the hub
    (tmp_path / "weights").write_text("")
    assert "is a file" in said(tmp_path, "model.path=weights")


def test_incompatible_resume_is_refused_early(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    run_dir = f"run.dir={run}"
    # Resolved for the CPU of the first start.
    saved = dump_config(load_config("quickstart", [run_dir, "model.dtype=float16"]))
    (run / "config.yaml").write_text(saved)
    quickstart = [run_dir, "model.dtype=auto"]
    check_resume(*load_recipe("quickstart", quickstart))
    check_resume(*load_recipe("quickstart", [*quickstart, "trainer.lr=1e-9"]))
    with pytest.raises(ConfigError, match=r"algorithm\.group_size: 8 → 4"):
        check_resume(*load_recipe("quickstart", [*quickstart, "algorithm.group_size=4"]))
    other = [f"run.dir={tmp_path / 'new'}", "algorithm.group_size=4"]
    check_resume(*load_recipe("quickstart", other))
    # Refused later, because it has no prompts.
    check_resume(*load_recipe("sft-quickstart", [run_dir, "data.sources=[]"]))


def test_missing_reward_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("raise SystemExit('is not imported yet')\n")

    def weighed(part: str) -> str:
        return said(tmp_path, f"data.sources[spiral].rewards={{{part}: 1}}")

    assert "my_reward" in weighed("my_reward.brief")
    assert weighed("my_rewards.brief") == weighed("random.random") == ""
    assert "MODULE.FUNCTION" in weighed("'./my_rewards.py:brief'")
