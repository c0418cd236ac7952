"""`keel new` makes recipes, and `keel knobs` and the generated pages explain them."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keel.commands import new as module
from keel.commands.cli import main, parser
from keel.commands.new import new
from keel.commands.reference import _all_knobs, _normalize_name, describe, sections
from keel.commands.synthesize import _task_settings
from keel.configs.diff import RESUMABLE_KNOBS, flatten_config
from keel.configs.dump import as_override
from keel.configs.load import load_config
from keel.configs.schema import Config
from keel.configs.synthesis import AuthorConfig, SynthesisConfig, affects_tasks

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
    monkeypatch.setattr(module, "_count_gpus", lambda: 0)
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
    "--model a/b --gpus 0 --data open.jsonl": "no column looks like an answer; it has the columns",
    "--model a/b --gpus 0 --data shop.jsonl": "has a column `environment`",
    "--model ./nope --gpus 0 --data school.jsonl": "'./nope' does not exist",
    "--model tiny --data school.jsonl": "--data school.jsonl: the tiny model",
    "nowhere/x.yaml --gpus 0 --task chain_sum": "no such folder as nowhere",
    "school.jsonl --gpus 0": "school.jsonl: exists already",
}


def test_refusal_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_text() for path in here.iterdir()}
    for flags, reason in REFUSED.items():
        assert main(["new", "--yes", *flags.split()]) == 2
        assert reason in capsys.readouterr().err
        assert {path: path.read_text() for path in here.iterdir()} == before


def test_terminal_is_asked_for_missing_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter(["4", "school.jsonl", "y"])
    monkeypatch.setattr("builtins.input", lambda _: next(replies))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    config = written("--model", "a/b", "--steps", "70")
    assert next(replies, "") == "" and Path("school.yaml").exists()
    assert (config.run.gpus_per_node, config.run.gpu_gib) == (4, 80)
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
    plain = ["a b", "1e-6", "-.5", "yes", "null", "~", "C:\\x", "${run.seed}", "####", 'a"b', "é"]
    for text in (*plain, "a: b, [c", "a\nb", "\x85", "\udc80"):
        config = load_config("quickstart", [f"model.path={as_override(text)}"])
        assert config.model.path == text
    assert as_override("/models/Qwen3-4B") == "/models/Qwen3-4B"


KNOBS = {knob.name: knob for knob in _all_knobs()}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("trainer.lr", ["trainer.lr\n", "1e-6", "may change"]),
        ("lr", ["trainer.lr\n", "model.tiny.cold_start.lr\n", "lr (metric)\n"]),
        ("data.sources[sums].size", ["data.sources[].size\n", "≥ 0 and ≤ 10,000,000"]),
        ("algorithm.mask_delta", ["float | null", "docs/stability.md"]),
        ("trainer", ["  lr: 1e-6 ", "  zero_stage: auto "]),
        ("select.least", ["distill.select.least", "stages that have not run"]),
        ("mismatch/logp_abs", ["nats per token", "alarms.mismatch", "docs/stability.md"]),
        ("eval/sums/pass@1", ["eval/<set>/pass@1 (metric)"]),
        ("", ["  rollout.sampling ", "  distill.select ", "reward/mean"]),
    ],
)
def test_names_are_described(name: str, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = describe(name)
    assert [part for part in parts if part not in text] == []
    assert max(map(len, text.splitlines())) <= 100


def test_every_knob_of_a_recipe_is_described() -> None:
    assert [knob.name for knob in _all_knobs() if not knob.text] == []
    assert [section.name for section in sections() if not section.text] == []
    assert len(KNOBS) == len(_all_knobs()) and all(_normalize_name(name) == name for name in KNOBS)
    recipes = [load_config(name) for name in ("quickstart", "sft-distilled", "mixed-agents")]
    paths = {_normalize_name(knob) for recipe in recipes for knob in flatten_config(recipe)}
    lists = {section.path.removesuffix("[]") for section in sections()}
    mappings = tuple(f"{name}." for name, knob in KNOBS.items() if knob.kind.startswith("dict"))
    missing = paths - lists - KNOBS.keys()
    assert [path for path in missing if not path.startswith(mappings)] == []
    assert {"distill.select.least", "synthesize.general.attempts"} <= KNOBS.keys()


def test_resume_column_matches_the_checks() -> None:
    assert KNOBS.keys() >= RESUMABLE_KNOBS
    resumable = {name for name, knob in KNOBS.items() if knob.resume == "yes"}
    objective = ("algorithm.", "data.", "sft.", "model.", "agents.", "rollout.sampling.")
    assert {name for name in resumable if name.startswith(objective)} == {
        "sft.epochs",
        "model.tiny.cache_dir",
        "model.tiny.cold_start.max_seconds",
        "agents.max_concurrent_episodes",
    }
    assert not {"run.seed", "trainer.beta1", "rollout.dtype", "rewards.judge.model"} & resumable
    assert {"trainer.lr", "run.steps", "alarms.kl", "eval.variants[].context"} <= resumable
    config = SynthesisConfig(
        family="general", dir="a", author=AuthorConfig(base_url="http://localhost", model="a")
    )
    claimed = _task_settings(config)
    for name, other in {
        "seed": replace(config, seed=7),
        "general.steps": replace(config, general=replace(config.general, steps=7)),
        "at_once": replace(config, at_once=7),
        "author.model": replace(config, author=replace(config.author, model="b")),
        "budget.tokens": replace(config, budget=replace(config.budget, tokens=7)),
    }.items():
        assert (_task_settings(other) != claimed) == affects_tasks(name), name
        assert KNOBS[f"synthesize.{name}"].resume == ("no" if affects_tasks(name) else "yes")
