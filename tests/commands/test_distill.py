"""`keel distill`: order of stages, resuming, and early checks."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.commands.distill import Commands, _checked, chain, distill
from keel.configs.auto import KNOBS
from keel.configs.distillation import DistillConfig, SelectConfig, SpecialistConfig
from keel.configs.load import load_config, load_distillation, load_recipe
from keel.configs.schema import ConfigError
from keel.data.distilled import select


def sample(completion: str, correct: float = 1.0, tokens: int = 5, **more: Any) -> dict[str, Any]:
    record = {
        "id": "p",
        "domain": "d",
        "finish_reason": "stop",
        "thinking": more.pop("thinking", True),
        "tools": [],
        "asked": [{"role": "user", "content": more.pop("asked", "?")}],
        "tokenizer": "t",
        "segments": [{"ids": [1, 2], "said": [[1, 2]]}],
    }
    return {
        "correct": correct,
        "error": 0.0,
        "tokens": tokens,
        "finish_reason": "stop",
        "parts": {"format": 1.0},
        "messages": [{"role": "assistant", "content": completion}],
        "record": record,
        **more,
    }


def evaluation(folder: Path, asked: dict[str, Sequence[dict[str, Any]]], domain: str) -> Path:
    """Write an evaluation folder: prompt → its completions."""
    folder.mkdir(parents=True)
    rows = [
        {
            "variant": "recipe",
            "source": domain,
            "domain": domain,
            "id": f"{domain}/{name}",
            "digest": "",
            "samples": samples,
            "missing": [],
        }
        for name, samples in asked.items()
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def learned(path: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["specialist"], line["messages"][-1]["content"]) for line in lines]


def test_selection_prefers_correct_distinct_short_completions(tmp_path: Path) -> None:
    sums = evaluation(
        tmp_path / "sums",
        {
            "1": [
                sample("long", error=1.0),
                sample("long", tokens=9),
                sample("short", tokens=3),
                sample("short", tokens=3),
                sample("wrong", 0.9),
                sample("late", finish_reason="length"),
                sample("unknown", error=1.0),
            ],
            "2": [sample("no", 0.0)],
        },
        "sums",
    )
    out = tmp_path / "out.jsonl"
    table, _ = select({"adder": sums}, SelectConfig(), out)
    assert learned(out) == [("adder", "short")]
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["messages"][0] == {"role": "user", "content": "?"}
    assert line["source"] == "sums" and line["parts"] == {"correct": 1.0, "format": 1.0}
    assert line["segments"] and "asked" not in line
    name, *counts = table.splitlines()[1].rsplit(maxsplit=9)
    # sampled; wrong, unscored, truncated, by parts, duplicate, longer, for balance; selected
    assert (name, counts) == ("sums, thinking", ["8", "2", "2", "1", "0", "1", "1", "0", "1"])
    select({"adder": sums}, SelectConfig(most_per_prompt=0), out)
    assert learned(out) == [("adder", "short"), ("adder", "long")]


def test_reward_parts_limit_the_selection(tmp_path: Path) -> None:
    cases = [("good", {"format": 1.0, "refusal": 0.0}), ("bare", {}), ("odd", {"format": 0.5})]
    cases += [("declines", {"format": 1.0, "refusal": 0.5})]
    samples = {text: [sample(text, parts=parts, asked=text)] for text, parts in cases}
    folder = {"a": evaluation(tmp_path / "a", samples, "chat")}
    out = tmp_path / "out.jsonl"
    table, _ = select(
        folder, SelectConfig(least_parts={"format": 1}, most_parts={"refusal": 0.4}), out
    )
    assert [text for _, text in learned(out)] == [
        "good",
        "bare",
    ]  # completions without the part stay
    assert table.splitlines()[1].split()[-5] == "2"
    with pytest.raises(ConfigError, match=r"no completion has a part 'fromat'.* format, refusal"):
        select(folder, SelectConfig(least_parts={"fromat": 1}), out)


def test_selection_balances_domains_and_modes(tmp_path: Path) -> None:
    many = {str(n): [sample(f"{n}a", tokens=1), sample(f"{n}b", tokens=2)] for n in range(9)}
    few = {"1": [sample("plain", thinking=False)], "2": [sample("deep")]}
    folders = {
        "a": evaluation(tmp_path / "a", many, "many"),
        "b": evaluation(tmp_path / "b", few, "few"),
    }
    out = tmp_path / "out.jsonl"
    select(folders, SelectConfig(balance=3, most_per_prompt=2), out)
    # The first of each prompt before the second of any.
    assert [text for _, text in learned(out)] == ["0a", "1a", "2a", "plain", "deep"]
    select(folders, SelectConfig(balance=0, most_per_prompt=2), out)
    assert len(learned(out)) == 20


def test_empty_selection_reports_reasons(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a", {"1": [sample("no", 0.0)]}, "sums")
    with pytest.raises(ConfigError, match=r"learn(.|\n)*sums, thinking +1 +1 "):
        select({"a": folder}, SelectConfig(), tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="cannot be read as an evaluation"):
        select({"a": tmp_path / "none"}, SelectConfig(), tmp_path / "out.jsonl")


class Keel:
    """Commands with scripted outcomes."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, dict[str, str]]] = []
        self.fails, self.status = "", 0

    def __call__(self, words: Sequence[str]) -> int:
        command, path, *knobs = words
        options = dict(knob.split("=", 1) for knob in knobs)
        if command == "sft":
            options = {"run.dir": load_config(path).run.dir}
        self.ran.append((command, options))
        if self.fails and self.fails in options["run.dir"]:
            return self.status
        if command != "eval":
            (Path(options["run.dir"]) / "model").mkdir(parents=True)
            return 0
        folder, sources = Path(options["eval.dir"]), json.loads(options.get("data.train_on", "[]"))
        if options.get("eval.prompts") == "train":
            evaluation(folder, {"1": [sample(sources[0], asked=sources[0])]}, sources[0])
        folder.mkdir(parents=True, exist_ok=True)
        of = {"pass@1": 0.5 + 0.01 * len(self.ran), "pass@1_interval": [0.4, 0.8]}
        sets = dict.fromkeys(json.loads(options["data.only"]), of)
        (folder / "results.json").write_text(json.dumps({"results": {"recipe": sets}}))
        return 0


