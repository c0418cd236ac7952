"""Differences between configs, and those that a resumed run may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keel.configs.diff import check_resumable, diff_configs, stepping
from keel.configs.schema import Config, ConfigError, DataConfig, SourceConfig


def config(**source: object) -> Config:
    values = {"name": "sums", "source": "reasoning_gym", "task": "chain_sum", "size": 64}
    return Config(data=DataConfig(sources=(SourceConfig(**(values | source)),)))  # type: ignore[arg-type]


def test_differences_are_named_by_knob() -> None:
    assert diff_configs(config(), config()) == []
    a = config(params={"min_terms": 2})
    b = replace(config(size=128), trainer=replace(a.trainer, lr=2e-6))
    assert diff_configs(a, b) == [
        "data.sources[sums].params.min_terms",
        "data.sources[sums].size",
        "trainer.lr",
    ]


def test_resumed_run_may_change_length_only() -> None:
    old = config()
    longer = replace(old, run=replace(old.run, steps=500, dir="runs/moved"))
    check_resumable(old, longer, "runs/x")
    other = replace(longer, trainer=replace(old.trainer, grad_clip=9.0))
    with pytest.raises(ConfigError, match="runs/x") as caught:
        check_resumable(old, other, "runs/x")
    assert "trainer.grad_clip: 1.0 → 9.0" in str(caught.value)
    assert "run.steps" not in str(caught.value)


def test_learning_rate_may_change_and_is_named() -> None:
    old = config()
    new = replace(old, trainer=replace(old.trainer, lr=5e-7, schedule="cosine"))
    check_resumable(old, new, "runs/x")
    assert stepping(old, new) == ["trainer.lr 1e-06 → 5e-07", "trainer.schedule constant → cosine"]
    assert stepping(old, old) == []


def test_evaluation_sources_may_change() -> None:
    old = config()
    measured = SourceConfig(name="test", source="jsonl", path="test.jsonl", holdout="all")
    with_test = replace(old, data=DataConfig(sources=(*old.data.sources, measured)))
    check_resumable(old, with_test, "runs/x")
    check_resumable(with_test, old, "runs/x")
    trained = replace(with_test.data.sources[1], holdout=1)
    with pytest.raises(ConfigError, match=r"data.sources\[test\]"):
        check_resumable(
            old, replace(old, data=DataConfig(sources=(old.data.sources[0], trained))), "runs/x"
        )
