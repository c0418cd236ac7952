"""`keel new`: recipes from flags and questions."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keel.commands import new as module
from keel.commands.cli import main, parser
from keel.commands.new import new, scalar
from keel.configs.load import load_config
from keel.configs.schema import Config

HARDWARE = (
    *("colocated", "ranks", "gpu_memory_utilization", "time_share"),
    *("zero_stage", "compile"),
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with prompts of three kinds, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i} + {i}?", "answer": f"Twice.\n#### {2 * i}"} for i in range(300)]
    for name, kept in {
        "school.jsonl": rows,
        "open.jsonl": [{"prompt": "Write a poem."}] * 8,
        "shop.jsonl": [{"prompt": "Buy.", "environment": {"shelf": 1}}] * 8,
    }.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in kept))
    monkeypatch.setattr(module, "gpus_here", lambda: (0, 0.0))
    yield tmp_path


def written(*flags: str) -> Config:
    checked: list[str] = []

    def check(path: str) -> int:
        checked.append(path)
        return 0

    assert new(parser().parse_args(["new", *flags]), check) == 0
    (path,) = checked
    text = Path(path).read_text()
    assert not any(knob in text for knob in HARDWARE)
    assert 15 <= len(text.splitlines()) <= 36
    return load_config(path)


def test_flags_make_a_recipe() -> None:
    config = written("--model", "a/b", "--data", "school.jsonl", "--gpus", "2", "--gpu-gib", "80")
    (source,) = config.data.sources
    assert (source.name, source.path, source.holdout) == ("school", "school.jsonl", 30)
    assert (source.columns, source.answer_after) == ({"prompt": "question"}, "####")
    assert (source.template, source.thinking, source.rewards) == ("boxed", False, {"correct": 1})
    assert (config.run.gpus_per_node, config.run.gpu_gib, config.model.path) == (2, 80, "a/b")
    assert config.trainer.lr == 1e-6 and config.rollout.sampling.max_tokens == 1024
    flags = ("--model", "a/b", "--gpus", "0", "--reward", "my_rewards.brief")
    (source,) = written("--data", "school.jsonl", *flags, "own.yaml").data.sources
    assert source.rewards == {"correct": 1, "my_rewards.brief": 0.2}


REFUSED = {
    "--model a/b --gpus 0": "--data is missing",
    "--model a/b --gpus 0 --data open.jsonl": "no column looks like an answer; it has prompt",
    "--model a/b --gpus 0 --data shop.jsonl": "has a column `environment`",
    "--model ./nope --gpus 0 --data school.jsonl": "'./nope' does not exist",
    "--model tiny --data school.jsonl": "--data school.jsonl: the tiny model",
    "nowhere/x.yaml --gpus 0 --task chain_sum": "no such folder as nowhere",
    "school.jsonl --gpus 0": "school.jsonl: exists already",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refusal_writes_nothing(flags: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_text() for path in here.iterdir()}
    assert main(["new", "--yes", *flags.split()]) == 2
    output = capsys.readouterr()
    assert REFUSED[flags] in output.err and output.err.startswith("keel new: ") and not output.out
    assert {path: path.read_text() for path in here.iterdir()} == before


def test_terminal_is_asked_for_missing_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter(["4", "open.jsonl", "", "y", "", "70", "its.yaml"])
    monkeypatch.setattr("builtins.input", lambda _: next(replies))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    config = written("--model", "a/b")
    assert next(replies, "") == "" and Path("its.yaml").exists()
    assert (config.run.gpus_per_node, config.run.gpu_gib) == (4, 80)
    assert config.data.sources[0].rewards == {"my_rewards.reward": 1}
    assert (config.rollout.sampling.max_tokens, config.run.steps) == (4096, 70)


def test_evaluation_file_never_trains() -> None:
    Path("test.jsonl").write_text(Path("school.jsonl").read_text().replace(" + ", " - "))
    flags = ("--model", "a/b", "--data", "school.jsonl", "--eval", "test.jsonl")
    train, test = written(*flags, "--gpus", "8").data.sources
    assert train.holdout == 0 and (test.name, test.holdout, test.size) == ("test", "all", 0)
    for knob in ("template", "columns", "rewards"):
        assert getattr(test, knob) == getattr(train, knob)


def test_defaults_pass_the_check(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("--yes", "--gpus", "0", "plain.yaml")
    shown = capsys.readouterr().out
    assert (here / "plain.yaml").read_text() in shown
    few = [f"data.sources[spell_backward].{knob}" for knob in ("size=200", "holdout=16")]
    assert main(["check", "plain.yaml", *few]) == 0
    assert "tiny: 407,680 parameters" in capsys.readouterr().out


def test_texts_survive_yaml() -> None:
    for text in ("a b", "1e-6", "yes", "null", "~", "C:\\x", "${run.seed}", "####", 'a"b', "é"):
        path = Path("one.yaml")
        path.write_text(f"defaults: quickstart\nmodel: {{path: {scalar(text)}}}\n")
        assert load_config(path).model.path == text
    assert scalar("/models/Qwen3-4B") == "/models/Qwen3-4B"
