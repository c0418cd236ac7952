"""The folder of a filter."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    FilterConfig,
    RunConfig,
    SourceConfig,
)
from keel.data.dataset import Dataset, load_dataset
from keel.data.pass_rate_filter import FilterFolder
from keel.rl.types import Group, Prompt, ScoredGroup
from tests.rl.rollouts import segment, trajectory


def scored(
    prompt: Prompt, passes: int, *, samples: int = 4, dropped: tuple[str, ...] = ()
) -> ScoredGroup:
    """`samples` completions, those `dropped` among them."""
    there = samples - len(dropped)
    rewards = np.array([float(i < passes) for i in range(there)], np.float32)
    return ScoredGroup(
        group=Group(
            prompt=prompt,
            trajectories=tuple(
                trajectory(segment(name=prompt.prompt_id), sibling=i) for i in range(there)
            ),
            dropped=dropped,
        ),
        rewards_G=rewards,
        parts_G=tuple({"correct": float(reward)} for reward in rewards),
        advantages_G=rewards * 0,
    )


GAME = EnvironmentConfig(target="games:Guess")


def config(folder: Path, *sources: SourceConfig, **filter_by: Any) -> Config:
    sums = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=6, domain="d")
    return Config(
        data=DataConfig(sources=sources or (sums,)),
        run=RunConfig(dir=str(folder)),
        filter=FilterConfig(samples=4, **filter_by),
    )


def dataset(config: Config) -> Dataset:
    return load_dataset(config.data, seed=config.run.seed)


def opened(config: Config, policy: str = "the base model") -> FilterFolder:
    return FilterFolder(config, dataset(config).train.sources, policy)


def kept(folder: Path, source: str = "sums") -> list[dict[str, Any]]:
    lines = (folder / "filter" / "kept" / f"{source}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def names(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def test_resuming_with_other_bounds(tmp_path: Path) -> None:
    first = config(tmp_path)
    with opened(first) as out:
        assert names(out.waiting) == [f"sums/{i}" for i in range(6)]
        for prompt, passes in zip(out.waiting[:3], (0, 4, 1), strict=True):
            out.record(prompt, [scored(prompt, passes)])
        lost = out.waiting[0]
        out.record(lost, [scored(lost, 0, dropped=("late",) * 4)])
        assert out.progress() == "2 kept so far"
        report = out.finish()
    assert [line["id"] for line in kept(tmp_path)] == ["1", "2"]
    assert "sums            4   0.312   0.500     2" in report
    table = tmp_path / "filter" / "pass_rates.jsonl"
    with table.open("a") as file:
        file.write('{"id": "sums/4", "sour')  # the process was killed
    with opened(replace(first, filter=replace(first.filter, most_pass_rate=0.5))) as out:
        assert names(out.waiting) == ["sums/3", "sums/4", "sums/5"]
        for prompt in out.waiting:
            out.record(prompt, [scored(prompt, 2)])
        report = out.finish()
    assert [line["id"] for line in kept(tmp_path)] == ["2", "3", "4", "5"]
    assert "1 passed more often than 0.5" in report
    assert len(table.read_text().splitlines()) == 7
    with opened(first) as out:
        assert out.waiting == []


def test_other_settings_are_refused(tmp_path: Path) -> None:
    first = config(tmp_path)
    with opened(first) as out:
        for prompt in out.waiting:
            out.record(prompt, [scored(prompt, 1)])
        with pytest.raises(ConfigError, match=r"filter\.dir"), opened(first):
            pass
    for other, knob in (
        (replace(first, filter=FilterConfig(samples=5)), r"filter\.samples"),
        (replace(first, eval=EvalConfig(temperature=0.5)), r"eval\.temperature"),
    ):
        with pytest.raises(ConfigError, match=knob), opened(other):
            pass
    with pytest.raises(ConfigError, match="step_000002"):
        opened(first, "step_000002").__enter__()
    same = replace(first, trainer=replace(first.trainer, lr=1e-3), eval=EvalConfig(samples=3))
    with opened(same) as out:  # rates do not depend on these
        assert out.waiting == []
    prompts = dataset(first).train.sources["sums"]
    changed = (replace(prompts[0], reward={"kind": "proof"}), *prompts[1:])
    for some in (changed, prompts[1:]):
        with pytest.raises(ConfigError, match="sums/0"):
            FilterFolder(first, {"sums": some}, "the base model").__enter__()


def test_kept_prompts_round_trip(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    system = {"role": "system", "content": "Mine."}
    ask = {"role": "user", "content": "1 + 1 = ½?"}
    lines.write_text(
        json.dumps({"id": 7, "messages": [system, ask], "answer": "0.10", "match": "exact"})
        + '\n{"prompt": "Name it.", "criteria": [{"name": "n", "text": "Named.", "weight": 1}]}\n'
    )
    sums: dict[str, Any] = {"source": "reasoning_gym", "task": "chain_sum", "system": "Be brief."}
    plain: dict[str, Any] = {"source": "jsonl", "path": str(lines), "kl_coef": 0.1}
    sources = (
        SourceConfig(name="lines", system_template="reasoning", **plain),
        SourceConfig(name="sums", size=3, system_template="reasoning", **sums),
        SourceConfig(name="tasks", source="environment", size=3, environment=GAME),
    )
    first = config(tmp_path, *sources)
    with opened(first) as out:
        for prompt in out.waiting:
            out.record(prompt, [scored(prompt, 1)])
        out.finish()
    assert [line["pass_rate"] for line in kept(tmp_path, "lines")] == [0.25, 0.25]
    read = {"source": "jsonl", "task": "", "size": 0}
    again = tuple(
        replace(s, path=str(tmp_path / f"filter/kept/{s.name}.jsonl"), **read) for s in sources
    )
    read = load_dataset(DataConfig(sources=again), seed=0).train.sources
    assert read == dataset(first).train.sources
