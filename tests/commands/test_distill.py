"""`keel distill`: order of stages, resuming, and early checks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.commands.distill import _checked, _select, distill
from keel.configs.distillation import DistillConfig, SelectConfig, SpecialistConfig
from keel.configs.load import load_as, load_config
from keel.configs.schema import ConfigError


def sample(completion: str, correct: float = 1.0, tokens: int = 5, **more: Any) -> dict[str, Any]:
    record = {"id": "p", "domain": "d", "finish_reason": "stop", "tools": [], "tokenizer": "t"}
    record["thinking"] = more.pop("thinking", True)
    record["asked"] = [{"role": "user", "content": more.pop("asked", "?")}]
    record["segments"] = [{"ids": [1, 2], "said": [[1, 2]]}]
    return {
        **{"correct": correct, "error": 0.0, "tokens": tokens, "finish_reason": "stop"},
        "parts": {"format": 1.0},
        "messages": [{"role": "assistant", "content": completion}],
        "record": record,
        **more,
    }


def evaluation(folder: Path, asked: dict[str, Sequence[dict[str, Any]]], domain: str) -> Path:
    folder.mkdir(parents=True)
    common = {"variant": "recipe", "source": domain, "domain": domain, "digest": "", "missing": []}
    rows = [{**common, "id": f"{domain}/{name}", "samples": its} for name, its in asked.items()]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def learned(path: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["specialist"], line["messages"][-1]["content"]) for line in lines]


def test_selection_takes_correct_distinct_completions_of_any_length(tmp_path: Path) -> None:
    first = [
        sample("long", error=1.0),
        sample("long", tokens=9),
        *[sample("short", tokens=3)] * 2,
        sample("wrong", 0.9),
        sample("late", finish_reason="length"),
        sample("unknown", error=1.0),
    ]
    sums = evaluation(tmp_path / "sums", {"1": first, "2": [sample("no", 0.0)]}, "sums")
    out = tmp_path / "out.jsonl"
    table, _ = _select({"adder": sums}, SelectConfig(), out)
    assert learned(out) == [("adder", "long")]
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["messages"][0] == {"role": "user", "content": "?"}
    assert line["source"] == "sums" and line["parts"] == {"correct": 1.0, "format": 1.0}
    assert line["segments"] and "asked" not in line
    name, *counts = table.splitlines()[1].rsplit(maxsplit=9)
    # sampled; unscored, truncated, wrong, by parts, duplicate, same prompt, for balance; selected
    assert (name, counts) == ("sums, thinking", ["8", "2", "1", "2", "0", "1", "1", "0", "1"])
    _select({"adder": sums}, SelectConfig(most_per_prompt=0), out)
    assert learned(out) == [("adder", "long"), ("adder", "short")]


def test_selection_balances_domains_and_modes(tmp_path: Path) -> None:
    many = {str(n): [sample(f"{n}a", tokens=1), sample(f"{n}b", tokens=2)] for n in range(9)}
    few = {"1": [sample("plain", thinking=False)], "2": [sample("deep")]}
    folders = {
        "a": evaluation(tmp_path / "a", many, "many"),
        "b": evaluation(tmp_path / "b", few, "few"),
    }
    out = tmp_path / "out.jsonl"
    _select(folders, SelectConfig(balance=3, most_per_prompt=2), out)
    # The first of each prompt before the second of any.
    assert [text for _, text in learned(out)] == ["0a", "1a", "2a", "plain", "deep"]
    _select(folders, SelectConfig(balance=0, most_per_prompt=2), out)
    assert len(learned(out)) == 20


class Keel:
    def __init__(self) -> None:
        self.ran: list[tuple[str, dict[str, str]]] = []
        self.fails, self.status = "", 0

    def __call__(self, words: Sequence[str]) -> int:
        command, path, *knobs = words
        options = dict(knob.split("=", 1) for knob in knobs)
        if "run.dir" not in options:
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


@pytest.mark.parametrize("status", [143, 0])  # 0: stopped by Ctrl-C with a checkpoint
def test_links_run_in_order_and_resume(tmp_path: Path, status: int) -> None:
    keel = Keel()
    keel.fails, keel.status = "specialists/walker", status
    assert distill(recipe(tmp_path), keel) == (status or 130)
    assert [command for command, _ in keel.ran] == ["train", "eval", "eval", "train"]
    keel.fails = ""
    assert distill(recipe(tmp_path, select=SelectConfig(balance=2)), keel) == 0
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
    report = (tmp_path / "report.md").read_text()
    assert report.count("0.530 (0.400–0.800)") == 1
    before = len(keel.ran)
    same = recipe(tmp_path, select=SelectConfig(balance=2))
    assert distill(same, keel) == 0 and len(keel.ran) == before  # all is done
    with pytest.raises(ConfigError, match="sample speller was run"):
        distill(recipe(tmp_path, samples=8), keel)


def test_specialists_teach_on_policy(tmp_path: Path) -> None:
    keel = Keel()
    knobs = ("run.steps=7", "algorithm.filter_groups=reward")
    options = {"method": "on_policy", "on_policy_overrides": knobs}
    assert distill(recipe(tmp_path, **options), keel) == 0
    assert [command for command, _ in keel.ran] == ["train", "eval"] * 4
    lessons = load_config(tmp_path / "lessons.yaml")
    assert lessons.run.steps == 7 and lessons.model.path == "tiny"
    teachers = {source.name: Path(source.teacher) for source in lessons.data.sources}
    root = tmp_path / "specialists"
    assert teachers == {"spelling": root / "speller" / "model", "spiral": root / "walker" / "model"}
    assert all(s.kl_coef == 1 and not any(s.rewards.values()) for s in lessons.data.sources)
    assert lessons.algorithm.filter_groups == "none"
    with pytest.raises(ConfigError, match=r"kl_coef=0\.5.*is fixed by method: on_policy"):
        recipe(tmp_path, on_policy_overrides=("data.sources[spelling].kl_coef=0.5",))


def test_invalid_links_are_refused_before_any_run(tmp_path: Path) -> None:
    keel = Keel()
    wrong = SpecialistConfig(name="a", sources=("speling",))
    misspelt = SpecialistConfig(name="a", sources=("spelling",), overrides=("run.step=3",))
    large = ("model.path=owner/model",)
    cases: dict[str, dict[str, Any]] = {
        "specialists": {"specialists": (wrong,)},
        "run.step": {"specialists": (misspelt,)},
        "sft.epoch": {"sft_overrides": ("sft.epoch=3",)},
        "holdout": {"overrides": ("data.sources[spelling].holdout=0",)},
        "trainer.lr": {"overrides": large},  # of the tiny model
    }
    for knob, changes in cases.items():
        with pytest.raises(ConfigError, match=knob):
            distill(recipe(tmp_path, **changes), keel)
    rate = ("trainer={lr: 1e-5}",)
    assert _checked(recipe(tmp_path, overrides=large, sft_overrides=rate))[0].trainer.lr == 1e-5
    assert keel.ran == []
    for name in ("quickstart", "specialists"):
        _checked(load_as(DistillConfig, name))
