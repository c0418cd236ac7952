"""Tables of pass rates, and training on prompts within bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError, DataConfig, SourceConfig
from keel.data.dataset import Dataset, load_dataset
from keel.data.pass_rates import pass_rate_of
from keel.rl.types import Prompt
from tests.data.rates import scored


def load(seed: int = 0, **knobs: Any) -> Dataset:
    knobs = {"size": 12, "holdout": 2, **knobs}
    sums = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", **knobs)
    return load_dataset(DataConfig(sources=(sums,)), seed=seed)


def prompts(dataset: Dataset) -> list[Prompt]:
    return list(dataset.train.sources["sums"])


def write(path: Path, passes: dict[str, int], known: list[Prompt], source: str = "sums") -> Path:
    rates = [
        pass_rate_of(prompt, source, [scored(prompt, passes[prompt.prompt_id])])
        for prompt in known
        if prompt.prompt_id in passes
    ]
    path.write_text("".join(f"{json.dumps(rate.line())}\n" for rate in rates))
    return path


def test_bounds(tmp_path: Path) -> None:
    whole = load()
    passes = {prompt.prompt_id: i % 5 for i, prompt in enumerate(prompts(whole))}
    table = write(tmp_path / "t.jsonl", passes, prompts(whole))
    for least, most in ((0.0, 1.0), (0.25, 0.75), (0.5, 1.0)):
        chosen = load(pass_rates=str(table), least_pass_rate=least, most_pass_rate=most)
        wanted = [n for n, c in passes.items() if c and least <= c / 4 <= most]
        assert [prompt.prompt_id for prompt in prompts(chosen)] == wanted
        report = chosen.report["sums"]
        assert report.train == len(wanted)
        assert chosen.heldout == whole.heldout


def test_unknown_prompts(tmp_path: Path) -> None:
    whole = prompts(load())
    table = write(tmp_path / "t.jsonl", {p.prompt_id: 2 for p in whole[1:]}, whole)
    report = load(pass_rates=str(table), size=11).report["sums"]
    assert [note.split()[-1] for note in report.notes] == [whole[0].prompt_id, "sums/11"]


def test_tables_of_other_prompts(tmp_path: Path) -> None:
    whole = prompts(load())
    passes = {p.prompt_id: 2 for p in whole}
    table = write(tmp_path / "t.jsonl", passes, whole)
    with pytest.raises(ConfigError, match="sums/2"):
        load(seed=1, pass_rates=str(table))
    write(table, passes, whole, source="others")
    with pytest.raises(ConfigError, match=r"sums\]\.pass_rates.*others"):
        load(pass_rates=str(table))
    with pytest.raises(ConfigError, match=r"pass_rates = '.*/no'"):
        load(pass_rates=str(tmp_path / "no"))
    write(table, dict.fromkeys(passes, 0), whole)
    with pytest.raises(ConfigError, match="pass rates"):
        load(pass_rates=str(table))
