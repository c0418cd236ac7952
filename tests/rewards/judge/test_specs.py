"""Judged specs, the judge's settings, and its caches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError, JudgeConfig
from keel.rewards.judge import client
from keel.rewards.judge.client import _ReplyCache
from keel.rewards.judge.specs import Rubric, judged_spec

ONE = {"name": "a", "text": "says a", "weight": 1}
VERIFICATION = {"kind": "verification", "problem": "a", "proof": "b", "score": 1}


def rubric(*criteria: Any, **more: Any) -> dict[str, Any]:
    return {"kind": "rubric", "criteria": list(criteria), **more}


def weighted(*weights: Any) -> dict[str, Any]:
    return rubric(*({"name": f"c{i}", "text": "t", "weight": w} for i, w in enumerate(weights)))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        *((rubric(), "criteria"), ({"kind": "rubric", "criteria": "be nice"}, "criteria")),
        *((rubric("nice"), "criteria.0"), (rubric({"text": "t", "weight": 1}), "name")),
        *((rubric({**ONE, "text": " "}), "text"), (rubric({**ONE, "wieght": 1}), "wieght")),
        *((rubric(ONE, criterion=1), "criterion"), (rubric(ONE, ONE), "same name")),
        *((rubric({**ONE, "thinking": 1}), "thinking"), (rubric(ONE, reference=3), "reference")),
        *(
            (weighted(*bad), "weight")
            for bad in ((1.5, -0.5), (1, 0), (math.nan,), ("1",), (True,))
        ),
        *((weighted(0.5, 0.4), "sum"), (weighted(*[1 / 33] * 33), "criteria")),
        *(({"kind": "rubrik"}, "rubrik"), ({"kind": "refusal", "refuse": "yes"}, "refuse")),
        *(
            ({"kind": "proof", "alpha": 1.2}, "alpha"),
            ({"kind": "proof", "refrence": ""}, "refrence"),
        ),
        *(({**VERIFICATION, "proof": ""}, "proof"), ({**VERIFICATION, "score": 2}, "score")),
    ],
)
def test_bad_specs_are_refused(spec: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        judged_spec(spec)


def test_weights_sum_up_to_rounding() -> None:
    rubric = Rubric.parse(weighted(0.333, 0.333, 0.333))
    everything = {f"c{i}": (1.0, "") for i in range(3)}
    assert rubric.judged({}, [everything]).value == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        *({"base_url": bad} for bad in ("localhost:8000", "", "http://me:sk-12345@h/v1")),
        *({"model": ""}, {"samples": 0}, {"max_failure_fraction": 1.5}, {"max_calls": -1}),
        *({"timeout_s": 0.0}, {"extra": {"model": "x"}}, {"api_key_env": "sk-12345"}),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.judge\.") as error:
        JudgeConfig(**{"base_url": "http://h/v1", "model": "m", **changes})
    assert "sk-12345" not in str(error.value), "keys are not repeated"


def test_runs_share_a_cache_file(tmp_path: Path) -> None:
    folder = str(tmp_path / "a" / "b")
    first, second = _ReplyCache(folder), _ReplyCache(folder)
    first.put("key", "old")
    second.put("key", "new ✓")
    assert first.get("key") == "new ✓"
    assert first.get("other") is None
    first.close()
    second.close()
    file = tmp_path / client._CACHE_FILE
    file.write_text("not a database, " * 100)
    for path in (tmp_path, file):
        with pytest.raises(ValueError, match=r"rewards\.judge\.cache_dir"):
            _ReplyCache(str(path))


def test_the_memory_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_REPLIES", 3)
    cache = _ReplyCache("")
    for number in range(5):
        cache.put(f"key {number}", "y")
    assert [cache.get(f"key {number}") for number in range(5)] == [None, None, "y", "y", "y"]
