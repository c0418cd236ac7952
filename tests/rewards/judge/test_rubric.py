"""Rubrics as data: what is refused, and what a score is."""

from __future__ import annotations

import logging
import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.configs.load import load_config
from keel.configs.schema import ConfigError, JudgeConfig
from keel.rewards.judge import cache as cache_module
from keel.rewards.judge.cache import FILE, Cache, Memory
from keel.rewards.judge.rubric import rubric_from
from keel.rewards.judge.specs import is_judged, judged_spec

ONE = {"name": "a", "text": "says a", "weight": 1}


def weighted(*weights: Any) -> dict[str, Any]:
    return {
        "kind": "rubric",
        "criteria": [{"name": f"c{i}", "text": "t", "weight": w} for i, w in enumerate(weights)],
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "rubric"}, "rubric: without criteria"),
        ({"kind": "rubric", "criteria": []}, "rubric: without criteria"),
        ({"kind": "rubric", "criteria": "be nice"}, "rubric: without criteria"),
        ({"kind": "rubric", "criteria": ["nice"]}, "criterion 1 must have `name`"),
        (
            {"kind": "rubric", "criteria": [{"text": "t", "weight": 1}]},
            "criterion 1 needs a `name`",
        ),
        ({"kind": "rubric", "criteria": [{**ONE, "text": " "}]}, "'a' needs a `text`"),
        ({"kind": "rubric", "criteria": [{**ONE, "wieght": 1}]}, "did you mean weight"),
        ({"kind": "rubric", "criteria": [ONE], "criterion": 1}, "did you mean criteria"),
        ({"kind": "rubric", "criteria": [ONE, ONE]}, "more than one criterion has the name 'a'"),
        ({"kind": "rubric", "criteria": [{**ONE, "thinking": 1}]}, "`thinking` must be true"),
        ({"kind": "rubric", "criteria": [ONE], "reference": 3}, "`reference` must be text"),
        (weighted(0.5, 0.4), r"the weights 0.5 \+ 0.4 sum to 0.9, must sum to 1"),
        (weighted(1.5, -0.5), "weight -0.5 must be positive"),
        (weighted(1, 0), "weight 0 must be positive"),
        (weighted(math.nan), "weight nan must be positive"),
        (weighted("1"), "needs a `weight`, a number; it has '1'"),
        (weighted(True), "needs a `weight`, a number"),
        (weighted(*[1 / 33] * 33), "33 criteria"),
        ({"kind": "rubrik"}, "a judge reads rubric, proof"),
        ({"kind": "proof", "alpha": 1.2}, r"alpha 1.2 must be a number in \[0, 1\]"),
        ({"kind": "proof", "refrence": ""}, "did you mean reference"),
    ],
)
def test_bad_specs_are_named(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judged_spec(spec)


def test_weights_sum_up_to_rounding() -> None:
    rubric = rubric_from(weighted(0.333, 0.333, 0.333))
    everything = {f"c{i}": (1.0, "") for i in range(3)}
    assert rubric.judged([everything]).value == pytest.approx(1.0, abs=1e-12)


def test_which_specs_need_a_judge() -> None:
    assert is_judged({"kind": "rubric"})
    assert is_judged({"kind": "proof"})
    assert is_judged({"kind": "refusal"})
    with pytest.raises(ValueError, match=r"`refuse` must be true or false, is 'yes'"):
        judged_spec({"kind": "refusal", "refuse": "yes"})
    assert not is_judged({"kind": "answer"})
    assert not is_judged({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"base_url": "localhost:8000"},
            "rewards.judge.base_url = 'localhost:8000': must be a URL",
        ),
        ({"model": ""}, "rewards.judge.model = '': goes together with"),
        ({"base_url": ""}, "rewards.judge.model = 'm': goes together with"),
        ({"samples": 0}, "rewards.judge.samples = 0"),
        ({"max_failure_fraction": 1.5}, "rewards.judge.max_failure_fraction = 1.5"),
        ({"max_concurrent": 2000}, "at most 1000"),
        ({"max_calls": -1}, "rewards.judge.max_calls = -1"),
        ({"timeout_s": 0.0}, "rewards.judge.timeout_s = 0.0"),
        ({"temperature": 3.0}, "rewards.judge.temperature = 3.0"),
        ({"extra": {"model": "x"}}, "are set by Keel"),
    ],
)
def test_knobs_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgeConfig(**{"base_url": "http://h/v1", "model": "m", **changes})


@pytest.mark.parametrize(
    "changes", [{"api_key_env": "sk-12345"}, {"base_url": "http://me:sk-12345@h/v1"}]
)
def test_a_key_in_the_recipe_is_refused_and_not_repeated(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        JudgeConfig(**{"base_url": "http://h/v1", "model": "m", **changes})
    assert "sk-12345" not in str(refused.value)


def test_the_judge_in_a_recipe() -> None:
    config = load_config(
        "quickstart",
        ["rewards.judge.base_url=http://h/v1", "rewards.judge.model=m", "rewards.judge.samples=3"],
    )
    assert config.rewards.judge == JudgeConfig(base_url="http://h/v1", model="m", samples=3)


def test_the_cache_in_a_file(tmp_path: Path) -> None:
    folder = str(tmp_path / "a" / "b")
    first, second = Cache(folder), Cache(folder)
    first.put("key", "old")
    second.put("key", "new ✓")
    assert first.get("key") == "new ✓"
    assert first.get("other") is None
    first.close()
    second.close()
    (tmp_path / FILE).write_text("not a database, " * 100)
    with pytest.raises(ValueError, match=r"rewards.judge.cache_dir = .*delete judge.sqlite"):
        Cache(str(tmp_path))
    with pytest.raises(ValueError, match=r"rewards.judge.cache_dir = "):
        Cache(str(tmp_path / FILE))


def test_the_cache_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MOST_BYTES", 20_000)
    cache = Memory()
    cache.put("first", "kept")
    cache.put("second", "goes")
    for number in range(100):
        cache.put(f"key {number}", "x" * 1000)
        cache.put(f"key {number}", "y" * 1000)
        assert cache.get("first") == "kept"  # what is read stays
        assert cache.get(f"key {max(0, number - 5)}") == "y" * 1000
        assert sum(map(sys.getsizeof, cache._replies.values())) < 20_000
    assert cache.get("second") is None and cache.get("key 70") is None
    cache.put("long", "z" * 30_000)
    assert cache.get("long") is None and cache._bytes == 0
    cache.close()


def test_a_cache_that_breaks_warns_once(tmp_path: Path, logged: list[logging.LogRecord]) -> None:
    cache = Cache(str(tmp_path))
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("DROP TABLE replies")
    other.close()
    cache.put("key", "reply")
    assert cache.get("key") is None
    cache.close()
    assert len(logged) == 1