def recipe(folder: Path, **changes: Any) -> DistillConfig:
    known: dict[str, Any] = {
        "dir": str(folder),
        "recipe": "quickstart",
        "specialists": (
            SpecialistConfig(name="speller", sources=("spelling",), overrides=("run.steps=3",)),
            SpecialistConfig(name="walker", sources=("spiral",)),
        ),
        "mixed_overrides": ("run.steps=5",),
    }
    return DistillConfig(**{**known, **changes})


def test_context_fits_every_specialist(
    tmp_path: Path,
) -> None:
    longer = ("rollout.sampling.max_tokens=1000", "model.tiny.max_context=2048")
    roomy = SpecialistConfig(name="speller", sources=("spelling",), overrides=longer)
    config = recipe(tmp_path, specialists=(roomy,), select=SelectConfig(least=0.7))
    plain = _checked(recipe(tmp_path))[0].sft
    made = _checked(config)[0].sft
    (source,) = made.sources
    assert source.least_reward == 0.7
    assert made.max_context_tokens > plain.max_context_tokens


def test_auto_knobs_stay_open_for_sft(tmp_path: Path) -> None:
    overrides = ("rollout.engines=2", "trainer.ranks=2", "trainer.zero_stage=2")
    ours = ("trainer.micro_batch_tokens=512",)
    config = recipe(tmp_path, overrides=overrides, sft_overrides=ours)
    assert distill(config, Keel()) == 0
    made, open_knobs = load_recipe(tmp_path / "lessons.yaml")
    assert open_knobs == KNOBS - {"trainer.micro_batch_tokens"}
    assert made.trainer.micro_batch_tokens == 512
    # The RL layout is separate.
    assert (made.rollout.engines, made.trainer.ranks, made.trainer.zero_stage) == (1, 1, 0)


