"""Datasets: held-out questions, duplicates, omitted prompts, and the recipes of docs/data.md."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import ConfigError, DataConfig, SourceConfig
from keel.data.dataset import Dataset, load_dataset
from keel.data.jsonl import load_jsonl
from keel.data.procedural import load_reasoning_gym
from keel.rl.types import Prompt


def prompts_of(dataset: Dataset) -> int:
    return sum(map(len, dataset.train.sources.values()))


def gym(name: str = "sums", task: str = "chain_sum", size: int = 40, **knobs: Any) -> SourceConfig:
    return SourceConfig(name=name, source="reasoning_gym", task=task, size=size, **knobs)


def load(*sources: SourceConfig, seed: int = 0, **knobs: Any) -> Dataset:
    return load_dataset(
        DataConfig(sources=sources, **knobs), seed=seed, count_tokens=lambda p: len(question(p))
    )


def question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def trained(dataset: Dataset) -> set[str]:
    return {question(prompt) for prompt in dataset.train.take(2 * prompts_of(dataset))}


def held(dataset: Dataset, name: str = "sums") -> list[str]:
    return [question(prompt) for prompt in dataset.heldout[name]]


# Many duplicates.
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "seed": 5}


def test_heldout_questions_never_train() -> None:
    dataset = load(gym(size=200, holdout=20, params=SMALL))
    report = dataset.report["sums"]
    assert len(set(held(dataset))) == 20 == report.heldout
    assert not trained(dataset) & set(held(dataset))
    assert 200 == report.dropped["duplicate"] + report.heldout + report.train > report.train
    assert report.train == prompts_of(dataset)


def test_held_out_set_is_stable() -> None:
    small = load(gym(size=30, holdout=10))
    assert held(small) == held(load(gym(size=60, holdout=10, weight=3.0), gym("b", "gcd")))
    assert held(small) != held(load(gym(size=30, holdout=10), seed=1))
    few, many = (load(gym(size=n, holdout=20, params=SMALL)) for n in (40, 400))
    assert few.report["sums"].dropped["duplicate"] and held(few) == held(many)


def test_files_are_split_by_the_seed(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"q{i}", "answer": "1"}) for i in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines, lines[3], "{"]))
    source = SourceConfig(
        name="sums", source="jsonl", path=str(path), holdout=6, on_bad_line="skip"
    )
    dataset = load(source)
    assert not trained(dataset) & set(held(dataset))
    assert held(dataset) != [f"q{i}" for i in range(6)]
    assert held(dataset) == held(load(source))
    assert held(dataset) != held(load(source, seed=1))
    report = dataset.report["sums"]
    assert report.train == 24 and report.skipped[0].startswith(f"{path}:32: ")
    assert (report.dropped["malformed"], report.dropped["duplicate"]) == (1, 1)


def test_template_is_ignored_in_comparisons(tmp_path: Path) -> None:
    path, kept = tmp_path / "given.jsonl", tmp_path / "kept.jsonl"
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = SourceConfig(name="given", source="jsonl", path=str(path), template="boxed", holdout=8)
    told = [item.prompt.messages[-1]["content"] for item in load_jsonl(given).items]
    lines = [{**row, "prompt": text} for row, text in zip(rows, told, strict=True)]
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = SourceConfig(name="kept", source="jsonl", path=str(kept))
    dataset = load(again, replace(given, weight=0), max_prompt_tokens=1000)
    assert dataset.report["kept"].dropped["held out by another source"] == 8
    assert not trained(dataset) & set(held(dataset, "given"))
    other = load(given, replace(again, weight=0, holdout=8), max_prompt_tokens=1000)
    both = set(held(other, "given")) & set(held(other, "kept"))
    assert other.report["given"].dropped["held out by another source"] == 8 - len(both)


def test_long_prompts() -> None:
    lengths = sorted(len(question(item.prompt)) for item in load_reasoning_gym(gym(), seed=0).items)
    limit = lengths[len(lengths) // 2]
    with pytest.raises(ConfigError, match="max_prompt_tokens"):
        load(gym(), max_prompt_tokens=limit)
    dataset = load(gym(), max_prompt_tokens=limit, long_prompts="drop")
    dropped = dataset.report["sums"].dropped["too long"]
    assert dropped == sum(length > limit for length in lengths) > 0
    assert max(map(len, trained(dataset))) <= limit


DOCS = Path(__file__).parents[2] / "docs"


def test_every_recipe_of_the_pages_is_read(tmp_path: Path) -> None:
    pages = [(DOCS / name).read_text() for name in ("data.md", "sft.md")]
    ours, others = (re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) for page in pages)
    blocks = [*ours, *(block for block in others if "data:" in block)]
    assert len(blocks) >= 6
    for number, block in enumerate(blocks):
        recipe = tmp_path / f"{number}.yaml"
        recipe.write_text(block)
        assert load_config(recipe).data.sources