@pytest.mark.parametrize("status", [143, 0])  # 0: stopped by Ctrl-C with a checkpoint
def test_links_run_in_order_and_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    keel = Keel()
    keel.fails, keel.status = "specialists/walker", status
    assert distill(recipe(tmp_path), keel) == (status or 130)
    assert "train walker has not finished" in capsys.readouterr().out
    assert [command for command, _ in keel.ran] == ["train", "eval", "eval", "train"]
    keel.fails = ""
    assert distill(recipe(tmp_path, select=SelectConfig(balance=2)), keel) == 0
    output = capsys.readouterr().out
    rest = [command for command, _ in keel.ran[4:]]
    assert rest == ["train", "eval", "eval", "sft", "eval", "train", "eval"]
    (_, speller), (_, taught), (_, measured) = keel.ran[:3]
    assert speller["run.steps"] == "3" and speller["data.train_on"] == '["spelling"]'
    # Evaluates a model folder, so only engines start.
    assert taught["model.path"] == measured["model.path"] == f"{speller['run.dir']}/model"
    assert taught["run.dir"] == measured["run.dir"] != speller["run.dir"]
    assert taught["eval.samples"] == "4" and "eval.prompts" not in measured
    # Held-out prompts must stay unseen, so all learning links share the same sources.
    known = [one.get("data.only") for _, one in keel.ran]
    both = '["spelling", "spiral"]'
    assert known == [both, both, '["spelling"]', *[both] * 3, '["spiral"]', None, *[both] * 3]
    lessons = load_config(tmp_path / "lessons.yaml")
    assert lessons.sft.sources[0].path == str(tmp_path / "distilled.jsonl")
    start, base = lessons.model, load_config("quickstart")
    assert start == base.model and lessons.data.sources == base.data.sources
    assert lessons.sft.max_context_tokens == max(512, base.max_context)
    assert sorted(who for who, _ in learned(tmp_path / "distilled.jsonl")) == ["speller", "walker"]
    _, mixed = [one for one in keel.ran if one[0] == "train"][-1]
    assert mixed["model.path"] == str(tmp_path / "distilled" / "model")
    assert mixed["run.steps"] == "5" and "data.train_on" not in mixed
    table = [
        line.split() for line in output.splitlines() if line.startswith(("spelling", "spiral"))
    ]
    assert [len(line) for line in table[-2:]] == [7, 7]
    assert "0.530 (0.400–0.800)" in output and (tmp_path / "report.md").exists()
    before = len(keel.ran)
    same = recipe(tmp_path, select=SelectConfig(balance=2))
    assert distill(same, keel) == 0 and len(keel.ran) == before  # all is done
    with pytest.raises(ConfigError, match=r"sample speller has run"):
        distill(recipe(tmp_path, samples=8), keel)


def test_folder_names_survive_yaml(tmp_path: Path) -> None:
    root = tmp_path / "a: b #1 ${c}"
    words = [word for link in chain(recipe(root)) for word in link.command if str(tmp_path) in word]
    knobs = [word for word in words if word.startswith(("run.dir=", "eval.dir=", "model.path="))]
    assert len(knobs) > 10
    for knob in knobs:
        config = load_config("quickstart", [knob])
        paths = {"run": config.run.dir, "eval": config.eval.dir, "model": config.model.path}
        assert Path(paths[knob.partition(".")[0]]).is_relative_to(root), knob
    with pytest.raises(ConfigError, match=r"'#1/mixed'"):
        load_config("quickstart", ["run.dir=runs/a #1/mixed"])
    assert load_config("quickstart", ["run.dir=runs/a#1"]).run.dir == "runs/a#1"


def test_unlogged_result_is_reused(tmp_path: Path) -> None:
    """The process was killed between the end of a command and its log line."""
    keel = Keel()
    assert distill(recipe(tmp_path), keel) == 0
    lines = (tmp_path / "links.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "links.jsonl").write_text("".join(lines[:-1]))
    before = len(keel.ran)
    assert distill(recipe(tmp_path), keel) == 0 and len(keel.ran) == before


@pytest.mark.e2e
def test_running_command_handles_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Commands() as commands:
        wait = "import os, signal, sys; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
        commands.start = [sys.executable, "-c", wait]
        assert commands.run(()) == 128 + signal.SIGTERM
        assert commands.status == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_invalid_links_are_refused_before_any_run(tmp_path: Path) -> None:
    keel = Keel()
    wrong = SpecialistConfig(name="a", sources=("speling",))
    with pytest.raises(ConfigError, match=r"specialists\[a\].sources: .* no source 'speling'"):
        distill(recipe(tmp_path, specialists=(wrong,)), keel)
    wrong = SpecialistConfig(name="a", sources=("spelling",), overrides=("run.step=3",))
    with pytest.raises(ConfigError, match=r"run.step"):
        distill(recipe(tmp_path, specialists=(wrong,)), keel)
    with pytest.raises(ConfigError, match=r"sft.epoch"):
        distill(recipe(tmp_path, sft_overrides=("sft.epoch=3",)), keel)
    with pytest.raises(ConfigError, match="spelling has no holdout"):
        distill(recipe(tmp_path, overrides=("data.sources[spelling].holdout=0",)), keel)
    with pytest.raises(ConfigError, match="specialists = "):
        recipe(
            tmp_path,
            specialists=(
                SpecialistConfig(name="a", sources=("spelling",)),
                SpecialistConfig(name="b", sources=("spelling",)),
            ),
        )
    large = ("model.path=owner/model",)
    with pytest.raises(ConfigError, match=r"trainer.lr = 0.0005 is for the tiny model"):
        distill(recipe(tmp_path, overrides=large), keel)
    rate = ("trainer={lr: 1e-5}",)
    assert _checked(recipe(tmp_path, overrides=large, sft_overrides=rate))[0].trainer.lr == 1e-5
    assert keel.ran == []


def test_missing_inputs_are_refused_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keel = Keel()
    with pytest.raises(ConfigError, match=r"keel.examples.small small-tasks"):
        distill(replace(load_distillation("specialists"), dir="chain"), keel)
    missing = recipe(
        tmp_path / "chain",
        overrides=("model.path=runs/sft-specialists/model",),
        sft_overrides=("trainer.lr=1e-5",),
    )
    with pytest.raises(ConfigError, match=r"`keel sft sft-specialists` is that run"):
        distill(missing, keel)
    assert keel.ran == [] and not [*tmp_path.iterdir()]
    # Remaining links start from existing models.
    (tmp_path / "runs/sft-specialists/model").mkdir(parents=True)
    keel.fails, keel.status = "mixed", 1
    assert distill(missing, keel) == 1
    (tmp_path / "runs/sft-specialists/model").rmdir()
    keel.fails = ""
    assert distill(missing, keel) == 0


def test_later_links_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    keel, wandb = Keel(), ("run.trackers=[wandb]",)
    with pytest.raises(ConfigError, match=r"^mix: .*wandb"):
        distill(recipe(tmp_path / "chain", mixed_overrides=wandb), keel)
    with pytest.raises(ConfigError, match=r"^distill: .*wandb"):
        distill(recipe(tmp_path / "chain", sft_overrides=wandb), keel)
    start = ("model.path=./nowhere",)
    walker = SpecialistConfig(name="walker", sources=("spiral",), overrides=start)
    known = recipe(tmp_path).specialists
    with pytest.raises(ConfigError, match=r"^train walker: model.path = '\./nowhere'"):
        distill(recipe(tmp_path / "chain", specialists=(known[0], walker)), keel)
    short = ("eval.variants=[{name: long, max_tokens: 100000}]",)
    with pytest.raises(ConfigError, match=r"^evaluate mixed: eval.variants\[long\].max_tokens"):
        distill(recipe(tmp_path / "chain", mixed_overrides=short), keel)
    assert keel.ran == [] and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["quickstart", "specialists"])
def test_shipped_chains_are_valid(name: str) -> None:
    _checked(load_distillation(name))


def test_specialists_cover_all_domains_and_modes() -> None:
    config = load_distillation("specialists")
    recipe = load_config(config.recipe)
    sources = {source.name: source for source in recipe.data.sources}
    modes = {
        each.name: {(sources[name].domain_name, sources[name].thinking) for name in each.sources}
        for each in config.specialists
    }
    both = ("mathematics", "code", "logic", "general-agents", "search-agents")
    expected = {domain: {(domain, True), (domain, False)} for domain in both}
    assert modes == expected | {"coding-agents": {("coding-agents", False)}}
    assert sum(map(len, (each.sources for each in config.specialists))) == len(sources)
    start = load_config("sft-specialists")
    assert recipe.model.path == f"{start.run.dir}/model", "they begin with the supervised start"
    assert {one.name for one in start.sft.sources} == sources.keys()
